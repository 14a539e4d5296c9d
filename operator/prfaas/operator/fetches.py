"""How the fetch of a model does, read from the pods that fetch: pure.

The fetcher leaves its reason and a sentence in its termination message. A pod that tries again after a failure is still
failing until it has run longer than a failure takes, so that a condition does not swing with every try.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prfaas.api.conditions import FETCH_FAILURES, Reason
from prfaas.kube.resources import Object
from prfaas.operator.observed import broken
from prfaas.operator.verdicts import without_counts

FAILURE_SECONDS = 30.0
"""A fetch that has run this long is past what made it fail before: it would have met it at its start."""
LOST_SECONDS = 180.0
"""An instance that has waited this long for a model that a Job has brought waits in vain: it is not there any more.
Longer than a network file system takes until one node sees what another has written."""
_STOPPED = (143, 137)
"""Exit statuses of a process that was ended from outside."""
_FAILURES = {reason.value: reason for reason in FETCH_FAILURES}
_JOB_LABEL = "batch.kubernetes.io/job-name"


@dataclass(frozen=True)
class State:
    """One fetch: done, or why it is not."""

    done: bool
    reason: Reason = Reason.FETCHING
    message: str = ""
    commit: str = ""
    """Of a fetch that is done: what the revision stood for, where that is known."""


def complete(job: Object) -> bool:
    """Whether a Job has done its work."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Complete" and each["status"] == "True" for each in conditions)


def completed_at(job: Object) -> datetime | None:
    """When it had."""
    return _moment((job.get("status") or {}).get("completionTime"))


def state_of_job(job: Object | None, pods: Iterable[Object], container: str, now: datetime) -> State:
    """How a Job does. None: it is about to be made."""
    if job is None:
        return State(False)
    own = pods_of(job, pods)
    if complete(job):
        return State(True, commit=_commit(own, container))
    return state_of_pod(own[-1], "containerStatuses", container, now) if own else State(False)


def pods_of(job: Object, pods: Iterable[Object]) -> list[Object]:
    """A Job's pods, the newest last."""
    own = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get(_JOB_LABEL) == job["metadata"]["name"]]
    return sorted(own, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def state_of_pod(pod: Object, statuses: str, container: str, now: datetime) -> State:
    """How a container of a pod does that fetches; done when it has ended well."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return State(
                False,
                Reason.UNSCHEDULABLE,
                f"its pod has no place: {without_counts(str(condition.get('message') or ''))}",
            )
    for each in status.get(statuses) or []:
        if each["name"] == container:
            return _state(each, now)
    return State(False)


def waiting_since(pod: Object, container: str, marker: str) -> datetime | None:
    """Since when an instance waits for the model that is wanted now; None if it does not."""
    for each in (pod.get("spec") or {}).get("initContainers") or []:
        if each["name"] == container and (each.get("command") or [""])[-1] != marker:
            return None
    for each in (pod.get("status") or {}).get("initContainerStatuses") or []:
        if each["name"] == container:
            return _moment(((each.get("state") or {}).get("running") or {}).get("startedAt"))
    return None


def _state(container: Mapping[str, Any], now: datetime) -> State:
    state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated") or {}
    if ended := state.get("terminated"):
        if ended.get("exitCode") == 0:
            return State(True, commit=_report(ended)[1])
        return _failure(ended)
    if running := state.get("running"):
        started = _moment(running.get("startedAt"))
        fresh = started is not None and (now - started).total_seconds() < FAILURE_SECONDS
        return _failure(last) if last and fresh else State(False)
    if last:
        return _failure(last)
    words = broken(container)
    return State(False, Reason.CRASHING, words) if words else State(False)


def _failure(terminated: Mapping[str, Any]) -> State:
    reason, message = _report(terminated)
    if reason in _FAILURES:
        return State(False, _FAILURES[reason], message)
    if terminated.get("reason") == "OOMKilled":
        return State(False, Reason.FETCH_FAILED, "the fetcher ran out of memory")
    if terminated.get("exitCode") in _STOPPED:
        return State(False)
    return State(False, Reason.FETCH_FAILED, f"the fetcher ended with status {terminated.get('exitCode')}")


def _report(terminated: Mapping[str, Any]) -> tuple[str, str]:
    """Reason and message that the fetcher left; empty where it left none."""
    try:
        found = json.loads(terminated.get("message") or "")
        return str(found["reason"]), str(found["message"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def _commit(pods: list[Object], container: str) -> str:
    for pod in reversed(pods):
        for each in (pod.get("status") or {}).get("containerStatuses") or []:
            ended = (each.get("state") or {}).get("terminated") or {}
            if each["name"] == container and ended.get("exitCode") == 0:
                return _report(ended)[1]
    return ""


def _moment(text: object) -> datetime | None:
    return datetime.fromisoformat(text).astimezone(UTC) if isinstance(text, str) else None
