"""Documents that a datacenter publishes in its exchange namespace: what a peer may know of a pool, slow facts only.

A peer may run another release: unknown fields are ignored, and a field is never removed or given a new meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, IPvAnyAddress

from prfaas.api.base import ApiModel
from prfaas.api.common import Name, ObjectName, OwnName, Port, unique_by


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
    """Hash of what must be equal at both ends for KV cache to be usable."""
    endpoints: Annotated[tuple[PublishedEndpoint, ...], Field(max_length=1000), *unique_by("name")] = ()
    """Prefill instances, ready or not, by name."""


def document_name(kind: str, namespace: str, name: str) -> str:
    """Name of a pool's ConfigMap in an exchange namespace: `<kind>.<namespace>.<name>`, the kind in lower case."""
    return f"{kind.lower()}.{namespace}.{name}"
