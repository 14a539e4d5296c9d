"""Where a pool's model comes from, and where it is kept: the part of `spec.model` that brings it to the engine.

A source is one text, `hf://ORG/NAME`, `s3://BUCKET/PREFIX` or `pvc://CLAIM/PATH`. The first two are fetched, into a
cache that outlives the pods or is theirs alone; a claim is mounted as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field

from prfaas.api.base import ApiModel
from prfaas.api.common import ObjectName, Quantity
from prfaas.api.rules import Ruled, rule

_SEGMENT = "[A-Za-z0-9_][A-Za-z0-9._=+-]*"
SOURCE = (
    "^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
    f"|s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/{_SEGMENT})*/?"
    f"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/{_SEGMENT})*/?)$"
)
ENDPOINT = r"^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~-]+)*/?$"
HOST_PATH = "^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$"

Source = Annotated[str, Field(pattern=SOURCE, max_length=512)]
Endpoint = Annotated[str, Field(pattern=ENDPOINT, max_length=512)]
Scheme = Literal["hf", "s3", "pvc"]

MARKER = ".prfaas-complete.json"
"""The file that says that a model's folder is whole; written last, by the fetcher."""


@dataclass(frozen=True)
class Origin:
    """A source, taken apart."""

    scheme: Scheme
    place: str
    """Repository (`ORG/NAME`), bucket, or claim."""
    path: str = ""
    """Prefix in the bucket, or folder on the claim; without slashes at its ends."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """Raises ValueError for what is no source; the text says what one looks like."""
        for scheme in ("hf", "s3", "pvc"):
            if not source.startswith(f"{scheme}://"):
                continue
            rest = source.removeprefix(f"{scheme}://").strip("/")
            place, _, path = (rest, "", "") if scheme == "hf" else rest.partition("/")
            if place and (scheme != "hf" or place.count("/") == 1):
                return cls(scheme, place, path)
        raise ValueError(f"{source!r} is no source: write hf://ORG/NAME, s3://BUCKET/PREFIX or pvc://CLAIM/PATH")


class SecretRef(ApiModel):
    """A Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""


class ClaimCache(ApiModel):
    """A volume that all instances mount."""

    claim_name: ObjectName
    """Name of a PersistentVolumeClaim in the same namespace; where instances run on several nodes, one that several
    nodes can mount."""


class HostPathCache(ApiModel):
    """A folder of every node."""

    path: Annotated[str, Field(pattern=HOST_PATH, max_length=512)]
    """Absolute path of the folder on the nodes; made where it is missing."""


class EphemeralCache(ApiModel):
    """A folder of each instance's own, gone with its pod."""

    size_limit: Quantity | None = None
    """Most bytes that it may take of the node's disk; absent: what the node has."""


_KINDS = ("persistent_volume_claim", "host_path", "ephemeral")


@rule(
    "(has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) + (has(self.ephemeral) ? 1 : 0) == 1",
    "exactly one of persistentVolumeClaim, hostPath and ephemeral is required",
    holds=lambda cache: sum(getattr(cache, name) is not None for name in _KINDS) == 1,
)
class ModelCache(Ruled):
    """Where the model is kept: exactly one member."""

    persistent_volume_claim: ClaimCache | None = None
    """On a volume: fetched once, for all instances."""
    host_path: HostPathCache | None = None
    """On the nodes' own disks: fetched once for each node."""
    ephemeral: EphemeralCache | None = None
    """In each instance's pod: fetched by every instance, each time that its pod is made anew."""
