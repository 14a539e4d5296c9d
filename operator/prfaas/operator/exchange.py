"""Publish in the exchange namespace what peers may know of our pools, and take back what is no longer there.

One ConfigMap per pool, with labels that name its origin. No ownerReference can point into another namespace, so what is
left of a deleted pool is swept: when its deletion is seen, at the start of a leadership, and at each resync.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prfaas.api import labels
from prfaas.api.exchange import PoolDocument, PublishedEndpoint, PublishedModel, document_name
from prfaas.api.group import Group
from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.kube.errors import KubeError, NotFound
from prfaas.kube.informer import Change, Informer, log_transitions
from prfaas.kube.resources import CONFIG_MAP, ENDPOINT_SLICE, Key, Object
from prfaas.operator.world import KINDS, World
from prfaas.workloads.engine import compatibility_key
from prfaas.workloads.meta import digest, selector_text

log = logging.getLogger("prfaas.operator")

Pool = PrfaaSCluster | PDCluster
RETRY_SECONDS = 10.0
"""When to try again to publish what could not be."""


@dataclass(frozen=True)
class Published:
    """How publishing went. `endpoints` of the document, ready or not."""

    ok: bool
    endpoints: int
    message: str = ""


async def publish(world: World, pool: Pool, groups: Iterable[Group], *, paused: bool) -> Published:
    """Makes the pool's document say what is so; `paused` only looks. Raises KubeError when endpoints cannot be read."""
    document = pool_document(world.config.cluster_id, pool, await _slices(world, pool), groups)
    count = len(document.endpoints)
    if paused:
        return Published(True, count)
    wanted = config_map(world.config.exchange_namespace, document)
    try:
        await world.appliers[pool.kind].ensure(wanted, owner=_origin_labels(_key_of(pool)))
    except KubeError as error:
        return Published(False, count, f"namespace {world.config.exchange_namespace}: {error.message}")
    return Published(True, count)


async def withdraw(world: World, key: Key) -> None:
    """Takes a pool's document back. Raises KubeError."""
    try:
        await world.client.delete(CONFIG_MAP, _name(key), world.config.exchange_namespace)
    except NotFound:
        return


async def sweep(world: World) -> None:
    """Takes back the documents of pools that no longer exist. Raises KubeError when they cannot be listed.

    A pool of which cannot be found out whether it exists keeps its document, and keeps no other from being swept.
    """
    selector = f"{labels.LABEL_MANAGED_BY}={labels.MANAGED_BY}"
    for published in (await world.client.list(CONFIG_MAP, world.config.exchange_namespace, labels=selector)).items:
        key = origin_of(published)
        if key is None:
            continue
        try:
            await _sweep_one(world, key)
        except KubeError as error:
            log.warning("document %s not swept: %s", _name(key), error)


async def _sweep_one(world: World, key: Key) -> None:
    try:
        await world.client.get(KINDS[key.kind], key.name, key.namespace)
    except NotFound:
        await withdraw(world, key)


def watch(world: World) -> Informer:
    """An informer, to be run, that has a pool looked at whose document was changed by somebody else."""

    def changed(change: Change) -> None:
        key = origin_of(change.new or change.old or {"metadata": {"name": ""}})
        if key is not None:
            world.enqueue(key)

    selector = f"{labels.LABEL_MANAGED_BY}={labels.MANAGED_BY}"
    informer = Informer(world.client, CONFIG_MAP, namespace=world.config.exchange_namespace, labels=selector)
    informer.on_change(changed)
    log_transitions(informer, log, f"ConfigMaps in {world.config.exchange_namespace}")
    return informer


def pool_document(cluster_id: str, pool: Pool, slices: Iterable[Object], groups: Iterable[Group] = ()) -> PoolDocument:
    """What peers may know. A PDCluster's own prefill instances are not offered to them."""
    return PoolDocument(
        cluster_id=cluster_id,
        kind="PrfaaSCluster" if isinstance(pool, PrfaaSCluster) else "PDCluster",
        namespace=pool.metadata.namespace,
        name=pool.metadata.name,
        generation=pool.metadata.generation,
        model=PublishedModel(name=pool.spec.model.name, revision=pool.spec.model.revision),
        compatibility_key=compatibility_key(pool.spec),
        groups=tuple(groups),
        endpoints=_endpoints(slices) if isinstance(pool, PrfaaSCluster) else (),
    )


def config_map(namespace: str, document: PoolDocument) -> Object:
    """The document as it lies in the exchange namespace."""
    key = Key("", document.kind, document.namespace, document.name)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": _name(key),
            "namespace": namespace,
            "labels": {
                labels.LABEL_NAME: f"{labels.PART_OF}-document",
                labels.LABEL_COMPONENT: "exchange",
                labels.LABEL_PART_OF: labels.PART_OF,
                labels.LABEL_MANAGED_BY: labels.MANAGED_BY,
                **_origin_labels(key),
            },
        },
        "data": {labels.EXCHANGE_KEY: document.model_dump_json(by_alias=True, exclude_none=True)},
    }


def origin_of(published: Object) -> Key | None:
    """Key of the pool that a ConfigMap in the exchange namespace was made from; None if it is not one of ours."""
    kind, _, rest = published["metadata"]["name"].partition(".")
    namespace, _, name = rest.partition(".")
    resource = next((KINDS[each] for each in KINDS if each.lower() == kind), None)
    if resource is None or not namespace or not name:
        return None
    return Key(resource.api_version, resource.kind, namespace, name)


def _origin_labels(key: Key) -> Mapping[str, str]:
    """What makes a document ours. A label holds 63 characters: a longer origin is cut, and told apart by a hash."""
    origin = _name(key)
    short = origin if len(origin) <= 63 else f"{origin[:46]}-{digest(origin, 16)}"
    return {labels.KIND: key.kind.lower(), labels.ORIGIN: short}


def _name(key: Key) -> str:
    return document_name(key.kind, key.namespace, key.name)


def _key_of(pool: Pool) -> Key:
    return Key(KINDS[pool.kind].api_version, pool.kind, pool.metadata.namespace, pool.metadata.name)


async def _slices(world: World, pool: Pool) -> list[Object]:
    """Those of the prefill Services, which Kubernetes gives the Services' labels."""
    marks = {labels.CLUSTER: pool.metadata.name, labels.KIND: pool.kind.lower(), labels.ROLE: labels.ROLE_PREFILL}
    found = await world.client.list(ENDPOINT_SLICE, pool.metadata.namespace, labels=selector_text(marks))
    return found.items


def _endpoints(slices: Iterable[Object]) -> tuple[PublishedEndpoint, ...]:
    found: dict[str, PublishedEndpoint] = {}
    for each in slices:
        key = each["metadata"].get("labels", {}).get(labels.COMPATIBILITY_KEY)
        port = next((port["port"] for port in each.get("ports") or [] if port.get("name") == "http"), None)
        for endpoint in each.get("endpoints") or []:
            name = (endpoint.get("targetRef") or {}).get("name")
            if port is None or not name or not endpoint.get("addresses"):
                continue
            # Absent means ready (the API's rule).
            ready = (endpoint.get("conditions") or {}).get("ready") is not False
            found[name] = PublishedEndpoint(
                name=name, address=endpoint["addresses"][0], port=port, ready=ready, compatibility_key=key
            )
    return tuple(found[name] for name in sorted(found))
