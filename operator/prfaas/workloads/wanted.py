"""Everything that one of our pools wants in the cluster: the one pure function of each reconcile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.policy import RoutingPolicy
from prfaas.api.pool import PoolSpec
from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.workloads import router
from prfaas.workloads.engine import check, compatibility_key, engine_of
from prfaas.workloads.engines.base import roles_of
from prfaas.workloads.instance import child, revision
from prfaas.workloads.meta import Object, Owner
from prfaas.workloads.router import RouterSettings
from prfaas.workloads.services import disruption_budget, group_service


def revisions(owner: Owner, spec: PoolSpec) -> dict[str, str]:
    """The revision that each role's instances should have. Raises SpecError."""
    check(spec)
    return {role: revision(owner, spec, role) for role in roles_of(spec)}


def prfaas_cluster(
    owner: Owner, spec: PrfaaSClusterSpec, instances: Mapping[str, str], keys: Iterable[str] = ()
) -> list[Object]:
    """Objects of a prefill pool, in the order to apply them. `instances`: name -> role. Raises SpecError.

    `keys`: compatibility keys that instances have now, beside the one that the spec asks for.
    """
    return [*_fronts(owner, spec, keys), *_children(owner, spec, instances)]


def pd_cluster(
    owner: Owner,
    spec: PDClusterSpec,
    instances: Mapping[str, str],
    settings: RouterSettings,
    policy: RoutingPolicy,
    keys: Iterable[str] = (),
) -> list[Object]:
    """Objects of a PD pool, in the order to apply them. `instances`: name -> role. Raises SpecError.

    `keys`: compatibility keys that instances have now, beside the one that the spec asks for. The policy comes before
    the routers that wait for it.
    """
    return [
        *_fronts(owner, spec, keys),
        *_children(owner, spec, instances),
        router.policy_config_map(owner, policy),
        *router.objects(owner, spec, settings),
    ]


def _fronts(owner: Owner, spec: PoolSpec, keys: Iterable[str]) -> list[Object]:
    fronts = []
    for role in roles_of(spec):
        port = engine_of(spec, role).port
        fronts += [group_service(owner, role, key, port) for key in sorted({compatibility_key(spec), *keys})]
        fronts.append(disruption_budget(owner, role, spec.rollout.max_unavailable))
    return fronts


def _children(owner: Owner, spec: PoolSpec, instances: Mapping[str, str]) -> list[Object]:
    return [child(owner, spec, name, role) for name, role in sorted(instances.items())]
