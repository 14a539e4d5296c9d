"""Reconcile of a PrfaaSCluster: prefill instances, their Service, and what peers may know of them."""

from __future__ import annotations

from prfaas.api import labels
from prfaas.api.conditions import Reason, Type, Verdict
from prfaas.api.prfaas_cluster import PrfaaSCluster, PrfaaSClusterStatus
from prfaas.kube.resources import Key, Object
from prfaas.operator import exchange, model_cache, pairing, pools
from prfaas.operator.report import read_conditions, report
from prfaas.operator.verdicts import conditions, pods_placed, rolling, serving, summary, while_rolling
from prfaas.operator.warm_up import warm_up_seconds
from prfaas.operator.world import Result, World
from prfaas.workloads import wanted
from prfaas.workloads.assignment import Step
from prfaas.workloads.engine import compatibility_key
from prfaas.workloads.meta import Owner


async def reconcile(world: World, key: Key) -> Result:
    """Brings one PrfaaSCluster a step nearer to its spec. Raises KubeError when it should be tried again."""
    opened = await pools.open_pool(world, key, PrfaaSCluster)
    if opened is None:
        return Result()
    live, cluster = opened
    spec, owner = cluster.spec, Owner.of(cluster)
    cache = await model_cache.step(world, owner, spec, spec.instances)
    took = await pools.take_step(
        world,
        owner,
        spec,
        counts(cluster),
        build=lambda _children, step: build(cluster, step),
        pairing=lambda: pairing.of_prefill_pool(world, cluster),
        hold_rollout=cache.hold_rollout,
    )
    seen = took.children.instances
    published = await exchange.publish(world, cluster, seen.groups(), paused=spec.paused or took.step is None)

    placed = pods_placed(seen, spec, spec.instances)
    shown = exported(published)
    rolls = rolling(seen, took.step, read_conditions(live))
    verdicts = [
        *summary(
            [while_rolling(placed, rolls), cache.verdict, None if rolls else serving(seen, took.step), shown],
            obstacle=took.obstacle or cache.obstacle,
            paused=spec.paused,
            draining=seen.draining() > 0,
            rolls=rolls,
        ),
        placed,
        cache.verdict,
        shown,
    ]
    status = PrfaaSClusterStatus(
        observed_generation=cluster.metadata.generation,
        instances=seen.count(),
        ready_instances=seen.ready(),
        updated_instances=seen.updated(took.revisions),
        draining_instances=seen.draining(),
        selector=pools.scale_selector(owner),
        compatibility_key=compatibility_key(spec),
        groups=seen.groups(),
        endpoints=published.endpoints,
        warm_up_seconds=warm_up_seconds(took.children.pods, spec, cluster.status.warm_up_seconds),
    )
    observed = conditions(verdicts, cluster.metadata.generation, world.now())
    if await report(world, live, pools.without_conditions(status), observed):
        await pools.wake_links(world, key)
    return took.finish(*cache.waits, *([] if published.ok else [exchange.RETRY_SECONDS]))


def counts(cluster: PrfaaSCluster) -> dict[str, int]:
    """Instances that there should be, by role."""
    return {labels.ROLE_PREFILL: cluster.spec.instances}


def build(cluster: PrfaaSCluster, step: Step) -> list[Object]:
    """The objects wanted after a step. Raises SpecError."""
    return wanted.prfaas_cluster(Owner.of(cluster), cluster.spec, step.apply, step.keys)


def exported(published: exchange.Published) -> Verdict:
    """Whether peers can read of the pool what is so."""
    if published.ok:
        return Verdict(Type.EXPORTED, True, Reason.PUBLISHED)
    return Verdict(Type.EXPORTED, False, Reason.PUBLISH_FAILED, published.message)
