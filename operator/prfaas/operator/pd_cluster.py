"""Reconcile of a PDCluster: instances of both roles, the router, and the routing policy.

The controller of thresholds and roles is its simplest form here: the roles are those of `spec.pool`, and the thresholds
those of `spec.remotePrefill`, committed as a policy that every router acknowledges.
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.api import labels
from prfaas.api.conditions import Reason, Type, Verdict, find, timestamp
from prfaas.api.pd_cluster import (
    PDCluster,
    PDClusterStatus,
    PolicyStatus,
    RolesStatus,
    RoleStatus,
    ThresholdStatus,
)
from prfaas.api.policy import RoutingPolicy
from prfaas.kube.errors import NotFound
from prfaas.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    INTER_CLUSTER_LINK,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Key,
    Object,
)
from prfaas.operator import exchange, model_cache, pairing, pools
from prfaas.operator.observed import Instances, routers
from prfaas.operator.policy import policy_in, wanted_policy
from prfaas.operator.report import read_conditions, report
from prfaas.operator.verdicts import (
    conditions,
    pods_placed,
    rolling,
    router_ready,
    router_synced,
    routers_complete,
    serving,
    summary,
    while_rolling,
)
from prfaas.operator.warm_up import warm_up_seconds
from prfaas.operator.world import Result, World
from prfaas.workloads import wanted
from prfaas.workloads.assignment import Step
from prfaas.workloads.engine import compatibility_key
from prfaas.workloads.meta import Owner
from prfaas.workloads.router import RouterSettings, router_name

ROUTER_RETRY_SECONDS = 5.0
"""When to ask a router again that runs but does not use the policy yet."""


async def reconcile(world: World, key: Key) -> Result:
    """Brings one PDCluster a step nearer to its spec. Raises KubeError when it should be tried again."""
    opened = await pools.open_pool(world, key, PDCluster)
    if opened is None:
        return Result()
    live, cluster = opened
    spec, owner = cluster.spec, Owner.of(cluster)
    desired = counts(cluster)
    links = await _links(world, cluster)
    cache = await model_cache.step(world, owner, spec, spec.pool.instances)
    took = await pools.take_step(
        world,
        owner,
        spec,
        desired,
        build=lambda children, step: build(
            cluster,
            step,
            world.config.routers,
            wanted_policy(cluster, _committed(children), world.epoch, world.routers.newest(owner.uid)),
        ),
        kinds=(CONFIG_MAP, SERVICE_ACCOUNT, ROLE_BINDING),
        pairing=lambda: pairing.of_pd_pool(world, cluster, links),
        hold_rollout=cache.hold_rollout,
    )
    seen = took.children.instances
    frozen = spec.paused or took.step is None
    published = await exchange.publish(world, cluster, seen.groups(), paused=frozen)
    pods, deployment = routers(took.children.pods), took.children.find(DEPLOYMENT, router_name(owner))
    addresses = [pod.address for pod in pods if pod.address]
    policy = _committed(took.children)
    synced = await world.routers.synchronise(policy, addresses, put=not frozen) if policy else frozenset()

    placed = pods_placed(seen, spec, spec.pool.instances)
    ready = router_ready(pods, deployment, spec.router.replicas)
    acknowledged = router_synced(policy, pods, synced)
    rolls = rolling(seen, took.step, read_conditions(live))
    needed = [
        while_rolling(placed, rolls),
        cache.verdict,
        None if rolls else serving(seen, took.step),
        ready,
        routers_complete(pods, deployment, spec.router.replicas),
        acknowledged,
        missing_link(links),
    ]
    verdicts = [
        *summary(
            needed,
            obstacle=took.obstacle or cache.obstacle,
            paused=spec.paused,
            draining=seen.draining() > 0,
            rolls=rolls,
        ),
        placed,
        cache.verdict,
        ready,
        acknowledged,
        remote_prefill(cluster, links),
    ]
    status = PDClusterStatus(
        observed_generation=cluster.metadata.generation,
        instances=seen.count(),
        selector=pools.scale_selector(owner),
        compatibility_key=compatibility_key(spec),
        groups=seen.groups(),
        roles=RolesStatus(
            prefill=_role(seen, took, labels.ROLE_PREFILL, desired),
            decode=_role(seen, took, labels.ROLE_DECODE, desired),
        ),
        policy=_policy_status(cluster, policy, len(pods), len(synced), timestamp(world.now())),
        warm_up_seconds=warm_up_seconds(took.children.pods, spec, cluster.status.warm_up_seconds),
    )
    observed = conditions(verdicts, cluster.metadata.generation, world.now())
    if await report(world, live, pools.without_conditions(status), observed):
        await pools.wake_links(world, key)
    waits = [exchange.RETRY_SECONDS] if not published.ok else []
    waits += [ROUTER_RETRY_SECONDS] if len(synced) < len(addresses) and not frozen else []
    return took.finish(*cache.waits, *waits)


def counts(cluster: PDCluster) -> dict[str, int]:
    """Instances that there should be, by role."""
    pool = cluster.spec.pool
    prefill = pool.prefill_instances()
    return {labels.ROLE_PREFILL: prefill, labels.ROLE_DECODE: pool.instances - prefill}


def build(cluster: PDCluster, step: Step, routers: RouterSettings, policy: RoutingPolicy) -> list[Object]:
    """The objects wanted after a step. Raises SpecError."""
    return wanted.pd_cluster(Owner.of(cluster), cluster.spec, step.apply, routers, policy, step.keys)


def remote_prefill(cluster: PDCluster, links: Sequence[tuple[str, Object | None]]) -> Verdict:
    """Whether long prompts can go out: at least over one link, and if not, why not over the first."""
    kind = Type.REMOTE_PREFILL_AVAILABLE
    if not cluster.spec.remote_prefill:
        text = "spec.remotePrefill is empty: every prompt is prefilled here"
        return Verdict(kind, False, Reason.NOT_CONFIGURED, text)
    verdicts = [_over_link(name, link) for name, link in links]
    return next((each for each in verdicts if each.status), verdicts[0])


def missing_link(links: Sequence[tuple[str, Object | None]]) -> Verdict | None:
    """A link that the spec names and that does not exist: mistyped, or not made yet. None where all exist."""
    return next((_over_link(name, None) for name, link in links if link is None), None)


def _over_link(name: str, link: Object | None) -> Verdict:
    kind = Type.REMOTE_PREFILL_AVAILABLE
    if link is None:
        return Verdict(kind, False, Reason.LINK_NOT_FOUND, f"there is no InterClusterLink {name} in this namespace")
    status = link.get("status") or {}
    found = read_conditions(link)
    ready, mirrored = find(found, Type.READY), find(found, Type.ENDPOINTS_MIRRORED)
    # An endpoint that could not be written takes nothing away from those that are there.
    unusable = mirrored is None or (mirrored.status == "False" and mirrored.reason != Reason.API_ERROR.value)
    if unusable:
        why = f": {ready.reason}" if ready else ""
        return Verdict(kind, False, Reason.LINK_NOT_READY, f"link {name} is not ready{why}")
    if not status.get("endpoints"):
        return Verdict(kind, False, Reason.NO_REMOTE_ENDPOINTS, f"link {name}: no remote instance is known")
    # Without contact to the peer the endpoints known last stay in use.
    return Verdict(kind, True, Reason.AVAILABLE)


async def _links(world: World, cluster: PDCluster) -> list[tuple[str, Object | None]]:
    found: list[tuple[str, Object | None]] = []
    for remote in cluster.spec.remote_prefill:
        try:
            link = await world.client.get(INTER_CLUSTER_LINK, remote.link_ref, cluster.metadata.namespace)
        except NotFound:
            link = None
        found.append((remote.link_ref, link))
    return found


def _committed(children: pools.Children) -> RoutingPolicy | None:
    return policy_in(children.find(CONFIG_MAP, labels.policy_config_map(children.owner.name)))


def _role(seen: Instances, took: pools.Took, role: str, desired: dict[str, int]) -> RoleStatus:
    return RoleStatus(
        desired=desired[role],
        ready=seen.ready(role),
        updated=seen.updated(took.revisions, role),
        draining=seen.draining(role),
    )


def _policy_status(
    cluster: PDCluster, policy: RoutingPolicy | None, total: int, synced: int, now: str
) -> PolicyStatus | None:
    before = cluster.status.policy
    if policy is None:
        return before
    same = before is not None and (before.epoch, before.version) == policy.order
    return PolicyStatus(
        epoch=policy.epoch,
        version=policy.version,
        hash=policy.hash,
        thresholds=tuple(ThresholdStatus(link=cut.link, tokens=cut.tokens) for cut in policy.thresholds),
        routers_acknowledged=synced,
        routers_total=total,
        since=before.since if same and before is not None else now,
    )
