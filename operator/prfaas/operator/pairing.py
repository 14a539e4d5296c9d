"""What a pool's paired rollout goes by outside of the pool: its links, as their status and their mirrored slices say.

A link's status is what its own reconcile found out about the peer, and stays while there is no contact. So a pool needs
no peer of its own, and after a restart knows at once what was known before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import ValidationError

from prfaas.api import labels
from prfaas.api.conditions import Reason, Type, find
from prfaas.api.inter_cluster_link import InterClusterLink, PeerStatus
from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.kube.resources import ENDPOINT_SLICE, INTER_CLUSTER_LINK, Object
from prfaas.operator.world import World
from prfaas.workloads.engine import compatibility_key
from prfaas.workloads.pairing import Consumer, Pairing, Supplier


async def of_prefill_pool(world: World, cluster: PrfaaSCluster) -> Pairing | None:
    """None where the pool rolls on its own, by its spec. Raises KubeError, and SpecError of a spec without a key."""
    if cluster.spec.rollout.pairing == "Independent":
        return None
    metadata = cluster.metadata
    found = await world.client.list(INTER_CLUSTER_LINK, metadata.namespace)
    links = [link for link in map(_parsed, found.items) if link is not None]
    local = (cluster.kind, metadata.name)
    own = [link for link in links if (link.spec.local.kind, link.spec.local.name) == local]
    consumers = tuple(each for link in own if (each := consumer(link)) is not None)
    return Pairing(compatibility_key(cluster.spec), consumers=consumers)


async def of_pd_pool(world: World, cluster: PDCluster, links: Sequence[tuple[str, Object | None]]) -> Pairing | None:
    """`links`: those of `spec.remotePrefill`, as read. None and errors as of `of_prefill_pool`."""
    if cluster.spec.rollout.pairing == "Independent":
        return None
    names = [name for name, _ in links]
    slices: Sequence[Object] = ()
    if names:
        selector = f"{labels.ROLE}={labels.ROLE_PREFILL},{labels.LINK} in ({','.join(names)})"
        slices = (await world.client.list(ENDPOINT_SLICE, cluster.metadata.namespace, labels=selector)).items
    suppliers = tuple(supplier(name, link, slices) for name, link in links)
    return Pairing(compatibility_key(cluster.spec), suppliers=suppliers)


def consumer(link: InterClusterLink) -> Consumer | None:
    """The pool at the other end of a prefill pool's link; None where the peer has no such pool."""
    compatible = find(link.status.conditions, Type.COMPATIBLE)
    if compatible is not None and compatible.reason == Reason.REMOTE_NOT_PUBLISHED.value:
        return None
    peer = link.status.peer or PeerStatus()
    if peer.compatibility_key is None:
        return Consumer(link.metadata.name, None)
    return Consumer(
        link.metadata.name,
        frozenset(group.compatibility_key for group in peer.groups if group.decode),
        frozenset(group.compatibility_key for group in peer.groups if group.decode_ready),
    )


def supplier(name: str, link: Object | None, slices: Iterable[Object]) -> Supplier:
    """The pool at the other end of a PDCluster's link: what routers may use of it, and where its spec is heading."""
    found = None if link is None else _parsed(link)
    peer = found.status.peer if found else None
    marks = [(each["metadata"].get("labels") or {}, each.get("endpoints") or []) for each in slices]
    ready = {
        own[labels.COMPATIBILITY_KEY]
        for own, endpoints in marks
        if own.get(labels.LINK) == name and labels.COMPATIBILITY_KEY in own
        if any((endpoint.get("conditions") or {}).get("ready") is not False for endpoint in endpoints)
    }
    return Supplier(name, frozenset(ready), peer.compatibility_key if peer else None)


def _parsed(link: Object) -> InterClusterLink | None:
    try:
        return InterClusterLink.model_validate(link)
    except ValidationError:
        return None
