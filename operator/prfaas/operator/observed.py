"""What the API server shows of a pool, as values: which instances there are, how their pods and those of the router do.

Pure. A child counts as ready only for the template that it has now: a Deployment whose controller has not seen the last
change yet still reports the readiness of the old pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prfaas.api import labels
from prfaas.api.group import Group
from prfaas.kube.resources import Object
from prfaas.workloads.assignment import Observed, instance_index
from prfaas.workloads.meta import pod_templates

_BROKEN = ("CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "CreateContainerConfigError")
"""Reasons of a waiting container that do not pass by themselves. (InvalidImageName and the like end in these, too.)"""

_LONGEST = 500
"""Characters of a container's trouble that a condition takes over."""


@dataclass(frozen=True)
class PodState:
    """One pod of an instance, or of the router."""

    name: str
    """Of the instance; of a router, the pod's own."""
    scheduled: bool
    unschedulable: bool
    """The scheduler looked for a node and found none."""
    going: bool
    ready: bool = False
    refusal: str = ""
    """The scheduler's words, where it found none."""
    broken: str = ""
    """Why a container does not run, where it will not pass by itself."""
    address: str = ""
    """Where it runs, once it has an address."""


@dataclass(frozen=True)
class Instances:
    """The instances of one pool."""

    children: tuple[Observed, ...]
    pods: tuple[PodState, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Instance -> why its pod cannot even be created (quota, admission)."""

    def count(self, role: str | None = None) -> int:
        """Instances that exist, being deleted or not; of one role or of all."""
        return sum(role in (None, child.role) for child in self.children)

    def ready(self, role: str | None = None) -> int:
        """Instances that serve."""
        return sum(child.ready and role in (None, child.role) for child in self.children)

    def updated(self, revisions: Mapping[str, str], role: str | None = None) -> int:
        """Instances whose template is the one that their role should have."""
        return sum(
            child.revision == revisions.get(child.role) and role in (None, child.role) for child in self.children
        )

    def groups(self) -> tuple[Group, ...]:
        """The instances by compatibility key, in order of the keys."""

        def count(key: str, role: str, *, ready: bool = False) -> int:
            return sum((child.key, child.role) == (key, role) and (child.ready or not ready) for child in self.children)

        return tuple(
            Group(
                compatibility_key=key,
                prefill=count(key, labels.ROLE_PREFILL),
                prefill_ready=count(key, labels.ROLE_PREFILL, ready=True),
                decode=count(key, labels.ROLE_DECODE),
                decode_ready=count(key, labels.ROLE_DECODE, ready=True),
            )
            for key in sorted({child.key for child in self.children if child.key})
        )

    def draining(self, role: str | None = None) -> int:
        """Instances with a pod that is ending."""
        roles = {child.name: child.role for child in self.children}
        ending = {pod.name for pod in self.pods if pod.going}
        return sum(role in (None, roles.get(name)) for name in ending)


def instance_pods(pods: Iterable[Object]) -> list[Object]:
    """The pods of instances, but for those that are ending."""
    return [
        pod
        for pod in pods
        if labels.INSTANCE in (pod["metadata"].get("labels") or {}) and "deletionTimestamp" not in pod["metadata"]
    ]


def instances(cluster: str, children: Iterable[Object], pods: Iterable[Object]) -> Instances:
    """The pool `cluster`, from all Deployments and LeaderWorkerSets that carry its labels, and its pods.

    Children that are no instances (the router's Deployment) are left out.
    """
    seen: list[Observed] = []
    failures: dict[str, str] = {}
    for child in children:
        index = instance_index(cluster, child["metadata"]["name"])
        if index is None:
            continue
        seen.append(_observed(child, index))
        if message := replica_failure(child):
            failures[child["metadata"]["name"]] = message
    named = [(pod, pod["metadata"].get("labels", {}).get(labels.INSTANCE)) for pod in pods]
    states = [_pod_state(pod, name) for pod, name in named if name]
    return Instances(tuple(sorted(seen, key=lambda child: child.index)), tuple(states), failures)


def routers(pods: Iterable[Object]) -> tuple[PodState, ...]:
    """The pods of the router among a pool's pods, but for those that are ending."""
    found = [
        _pod_state(pod, pod["metadata"]["name"])
        for pod in pods
        if pod["metadata"].get("labels", {}).get(labels.ROLE) == labels.ROLE_ROUTER
    ]
    return tuple(sorted((pod for pod in found if not pod.going), key=lambda pod: pod.name))


def _observed(child: Object, index: int) -> Observed:
    metadata = child["metadata"]
    template = pod_templates(child)[0]["metadata"].get("labels") or {}
    return Observed(
        name=metadata["name"],
        index=index,
        role=template.get(labels.ROLE, ""),
        revision=template.get(labels.REVISION, ""),
        ready=_is_ready(child),
        key=template.get(labels.COMPATIBILITY_KEY, ""),
        marked=(metadata.get("annotations") or {}).get(labels.REMOVE) == "true",
        going="deletionTimestamp" in metadata,
    )


def _is_ready(child: Object) -> bool:
    status = child.get("status") or {}
    if child["kind"] == "LeaderWorkerSet":
        return bool(status.get("readyReplicas", 0) >= 1 and status.get("updatedReplicas", 0) >= 1)
    current = status.get("observedGeneration", 0) >= child["metadata"].get("generation", 1)
    return bool(current and status.get("updatedReplicas", 0) >= 1 and status.get("availableReplicas", 0) >= 1)


def replica_failure(child: Object) -> str:
    """Why a Deployment's pods cannot even be created; empty where they can."""
    for condition in (child.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))
    return ""


def _pod_state(pod: Object, name: str) -> PodState:
    metadata, status = pod["metadata"], pod.get("status") or {}
    scheduled = bool((pod.get("spec") or {}).get("nodeName"))
    said = {condition["type"]: condition for condition in status.get("conditions") or []}
    placing = said.get("PodScheduled") or {}
    unschedulable = not scheduled and placing.get("status") == "False" and placing.get("reason") == "Unschedulable"
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return PodState(
        name=name,
        scheduled=scheduled,
        unschedulable=unschedulable,
        going="deletionTimestamp" in metadata,
        ready=(said.get("Ready") or {}).get("status") == "True",
        refusal=str(placing.get("message") or "") if unschedulable else "",
        broken=next(filter(None, map(broken, containers)), ""),
        address=str(status.get("podIP") or "") if status.get("phase") == "Running" else "",
    )


def broken(container: Mapping[str, Any]) -> str:
    """Why a container does not run: in words that stay the same from one try to the next."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = str(waiting.get("reason"))
    if reason not in _BROKEN:
        return ""
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        words = [f"it ended with status {last['exitCode']}" if "exitCode" in last else "", _own(last)]
    else:
        # Kubelet alternates between trying and waiting, and puts the one's words behind the other's.
        reason = "ImagePullBackOff" if reason == "ErrImagePull" else reason
        words = [str(waiting.get("message") or "").rpartition("ErrImagePull: ")[2]]
    detail = ": ".join(filter(None, words))
    where = f"{reason} of container {container['name']}" if container.get("name") else reason
    return f"{where}: {detail}"[:_LONGEST] if detail else where


def _own(terminated: Mapping[str, Any]) -> str:
    """What a container said at its end, or what ended it."""
    if message := str(terminated.get("message") or "").strip():
        return message.splitlines()[-1]
    reason = str(terminated.get("reason") or "")
    return "" if reason in ("Error", "Completed") else reason
