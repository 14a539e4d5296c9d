"""How a fetch does, as its pods show it: reasons, words, and that a condition does not swing with every try."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from prfaas.api.conditions import FETCH_FAILURES, Reason
from prfaas.operator.fetches import FAILURE_SECONDS, State, state_of_job, waiting_since

NOW = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
JOB: dict[str, Any] = {"metadata": {"name": "east-model-1"}}
DONE = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}


def ended(reason: str, message: str = "words", code: int = 1) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "message": json.dumps({"reason": reason, "message": message})}}


def running(seconds: float) -> dict[str, Any]:
    return {"running": {"startedAt": (NOW - timedelta(seconds=seconds)).isoformat()}}


def pod(state: dict[str, Any], last: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    container = {"name": "fetch", "state": state, "lastState": last or {}}
    return {
        "metadata": {"name": "p", "labels": {"batch.kubernetes.io/job-name": "east-model-1"}},
        "status": {"containerStatuses": [container], **status},
    }


BACKOFF = {"waiting": {"reason": "CrashLoopBackOff"}}


@pytest.mark.parametrize(
    ("state", "last", "expected"),
    [
        (running(5), None, State(False)),
        (ended("Gated"), None, State(False, Reason.GATED, "words")),
        (BACKOFF, ended("Gated"), State(False, Reason.GATED, "words")),
        (running(FAILURE_SECONDS - 1), ended("Gated"), State(False, Reason.GATED, "words")),
        (running(FAILURE_SECONDS), ended("Gated"), State(False)),
        (BACKOFF, {"terminated": {"exitCode": 143}}, State(False)),
        (BACKOFF, {"terminated": {"exitCode": 137}}, State(False)),
        (
            BACKOFF,
            {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            State(False, Reason.FETCH_FAILED, "the fetcher ran out of memory"),
        ),
        (
            BACKOFF,
            {"terminated": {"exitCode": 2, "message": "no JSON"}},
            State(False, Reason.FETCH_FAILED, "the fetcher ended with status 2"),
        ),
        (BACKOFF, ended("Ready"), State(False, Reason.FETCH_FAILED, "the fetcher ended with status 1")),
        (ended("Cached", "c0ffee", code=0), None, State(True, commit="c0ffee")),
        (
            {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'}},
            None,
            State(False, Reason.CRASHING, 'CreateContainerConfigError of container fetch: secret "token" not found'),
        ),
        ({"waiting": {"reason": "ContainerCreating"}}, None, State(False)),
    ],
)
def test_what_a_container_shows(state: dict[str, Any], last: dict[str, Any] | None, expected: State) -> None:
    assert state_of_job(JOB, [pod(state, last)], "fetch", NOW) == expected


@pytest.mark.parametrize("reason", FETCH_FAILURES)
def test_every_reason_of_the_fetcher_is_taken_over(reason: Reason) -> None:
    found = state_of_job(JOB, [pod(BACKOFF, ended(reason.value, "what helps"))], "fetch", NOW)
    assert found == State(False, reason, "what helps")


def test_a_job_that_is_done_is_done_without_its_pod_and_its_pod_has_the_commit() -> None:
    assert state_of_job(JOB | DONE, [], "fetch", NOW) == State(True)
    assert state_of_job(JOB | DONE, [pod(ended("Cached", "c0ffee", 0))], "fetch", NOW) == State(True, commit="c0ffee")


def test_a_job_without_pod_and_no_job_are_on_their_way() -> None:
    assert state_of_job(JOB, [], "fetch", NOW) == state_of_job(None, [], "fetch", NOW) == State(False)


def test_a_pod_without_place_says_so_without_numbers() -> None:
    refused = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.",
    }
    found = state_of_job(JOB, [pod({}, conditions=[refused])], "fetch", NOW)
    assert found.reason is Reason.UNSCHEDULABLE
    assert "didn't match" in found.message
    assert "0/3" not in found.message


def test_an_instance_waits_only_for_the_model_that_is_wanted_now() -> None:
    waits = {
        "spec": {"initContainers": [{"name": "model", "command": ["sh", "/models/a/.marker"]}]},
        "status": {"initContainerStatuses": [{"name": "model", "state": running(7)}]},
    }
    assert waiting_since(waits, "model", "/models/a/.marker") == NOW - timedelta(seconds=7)
    assert waiting_since(waits, "model", "/models/b/.marker") is None
    assert waiting_since({"spec": {}, "status": {}}, "model", "/models/a/.marker") is None
