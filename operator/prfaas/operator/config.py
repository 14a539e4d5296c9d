"""What one installation of the operator is told at its start (chart values become flags of `prfaas operator`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prfaas.kube.election import ElectionTimes
from prfaas.workloads.model import Fetcher
from prfaas.workloads.router import RouterSettings


@dataclass(frozen=True)
class Config:
    """Times in seconds."""

    cluster_id: str
    """Identity of this datacenter, under which its pools are published to peers."""
    namespace: str
    """Where the operator runs: its Lease, and the Secrets of links."""
    identity: str
    """Who holds the Lease: unique to this process (pod name and a random part)."""
    routers: RouterSettings
    exchange_namespace: str = "prfaas-exchange"
    namespaces: tuple[str, ...] = ()
    """Namespaces whose objects are acted on; empty: all."""
    kubeconfig: Path | None = None
    """A kubeconfig file; None: the pod's own service account."""
    read_nodes: bool = False
    """Whether nodes may be listed: then models are fetched to every node of a pool, before an instance is there."""
    router_token: Path | None = None
    """File with the token (audience `prfaas-router`) for routers; None: policies go through the ConfigMap alone."""
    port: int = 8080
    """Port of health and metrics."""
    workers: int = 4
    """Reconciles at a time, each of another object."""
    resync: float = 300.0
    """Every object is looked at this often, whatever the events."""
    lease: str = "prfaas-operator"
    """Name of the Lease."""
    election: ElectionTimes = field(default_factory=ElectionTimes)

    @property
    def fetcher(self) -> Fetcher:
        """What fetches models: this same program."""
        return Fetcher(self.routers.operator_image, self.routers.image_pull_policy)
