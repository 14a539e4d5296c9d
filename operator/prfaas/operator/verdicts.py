"""What the conditions say: pure functions from what was seen to status, reason and message.

Each condition has one function here. Messages name what is wrong, where, and what helps; no counter and no time.
`Ready`, `Reconciling` and `Stalled` are computed from the others at the end, the same way for all three kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from prfaas.api.conditions import Condition, Reason, Type, condition
from prfaas.api.pool import PoolSpec
from prfaas.kube.errors import Forbidden, Invalid, KubeError, NameTaken, NotFound
from prfaas.operator.observed import Instances
from prfaas.workloads.assignment import Step
from prfaas.workloads.errors import SpecError


@dataclass(frozen=True)
class Verdict:
    """One condition before it gets its generation and time. status None: unknown."""

    type: Type
    status: bool | None
    reason: Reason
    message: str = ""


@dataclass(frozen=True)
class Obstacle:
    """Something that keeps the object from becoming what its spec says until a person acts."""

    reason: Reason
    message: str


def pods_placed(instances: Instances, spec: PoolSpec, wanted: int) -> Verdict:
    """Whether every instance has its place on a node."""
    if instances.failures:
        name, why = min(instances.failures.items())
        return Verdict(Type.PODS_PLACED, False, Reason.UNSCHEDULABLE, f"instance {name}: its pod is refused: {why}")
    homeless = sorted({pod.instance for pod in instances.pods if pod.unschedulable and not pod.going})
    if homeless:
        return Verdict(Type.PODS_PLACED, False, Reason.UNSCHEDULABLE, _no_room(homeless, spec))
    if not wanted:
        return Verdict(Type.PODS_PLACED, True, Reason.NO_INSTANCES, "the pool has no instances")
    placed = {pod.instance for pod in instances.pods if pod.scheduled and not pod.going}
    missing = [child.name for child in instances.children if child.name not in placed]
    if missing or instances.count() < wanted:
        return Verdict(Type.PODS_PLACED, False, Reason.PROGRESSING, "pods are being placed")
    return Verdict(Type.PODS_PLACED, True, Reason.PLACED)


def serving(instances: Instances, step: Step | None) -> Verdict | None:
    """Why the pool does not serve as specified, as far as its instances go; None when it does."""
    ready, broken = Type.READY, sorted({(pod.instance, pod.broken) for pod in instances.pods if pod.broken})
    if broken:
        name, why = broken[0]
        message = f"instance {name}: {why}; see `kubectl describe pod -l prfaas.io/instance={name}`"
        return Verdict(ready, False, Reason.CRASHING, message)
    if step is not None and not step.settled:
        return Verdict(ready, False, Reason.PROGRESSING, "instances are being added, changed or removed")
    starting = sorted(child.name for child in instances.children if not child.ready)
    if starting:
        return Verdict(ready, False, Reason.STARTING, f"not ready: {', '.join(starting)}")
    return None


def summary(
    needed: Sequence[Verdict | None], *, obstacle: Obstacle | None, paused: bool, draining: bool = False
) -> list[Verdict]:
    """`Ready`, `Reconciling` and `Stalled`. `needed`: what must hold for Ready; None holds."""
    if obstacle is not None:
        return [
            Verdict(Type.READY, False, obstacle.reason, obstacle.message),
            Verdict(Type.RECONCILING, False, obstacle.reason, "stopped until the spec or what is in its way changes"),
            Verdict(Type.STALLED, True, obstacle.reason, obstacle.message),
        ]
    unmet = next((verdict for verdict in needed if verdict is not None and verdict.status is not True), None)
    ready = (
        Verdict(Type.READY, True, Reason.AS_SPECIFIED)
        if unmet is None
        else Verdict(Type.READY, False, unmet.reason, unmet.message)
    )
    if paused:
        reconciling = Verdict(Type.RECONCILING, False, Reason.PAUSED, "spec.paused is true: nothing is changed")
    elif unmet is not None or draining:
        waits = unmet or Verdict(Type.RECONCILING, True, Reason.PROGRESSING, "instances that left service are ending")
        reconciling = Verdict(Type.RECONCILING, True, waits.reason, waits.message)
    else:
        reconciling = Verdict(Type.RECONCILING, False, Reason.AS_SPECIFIED)
    return [ready, reconciling, Verdict(Type.STALLED, False, Reason.AS_SPECIFIED)]


def spec_obstacle(error: SpecError) -> Obstacle:
    """A spec that cannot be built."""
    return Obstacle(Reason.INVALID_SPEC, f"{error}. What runs is kept.")


def write_obstacle(errors: Iterable[KubeError]) -> Obstacle | None:
    """What the API server refused for good; None when trying again may help."""
    for error in sorted(errors, key=str):
        where = error.request.removeprefix("apply ") or "an object"
        if isinstance(error, NameTaken):
            return Obstacle(Reason.NAME_CONFLICT, error.message)
        if isinstance(error, Invalid):
            text = f"the API server refuses what the spec leads to: {error.message}. What runs is kept."
            return Obstacle(Reason.INVALID_SPEC, text)
        if isinstance(error, NotFound) and "leaderworkerset" in error.request:
            text = "spec.nodesPerInstance: above 1 needs the LeaderWorkerSet API, which is not installed; install it"
            return Obstacle(Reason.INVALID_SPEC, text)
        if isinstance(error, Forbidden):
            return Obstacle(Reason.API_ERROR, f"the operator may not write {where}: {error.message}")
    return None


def conditions(verdicts: Iterable[Verdict], generation: int, now: datetime) -> list[Condition]:
    """Conditions in Kubernetes' form, as observed now."""
    return [
        condition(each.type, each.status, each.reason, each.message[:4096], generation=generation, now=now)
        for each in verdicts
    ]


def _no_room(homeless: Sequence[str], spec: PoolSpec) -> str:
    gpus = spec.gpus_per_instance // spec.nodes_per_instance
    selector = ", ".join(f"{name}={value}" for name, value in sorted(spec.node_pool.node_selector.items()))
    nodes = f"no node with {selector}" if selector else "no node"
    return (
        f"no room for {', '.join(homeless)}: {nodes} has {gpus} {spec.node_pool.gpu_resource} free; "
        "add nodes to the pool or lower the number of instances"
    )
