"""Which policy document a PDCluster should have now. Pure.

A document is kept as long as its content is right, whoever committed it: a new leader changes nothing by being new. A
change gets the next version. Epoch and version go on from the largest seen in the ConfigMap, in the status and at the
routers, which refuse what is older: so they take it even after the ConfigMap was deleted or the Lease began anew.
"""

from __future__ import annotations

from pydantic import ValidationError

from prfaas.api import labels
from prfaas.api.pd_cluster import PDCluster, PolicyStatus
from prfaas.api.policy import Fallback, LinkThreshold, RoutingPolicy
from prfaas.kube.resources import Object


def policy_in(config_map: Object | None) -> RoutingPolicy | None:
    """The document in a ConfigMap; None where there is none that can be read (edited by hand)."""
    text = ((config_map or {}).get("data") or {}).get(labels.POLICY_KEY)
    if text is None:
        return None
    try:
        return RoutingPolicy.model_validate_json(text)
    except ValidationError:
        return None


def wanted_policy(
    cluster: PDCluster, current: RoutingPolicy | None, epoch: int, acknowledged: tuple[int, int] = (0, 0)
) -> RoutingPolicy:
    """The policy of `cluster`. `current` is the one in its ConfigMap, `epoch` our leadership's.

    `acknowledged` is the newest (epoch, version) of this PDCluster that a router said it uses.
    """
    if current is not None and current.pd_cluster_uid != cluster.metadata.uid:
        current = None
    status = cluster.status.policy or PolicyStatus()
    seen = [acknowledged, (status.epoch or 0, status.version or 0)]
    seen += [current.order] if current else []
    wanted = RoutingPolicy.build(
        pd_cluster_uid=cluster.metadata.uid,
        epoch=max(epoch, *(each for each, _ in seen)),
        version=max(each for _, each in seen) + 1,
        model=cluster.spec.model.client_name,
        thresholds=tuple(
            LinkThreshold(link=remote.link_ref, tokens=remote.initial_threshold)
            for remote in cluster.spec.remote_prefill
        ),
        fallback=Fallback(cluster.spec.router.fallback),
    )
    if current is None or current.hash != wanted.hash or current.order < max(seen):
        return wanted
    return current
