"""Documents that a datacenter publishes in its exchange namespace: what a peer may know of a pool, slow facts only.

A peer may run another release: unknown fields are ignored, and a field is never removed or given a new meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, IPvAnyAddress

from prfaas.api.base import ApiModel
from prfaas.api.common import Name, ObjectName, OwnName, Port, unique_by
from prfaas.api.group import CompatibilityKey, Group, Groups


class _Published(ApiModel):
    model_config = ConfigDict(extra="ignore")


class PublishedModel(_Published):
    """The model that a pool serves."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    """What the engine loads."""
    revision: Annotated[str, Field(min_length=1, max_length=128)]
    """Revision of the model's repository."""


class PublishedEndpoint(_Published):
    """One instance that peers may send prefill requests to."""

    name: ObjectName
    """Name of the pod."""
    address: IPvAnyAddress
    """Address of the pod, reachable over the line."""
    port: Port
    """Port of the engine's HTTP server."""
    ready: bool
    """Whether it may be given requests."""
    compatibility_key: CompatibilityKey | None = None
    """Key of the KV cache that it writes; absent (an older release): the document's."""


class PoolDocument(_Published):
    """One pool, as its peers see it: key `document.json` of a ConfigMap in the exchange namespace."""

    api_version: Literal["prfaas.io/v1alpha1"] = "prfaas.io/v1alpha1"
    """Version of this document's schema."""
    cluster_id: Annotated[Name, Field(alias="clusterID")]
    """Identity of the datacenter that publishes."""
    kind: Literal["PrfaaSCluster", "PDCluster"]
    """Kind of the pool."""
    namespace: Name
    """Namespace of the pool."""
    name: OwnName
    """Name of the pool."""
    generation: Annotated[int, Field(ge=0, le=2**53)]
    """`metadata.generation` of the pool that the document was made from."""
    model: PublishedModel
    """The model served."""
    compatibility_key: Annotated[str, Field(min_length=1, max_length=128)]
    """Hash of what must be equal at both ends for KV cache to be usable, as the pool's spec asks for it."""
    groups: Groups | None = None
    """Instances by the key that they have now; absent (an older release): all have the document's."""
    endpoints: Annotated[tuple[PublishedEndpoint, ...], Field(max_length=1000), *unique_by("name")] = ()
    """Prefill instances, ready or not, by name."""

    @property
    def by_key(self) -> tuple[Group, ...]:
        """The groups. Of an older release all that it shows is one; that a PDCluster decodes is not shown, but so."""
        if self.groups is not None:
            return self.groups
        ready = sum(endpoint.ready for endpoint in self.endpoints)
        decode = int(self.kind == "PDCluster")
        return (
            Group(
                compatibility_key=self.compatibility_key,
                prefill=len(self.endpoints),
                prefill_ready=ready,
                decode=decode,
                decode_ready=decode,
            ),
        )

    def key_of(self, endpoint: PublishedEndpoint) -> str:
        """Compatibility key of one of the endpoints."""
        return endpoint.compatibility_key or self.compatibility_key


def document_name(kind: str, namespace: str, name: str) -> str:
    """Name of a pool's ConfigMap in an exchange namespace: `<kind>.<namespace>.<name>`, the kind in lower case."""
    return f"{kind.lower()}.{namespace}.{name}"
