"""What the conditions say: pure functions from what was seen to status, reason and message.

Each condition has one function here. Messages name what is wrong, where, and what helps; no counter and no time.
`Ready`, `Reconciling` and `Stalled` are computed from the others at the end, the same way for all three kinds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from prfaas.api.conditions import Condition, Reason, Type, Verdict, condition, find
from prfaas.api.labels import ROLE_DECODE
from prfaas.api.policy import RoutingPolicy
from prfaas.api.pool import PoolSpec
from prfaas.kube.errors import Forbidden, Invalid, KubeError, NameTaken, NotFound
from prfaas.kube.resources import Object
from prfaas.operator.observed import Instances, PodState, replica_failure
from prfaas.workloads.assignment import Cause, Step
from prfaas.workloads.errors import SpecError


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
    homeless = [pod for pod in instances.pods if pod.unschedulable and not pod.going]
    if homeless:
        return Verdict(Type.PODS_PLACED, False, Reason.UNSCHEDULABLE, _no_room(homeless, spec))
    if not wanted:
        return Verdict(Type.PODS_PLACED, True, Reason.NO_INSTANCES, "the pool has no instances")
    placed = {pod.name for pod in instances.pods if pod.scheduled and not pod.going}
    missing = [child.name for child in instances.children if child.name not in placed]
    if missing or instances.count() < wanted:
        return Verdict(Type.PODS_PLACED, False, Reason.PROGRESSING, "pods are being placed")
    return Verdict(Type.PODS_PLACED, True, Reason.PLACED)


def serving(instances: Instances, step: Step | None) -> Verdict | None:
    """Why the pool does not serve as specified, as far as its instances go; None when it does."""
    ready, broken = Type.READY, sorted({(pod.name, pod.broken) for pod in instances.pods if pod.broken})
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


def rolling(instances: Instances, step: Step | None, before: Sequence[Condition]) -> Verdict | None:
    """What a rollout that leaves the pool serving does or waits for; None: there is none.

    `before`: the conditions so far. They tell the last instance of a rollout, which is not ready yet, from one that is
    not ready any more.
    """
    if step is None or not step.only_rolls or any(pod.broken for pod in instances.pods):
        return None
    decodes = any(child.role == ROLE_DECODE for child in instances.children)
    if not instances.ready(ROLE_DECODE if decodes else None):
        return None
    kind, starting = Type.RECONCILING, sorted(child.name for child in instances.children if not child.ready)
    moved = bool(step.roll or step.convert)
    said = find(before, kind)
    goes_on = said is not None and said.reason in (Reason.ROLLING_OUT.value, Reason.WAITING_FOR_PEER.value)
    if not (moved or step.held or (goes_on and starting)):
        return None
    held = dict(sorted(step.held.items()))
    peers = {name: why.peers for name, why in held.items() if why.cause is Cause.PEER}
    if any(why.cause is Cause.MODEL for why in held.values()):
        text = "no instance is changed before the model is on disk; see ModelCached"
        return Verdict(kind, True, Reason.ROLLING_OUT, text)
    if peers and not (moved or starting):
        names = ", ".join(dict.fromkeys(name for each in peers.values() for name in each))
        what = "a prefill instance of the new key is ready" if decodes else "its decode instances have the new key"
        text = f"{', '.join(peers)}: keeps the old compatibility key until, at the other end of link {names}, {what}"
        return Verdict(kind, True, Reason.WAITING_FOR_PEER, text)
    text = f"not ready yet: {', '.join(starting)}" if starting else "instances get the new template one after the other"
    return Verdict(kind, True, Reason.ROLLING_OUT, text)


def while_rolling(placed: Verdict, rolls: Verdict | None) -> Verdict | None:
    """`PodsPlaced` as far as it keeps a pool from being Ready: a rollout takes pods from their places for a moment."""
    return None if rolls is not None and placed.reason is Reason.PROGRESSING else placed


def router_ready(pods: Sequence[PodState], deployment: Object | None, replicas: int) -> Verdict:
    """Whether clients are served: by one router at least, of the newest template or not."""
    kind = Type.ROUTER_READY
    if replicas == 0:
        return Verdict(kind, False, Reason.NO_ROUTERS, "spec.router.replicas is 0: nobody takes requests")
    if any(pod.ready for pod in pods):
        return Verdict(kind, True, Reason.AVAILABLE)
    if trouble := _router_trouble(kind, pods, deployment):
        return trouble
    if not pods:
        return Verdict(kind, False, Reason.NO_ROUTERS, "there is no router pod yet")
    return Verdict(kind, False, Reason.STARTING, "no router is ready")


def routers_complete(pods: Sequence[PodState], deployment: Object | None, replicas: int) -> Verdict | None:
    """Why the routers are not as many and as new as specified; None when they are."""
    status = (deployment or {}).get("status") or {}
    generation = ((deployment or {}).get("metadata") or {}).get("generation", 0)
    current = deployment is not None and status.get("observedGeneration", 0) >= generation
    available = min(status.get("availableReplicas", 0), status.get("updatedReplicas", 0)) if current else 0
    if available >= replicas:
        return None
    trouble = _router_trouble(Type.READY, pods, deployment)
    return trouble or Verdict(Type.READY, False, Reason.STARTING, "not every router is ready")


def router_synced(policy: RoutingPolicy | None, pods: Sequence[PodState], acknowledged: Collection[str]) -> Verdict:
    """Whether every router that is ready follows the committed policy. `acknowledged`: addresses of those that do."""
    kind = Type.ROUTER_SYNCED
    if not pods:
        return Verdict(kind, False, Reason.NO_ROUTERS, "there is no router pod")
    serving = [pod.address for pod in pods if pod.ready]
    if policy is not None and serving and all(address in acknowledged for address in serving):
        return Verdict(kind, True, Reason.ACKNOWLEDGED)
    text = "not every router uses the committed policy yet" if serving else "no router is ready"
    return Verdict(kind, False, Reason.POLICY_PENDING, text)


def _router_trouble(kind: Type, pods: Sequence[PodState], deployment: Object | None) -> Verdict | None:
    """What keeps a router from running that will not pass by itself."""
    if refused := replica_failure(deployment or {}):
        return Verdict(kind, False, Reason.UNSCHEDULABLE, f"the router's pod is refused: {refused}")
    if homeless := [pod for pod in pods if pod.unschedulable]:
        text = f"no room for router pod {homeless[0].name}: {without_counts(homeless[0].refusal)}"
        return Verdict(kind, False, Reason.UNSCHEDULABLE, text)
    if broken := [pod for pod in pods if pod.broken]:
        pod = broken[0]
        text = f"router pod {pod.name}: {pod.broken}; see `kubectl describe pod {pod.name}`"
        return Verdict(kind, False, Reason.CRASHING, text)
    return None


def summary(
    needed: Sequence[Verdict | None],
    *,
    obstacle: Obstacle | None,
    paused: bool,
    draining: bool = False,
    rolls: Verdict | None = None,
) -> list[Verdict]:
    """`Ready`, `Reconciling` and `Stalled`. `needed`: what must hold for Ready; None holds. `rolls`: from `rolling`."""
    if obstacle is not None:
        return [
            Verdict(Type.READY, False, obstacle.reason, obstacle.message),
            Verdict(Type.RECONCILING, False, obstacle.reason, "stopped until the spec or what is in its way changes"),
            Verdict(Type.STALLED, True, obstacle.reason, obstacle.message),
        ]
    missing = [verdict for verdict in needed if verdict is not None and verdict.status is not True]
    # What is known to be wrong explains what cannot be known because of it.
    unmet = next(iter(sorted(missing, key=lambda verdict: verdict.status is None)), None)
    ready = (
        Verdict(Type.READY, True, Reason.AS_SPECIFIED)
        if unmet is None
        else Verdict(Type.READY, False, unmet.reason, unmet.message)
    )
    if paused:
        reconciling = Verdict(Type.RECONCILING, False, Reason.PAUSED, "spec.paused is true: nothing is changed")
    elif unmet is None and rolls is not None:
        reconciling = rolls
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


def _no_room(homeless: Sequence[PodState], spec: PoolSpec) -> str:
    """What the scheduler misses; said in the pool's terms where that is GPUs, else in the scheduler's."""
    names = ", ".join(sorted({pod.name for pod in homeless}))
    reasons = _reasons(homeless[0].refusal)
    lacking = f"Insufficient {spec.node_pool.gpu_resource}"
    if lacking not in reasons:
        return f"no room for {names}: {without_counts(homeless[0].refusal)}"
    gpus = spec.gpus_per_instance // spec.nodes_per_instance
    selector = ", ".join(f"{name}={value}" for name, value in sorted(spec.node_pool.node_selector.items()))
    nodes = f"no node with {selector}" if selector else "no node"
    others = [reason for reason in reasons if reason.startswith("Insufficient ") and reason != lacking]
    return (
        f"no room for {names}: {nodes} has {gpus} {spec.node_pool.gpu_resource} free; "
        "add nodes to the pool or lower the number of instances" + "".join(f"; also: {other}" for other in others)
    )


def without_counts(refusal: str) -> str:
    return "; ".join(_reasons(refusal)) or "the scheduler does not say why"


def _reasons(refusal: str) -> list[str]:
    """The scheduler's reasons, without the numbers of nodes: `0/3 nodes are available: 1 Insufficient cpu, 2 ...`."""
    _, found, reasons = refusal.partition("nodes are available: ")
    first = (reasons if found else refusal).partition(". ")[0].strip().rstrip(".")
    return sorted({re.sub(r"^[0-9]+ ", "", reason) for reason in first.split(", ") if reason})
