"""What a reconcile works with: the API server, the clock, the leadership, and what else is outside of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from prfaas.kube.apply import Applier
from prfaas.kube.client import KubeClient
from prfaas.kube.resources import INTER_CLUSTER_LINK, PD_CLUSTER, PRFAAS_CLUSTER, Key
from prfaas.links.registry import PeerRegistry
from prfaas.operator.config import Config
from prfaas.operator.routers import Routers
from prfaas.operator.secrets import SecretUsers

KINDS = {resource.kind: resource for resource in (PRFAAS_CLUSTER, PD_CLUSTER, INTER_CLUSTER_LINK)}


@dataclass(frozen=True)
class World:
    """One leadership's view. `epoch` is the leadership's; `now` gives UTC."""

    client: KubeClient
    config: Config
    epoch: int
    now: Callable[[], datetime]
    routers: Routers
    peers: PeerRegistry
    enqueue: Callable[[Key], None]
    """Have another object reconciled, too."""
    secrets: SecretUsers = field(default_factory=SecretUsers)
    appliers: Mapping[str, Applier] = field(default_factory=dict)
    """By kind: each kind's reconcile is a field manager of its own."""

    @classmethod
    def create(
        cls,
        client: KubeClient,
        config: Config,
        epoch: int,
        *,
        now: Callable[[], datetime],
        routers: Routers,
        peers: PeerRegistry,
        enqueue: Callable[[Key], None],
    ) -> World:
        """The world with one applier per kind. The field managers' names never change: they own the fields."""
        appliers = {kind: Applier(client, field_manager=f"prfaas-{kind.lower()}") for kind in KINDS}
        return cls(client, config, epoch, now, routers, peers, enqueue, appliers=appliers)


@dataclass(frozen=True)
class Result:
    """How a reconcile ended. None: nothing but events or the resync need bring the object back."""

    again_after: float | None = None
    """Seconds until the object is to be looked at again."""


def key_for(kind: str, namespace: str, name: str) -> Key:
    """The queue's key of an object of ours."""
    return Key(KINDS[kind].api_version, kind, namespace, name)
