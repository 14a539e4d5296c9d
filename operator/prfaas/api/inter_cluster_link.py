"""InterClusterLink: one end of the link between a prefill pool and a PD pool; each datacenter has its own end."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from prfaas.api.base import ApiModel
from prfaas.api.common import Bandwidth, Duration, Name, ObjectName, OwnName, duration_seconds
from prfaas.api.conditions import Conditions
from prfaas.api.group import Groups
from prfaas.api.prfaas_cluster import Count, Generation
from prfaas.api.resource import AGE_COLUMN, READY_COLUMNS, ApiObject, Column, Resource
from prfaas.api.rules import Ruled, rule

PoolKind = Literal["PrfaaSCluster", "PDCluster"]


class LocalPool(ApiModel):
    """The pool at this end, in this namespace."""

    kind: PoolKind
    """Kind of the pool."""
    name: OwnName
    """Name of the pool."""


class RemotePool(ApiModel):
    """The pool at the other end."""

    kind: PoolKind
    """Kind of the pool."""
    namespace: Name
    """Its namespace in the peer."""
    name: OwnName
    """Name of the pool."""


class SecretKey(ApiModel):
    """One key of a Secret in the operator's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)] = "kubeconfig"
    """Key in its data."""


class LocalSource(ApiModel):
    """The peer is this same API server: both pools live here."""


@rule(
    "has(self.kubeConfigSecretRef) != has(self.local)",
    "exactly one of kubeConfigSecretRef and local is required",
    holds=lambda source: (source.kube_config_secret_ref is None) != (source.local is None),
)
class PeerSource(Ruled):
    """How the peer's exchange is read: exactly one member."""

    kube_config_secret_ref: SecretKey | None = None
    """A Secret with a kubeconfig that may only read the peer's exchange namespace (`prfaas link offer` makes it)."""
    local: LocalSource | None = None
    """The peer is this same API server."""


class Peer(ApiModel):
    """The other datacenter's API server."""

    cluster_id: Annotated[Name, Field(alias="clusterID")]
    """Identity that the peer's operator was installed with; what it publishes must carry it."""
    exchange_namespace: Name = "prfaas-exchange"
    """The peer's exchange namespace: the only one that is read."""
    source: PeerSource
    """How the exchange is read."""


class Network(ApiModel):
    """The line that the link runs over."""

    line: Name
    """Name of the physical line; links over one line name the same. Shown; planning by it is not built yet."""
    capacity: Bandwidth
    """Capacity of the line in bit/s, with a decimal suffix: `400M` is 400 Mbit/s, `100G` is 100 Gbit/s. Shown; planning
    by it is not built yet."""
    external: Annotated[dict[str, Annotated[str, Field(max_length=256)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Free attributes of a dedicated line: provider, circuit, and what else a person wants to find here."""


class Encryption(ApiModel):
    """What is encrypted on the line, and by what. `None` must be written out: nothing is unencrypted by omission."""

    control: Literal["MutualTLS", "None"]
    """The peer's API. `MutualTLS`: TLS to a verified server, with the credentials of the kubeconfig."""
    requests: Literal["None"]
    """Prompts and prefill requests on the line."""
    kv: Literal["None"]
    """KV cache and its side channel on the line."""


@rule(
    "duration(self.period) >= duration('1s')",
    "period must be at least 1s",
    holds=lambda probe: duration_seconds(probe.period) >= 1,
    field_path=".period",
)
@rule(
    "duration(self.timeout) >= duration('1s') && duration(self.timeout) <= duration(self.period)",
    "timeout must be at least 1s and not above period",
    holds=lambda probe: 1 <= duration_seconds(probe.timeout) <= duration_seconds(probe.period),
    field_path=".timeout",
)
class Probe(Ruled):
    """How it is found out whether the peer's API answers."""

    period: Duration = "10s"
    """Time between probes."""
    timeout: Duration = "5s"
    """Time after which a probe has failed."""
    failure_threshold: Annotated[int, Field(ge=1, le=1000)] = 3
    """Failures in a row after which the peer is lost."""
    success_threshold: Annotated[int, Field(ge=1, le=1000)] = 1
    """Successes in a row after which a lost peer is back."""


@rule(
    "self.local.kind != self.remote.kind",
    "a link joins a PrfaaSCluster and a PDCluster: local.kind and remote.kind must differ",
    holds=lambda spec: spec.local.kind != spec.remote.kind,
)
@rule(
    "self.encryption.control == 'MutualTLS' || has(self.peer.source.local)",
    "encryption.control may be None only with peer.source.local: another API server is read over TLS alone",
    holds=lambda spec: spec.encryption.control == "MutualTLS" or spec.peer.source.local is not None,
    field_path=".encryption.control",
)
@rule("self.local == oldSelf.local", "local cannot be changed: make another link", field_path=".local")
@rule("self.remote == oldSelf.remote", "remote cannot be changed: make another link", field_path=".remote")
class InterClusterLinkSpec(Ruled):
    """What the link should be."""

    local: LocalPool
    """The pool at this end. Cannot be changed."""
    remote: RemotePool
    """The pool at the other end. Cannot be changed."""
    peer: Peer
    """The other datacenter's API server."""
    network: Network
    """The line that the link runs over."""
    encryption: Encryption
    """What is encrypted on the line."""
    probe: Probe = Probe()
    """How the peer's API is probed."""
    paused: bool = False
    """While true the operator changes nothing: only the status is written, and says so."""


class _Status(ApiModel):
    model_config = ConfigDict(extra="ignore")


class PeerStatus(_Status):
    """The peer as last seen."""

    cluster_id: Annotated[str | None, Field(alias="clusterID", max_length=63)] = None
    """Identity that the peer publishes."""
    version: Annotated[str, Field(max_length=64)] | None = None
    """Version of the peer's API server."""
    lost_since: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] | None = None
    """When contact was lost; absent: there is contact."""
    compatibility_key: Annotated[str, Field(max_length=128)] | None = None
    """The key that the spec of the pool at the other end asks for."""
    groups: Groups = ()
    """Instances of the pool at the other end, by compatibility key."""


class InterClusterLinkStatus(_Status):
    """What the link is."""

    observed_generation: Generation | None = None
    """`metadata.generation` that this status is about."""
    peer: PeerStatus | None = None
    """The peer as last seen."""
    credentials_expire_at: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] | None = None
    """When the kubeconfig's token ends, as far as it says; make a new one before then (`prfaas link offer`)."""
    endpoints: Count | None = None
    """Remote prefill endpoints mirrored here."""
    conditions: Conditions = ()
    """Observations, one per type."""


class InterClusterLink(ApiObject):
    """One end of the link over which KV cache crosses between a PrfaaSCluster and a PDCluster."""

    resource: ClassVar[Resource] = Resource(
        kind="InterClusterLink",
        plural="interclusterlinks",
        singular="interclusterlink",
        short_names=("icl",),
        columns=(
            *READY_COLUMNS,
            Column("Peer", ".spec.peer.clusterID", "Identity of the peer."),
            Column(
                "Reachable",
                ".status.conditions[?(@.type=='PeerAPIReachable')].status",
                "The peer's API answers.",
            ),
            Column("Endpoints", ".status.endpoints", "Remote prefill endpoints mirrored here.", "integer"),
            Column("Line", ".spec.network.line", "Line that the link runs over.", priority=1),
            Column("Capacity", ".spec.network.capacity", "Capacity of that line, in bit/s.", priority=1),
            Column("Local", ".spec.local.name", "Pool at this end.", priority=1),
            Column("Remote", ".spec.remote.name", "Pool at the other end.", priority=1),
            AGE_COLUMN,
        ),
    )

    kind: Literal["InterClusterLink"]
    """Kind of this object."""
    spec: InterClusterLinkSpec
    """What the link should be."""
    status: InterClusterLinkStatus = InterClusterLinkStatus()
    """What the link is; written by the operator."""
