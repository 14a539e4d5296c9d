"""Endpoints and policy as the API server has them: the picker's own watches.

Nobody feeds a router: with the operator down it still sees a pod leave the rotation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from pydantic import ValidationError

from prfaas.api import labels
from prfaas.api.policy import RoutingPolicy
from prfaas.kube.client import KubeClient
from prfaas.kube.errors import KubeError
from prfaas.kube.informer import Change, Informer, log_transitions
from prfaas.kube.resources import CONFIG_MAP, ENDPOINT_SLICE, Object
from prfaas.router.admin import ReviewFailedError
from prfaas.router.endpoints import read_pools
from prfaas.router.metrics import Metrics
from prfaas.router.policies import Offer, PolicyStore
from prfaas.routing.world import Pools

log = logging.getLogger(__name__)


class KubernetesSource:
    """EndpointSource of one PDCluster, by a watch of its namespace's EndpointSlices."""

    def __init__(self, client: KubeClient, namespace: str, cluster: str) -> None:
        self._cluster = cluster
        self._slices = Informer(
            client, ENDPOINT_SLICE, namespace=namespace, labels=f"{labels.LABEL_PART_OF}={labels.PART_OF}"
        )
        self._slices.on_change(self._changed)
        self._slices.on_state(self._read)
        log_transitions(self._slices, log, "EndpointSlices")
        self._callbacks: list[Callable[[], None]] = []
        self._pools = Pools()

    @property
    def synced(self) -> bool:
        return self._slices.synced.is_set()

    @property
    def pools(self) -> Pools:
        return self._pools

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._slices.run()

    def _changed(self, _: Change) -> None:
        if self.synced:
            self._read()

    def _read(self) -> None:
        self._pools = read_pools(self._slices.items.values(), self._cluster)
        for callback in self._callbacks:
            callback()


class PolicyWatch:
    """Offers the policy of the ConfigMap to the store, each time it changes."""

    def __init__(self, client: KubeClient, namespace: str, cluster: str, store: PolicyStore, metrics: Metrics) -> None:
        self._store, self._metrics = store, metrics
        name = labels.policy_config_map(cluster)
        self._maps = Informer(client, CONFIG_MAP, namespace=namespace, fields=f"metadata.name={name}")
        self._maps.on_change(self._changed)
        log_transitions(self._maps, log, f"ConfigMaps named {name}")

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._maps.run()

    def _changed(self, change: Change) -> None:
        # A ConfigMap that goes takes no policy away: routers serve on with the last one.
        if change.new is not None:
            result = offer_config_map(self._store, change.new)
            self._metrics.policies.labels("configmap", result).inc()


def offer_config_map(store: PolicyStore, config_map: Object) -> str:
    """Offer the document in a ConfigMap; says what became of it: an Offer, or `Invalid`."""
    text = (config_map.get("data") or {}).get(labels.POLICY_KEY)
    try:
        policy = RoutingPolicy.model_validate(json.loads(text or ""))
    except ValidationError as error:
        log.error("the ConfigMap's policy is not valid, the last one stays in force: %s", error)
        return "Invalid"
    except ValueError as error:
        log.error("the ConfigMap's %s is not JSON, the last policy stays in force: %s", labels.POLICY_KEY, error)
        return "Invalid"
    offer: Offer = store.from_api(policy)
    return offer.value


async def review_token(client: KubeClient, token: str) -> str | None:
    """The user of a token that is valid for routers, by TokenReview; None if it is not. Raises ReviewFailedError."""
    try:
        return await client.token_review(token, labels.ROUTER_AUDIENCE)
    except KubeError as error:
        raise ReviewFailedError(str(error)) from error
