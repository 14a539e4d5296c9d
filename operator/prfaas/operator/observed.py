"""What the API server shows of a pool's instances, as values: which children there are, and how their pods do.

Pure. A child counts as ready only for the template that it has now: a Deployment whose controller has not seen the last
change yet still reports the readiness of the old pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prfaas.api import labels
from prfaas.kube.resources import Object
from prfaas.workloads.assignment import Observed, instance_index

_BROKEN = ("CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "CreateContainerConfigError")
"""Reasons of a waiting container that do not pass by themselves. (InvalidImageName and the like end in these, too.)"""


@dataclass(frozen=True)
class PodState:
    """One pod of an instance."""

    instance: str
    scheduled: bool
    unschedulable: bool
    """The scheduler looked for a node and found none."""
    going: bool
    broken: str = ""
    """Reason for which a container does not run, where it will not pass by itself."""


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

    def draining(self, role: str | None = None) -> int:
        """Instances with a pod that is ending."""
        roles = {child.name: child.role for child in self.children}
        ending = {pod.instance for pod in self.pods if pod.going}
        return sum(role in (None, roles.get(name)) for name in ending)


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
        if message := _replica_failure(child):
            failures[child["metadata"]["name"]] = message
    states = [_pod_state(pod) for pod in pods if labels.INSTANCE in pod["metadata"].get("labels", {})]
    return Instances(tuple(sorted(seen, key=lambda child: child.index)), tuple(states), failures)


def _observed(child: Object, index: int) -> Observed:
    metadata = child["metadata"]
    template = _template(child)["metadata"].get("labels") or {}
    return Observed(
        name=metadata["name"],
        index=index,
        role=template.get(labels.ROLE, ""),
        revision=template.get(labels.REVISION, ""),
        ready=_is_ready(child),
        marked=(metadata.get("annotations") or {}).get(labels.REMOVE) == "true",
        going="deletionTimestamp" in metadata,
    )


def _template(child: Object) -> dict[str, Any]:
    spec = child["spec"]
    template: dict[str, Any] = (
        spec["template"] if child["kind"] == "Deployment" else spec["leaderWorkerTemplate"]["leaderTemplate"]
    )
    return template


def _is_ready(child: Object) -> bool:
    status = child.get("status") or {}
    if child["kind"] == "LeaderWorkerSet":
        return bool(status.get("readyReplicas", 0) >= 1 and status.get("updatedReplicas", 0) >= 1)
    current = status.get("observedGeneration", 0) >= child["metadata"].get("generation", 1)
    return bool(current and status.get("updatedReplicas", 0) >= 1 and status.get("availableReplicas", 0) >= 1)


def _replica_failure(child: Object) -> str:
    for condition in (child.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))
    return ""


def _pod_state(pod: Object) -> PodState:
    metadata, status = pod["metadata"], pod.get("status") or {}
    scheduled = bool((pod.get("spec") or {}).get("nodeName"))
    refused = any(
        condition["type"] == "PodScheduled"
        and condition["status"] == "False"
        and condition.get("reason") == "Unschedulable"
        for condition in status.get("conditions") or []
    )
    waiting = [
        (container.get("state") or {}).get("waiting") or {}
        for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    ]
    broken = next((str(state["reason"]) for state in waiting if state.get("reason") in _BROKEN), "")
    return PodState(
        instance=metadata["labels"][labels.INSTANCE],
        scheduled=scheduled,
        unschedulable=refused and not scheduled,
        going="deletionTimestamp" in metadata,
        broken=broken,
    )
