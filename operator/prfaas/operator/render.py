"""What the operator makes of one of our pools, without a cluster: the functions of the reconcile, on a pool that has
nothing yet and of which every child can be made at once."""

from __future__ import annotations

from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.kube.apply import plan
from prfaas.kube.resources import Object
from prfaas.operator import exchange, model_cache, pd_cluster, pools, prfaas_cluster
from prfaas.operator.config import Config
from prfaas.operator.policy import wanted_policy
from prfaas.workloads import model
from prfaas.workloads.meta import Owner

FIRST_EPOCH = 1


def fresh(pool: PrfaaSCluster | PDCluster, config: Config) -> list[Object]:
    """What is sent to the API server for a new pool, in that order; last what peers may read. Raises SpecError."""
    children = pools.Children(Owner.of(pool), (), ())
    if isinstance(pool, PrfaaSCluster):
        counts = prfaas_cluster.counts(pool)
        intent = pools.intend(children, pool.spec, counts, lambda _, step: prfaas_cluster.build(pool, step))
    else:
        policy = wanted_policy(pool, None, FIRST_EPOCH)
        intent = pools.intend(
            children,
            pool.spec,
            pd_cluster.counts(pool),
            lambda _, step: pd_cluster.build(pool, step, config.routers, policy),
        )
    made = pools.Children(children.owner, intent.objects, ())
    published = exchange.pool_document(config.cluster_id, pool, (), made.instances.groups())
    # Of a cache on the nodes' disks the Jobs follow the instances: where those will be, nobody knows yet.
    places = model_cache.places(pool.spec, (), ())
    fetches = [model.job(children.owner, pool.spec, place, config.fetcher) for place in places]
    children_wanted = model.with_fetcher(intent.objects, config.fetcher)
    objects = [*fetches, *children_wanted, exchange.config_map(config.exchange_namespace, published)]
    return [step.wanted for step in plan((), objects).create]
