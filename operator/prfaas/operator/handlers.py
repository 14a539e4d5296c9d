"""Kopf's part: watch our kinds and their children, and put the key of whoever is concerned into the queue.

`on.event` only: such handlers leave no annotation and no finalizer on anything, and an event is a hint, never a fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kopf

from prfaas.api import labels
from prfaas.kube.client import KubeClient
from prfaas.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    JOB,
    LEADER_WORKER_SET,
    POD,
    POD_DISRUPTION_BUDGET,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Key,
    Object,
    Resource,
)
from prfaas.operator.world import KINDS, key_for

CHILD_KINDS = (
    DEPLOYMENT,
    POD,
    SERVICE,
    CONFIG_MAP,
    POD_DISRUPTION_BUDGET,
    SERVICE_ACCOUNT,
    ROLE_BINDING,
    ENDPOINT_SLICE,
    JOB,
)
OURS = f"{labels.LABEL_PART_OF}={labels.PART_OF}"
"""Selector of everything that may be a child. EndpointSlices inherit the labels of their Service."""

_BY_LABEL = {kind.lower(): kind for kind in KINDS}


def owners_of(child: Object) -> Iterator[Key]:
    """Keys of the objects of ours that a child, by its labels, belongs to."""
    metadata = child.get("metadata") or {}
    found, namespace = metadata.get("labels") or {}, metadata.get("namespace", "")
    kind = _BY_LABEL.get(found.get(labels.KIND, ""))
    if kind and found.get(labels.CLUSTER):
        yield key_for(kind, namespace, found[labels.CLUSTER])
    if found.get(labels.LINK):
        yield key_for("InterClusterLink", namespace, found[labels.LINK])


def register(enqueue: Callable[[Key], None], client: KubeClient, *, groups: bool) -> kopf.OperatorRegistry:
    """A registry with our handlers. `groups`: LeaderWorkerSets are there to be watched."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return connection(client)

    # Coroutines, all of them: Kopf would run plain functions in threads, and the queue lives on the loop.
    def own(kind: str) -> Callable[..., Any]:
        async def changed(name: str, namespace: str, **_: Any) -> None:
            enqueue(key_for(kind, namespace, name))

        return changed

    async def child_changed(body: kopf.Body, **_: Any) -> None:
        for key in owners_of({"metadata": dict(body.metadata)}):
            enqueue(key)

    for kind, resource in KINDS.items():
        kopf.on.event(*_selector(resource), registry=registry, id=f"own-{resource.plural}")(own(kind))
    for resource in (*CHILD_KINDS, *((LEADER_WORKER_SET,) if groups else ())):
        kopf.on.event(*_selector(resource), registry=registry, id=f"child-{resource.plural}")(child_changed)
    return registry


def connection(client: KubeClient) -> kopf.ConnectionInfo:
    """The same API server and credentials that our own client uses."""
    configuration = client.api.configuration
    if configuration.refresh_api_key_hook is not None:
        configuration.refresh_api_key_hook(configuration)
    # "Bearer ..." from a kubeconfig, "bearer ..." from a pod's service account.
    _, _, token = configuration.api_key.get("BearerToken", "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        ca_data=configuration.ca_cert_data,
        insecure=not configuration.verify_ssl,
        token=token.strip() or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


def _selector(resource: Resource) -> tuple[str, str, str]:
    return resource.group, resource.version, resource.plural
