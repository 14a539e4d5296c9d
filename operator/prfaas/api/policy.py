"""The routing policy: the one document by which routers learn where a prompt is prefilled.

The operator commits it as a ConfigMap (durable, watched by every router) and may put it to a router (fast). Documents
of one PDCluster are totally ordered by (epoch, version): the epoch is the operator's leadership, the version counts
on. A document is immutable and says by its hash what it contains, so "is this the same policy" is one comparison.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from prfaas.api.base import API_VERSION, ApiModel
from prfaas.api.common import Name


class Fallback(StrEnum):
    """What a router does with a prompt above the threshold when no remote prefill instance can take it."""

    LOCAL_PREFILL = "LocalPrefill"
    REJECT = "Reject"


class LinkThreshold(ApiModel):
    """The cut of one link."""

    link: Name
    """Name of the InterClusterLink, in the PDCluster's namespace."""
    tokens: int = Field(ge=0, le=100_000_000)
    """Tokens. A prompt whose uncached length is above it may be prefilled over this link; 0 sends every prompt."""


class RoutingPolicy(ApiModel):
    """What every router of one PDCluster follows. Not a CRD: a document in a ConfigMap and on `PUT /v1/policy`."""

    api_version: Literal["prfaas.io/v1alpha1"] = "prfaas.io/v1alpha1"
    """Version of this document's format."""
    kind: Literal["RoutingPolicy"] = "RoutingPolicy"
    """Always `RoutingPolicy`."""
    pd_cluster_uid: str = Field(min_length=1, max_length=128, alias="pdClusterUID")
    """metadata.uid of the PDCluster; a re-created PDCluster starts a new order."""
    epoch: int = Field(ge=0, le=2**53)
    """Leadership epoch of the operator that committed the document."""
    version: int = Field(ge=1, le=2**53)
    """Counts the documents of one PDCluster; continues over epochs."""
    hash: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Hash of the content, by `policy_hash`: everything but epoch, version and the hash itself."""
    model: str = Field(min_length=1, max_length=256)
    """Name under which the engines serve the model."""
    thresholds: tuple[LinkThreshold, ...] = Field(default=(), max_length=64)
    """One cut per link over which prompts may be prefilled; empty: everything is prefilled locally."""
    fallback: Fallback = Fallback.LOCAL_PREFILL
    """What happens to a prompt above the threshold while no remote prefill instance can take it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        links = [threshold.link for threshold in self.thresholds]
        doubled = sorted({link for link in links if links.count(link) > 1})
        if doubled:
            raise ValueError(f"thresholds: link {doubled[0]!r} is listed more than once; give each link one threshold")
        expected = policy_hash(self.to_wire())
        if self.hash != expected:
            raise ValueError(f"hash: is {self.hash!r} but the content hashes to {expected!r}; the document was altered")
        return self

    @classmethod
    def build(
        cls,
        *,
        pd_cluster_uid: str,
        epoch: int,
        version: int,
        model: str,
        thresholds: tuple[LinkThreshold, ...] = (),
        fallback: Fallback = Fallback.LOCAL_PREFILL,
    ) -> Self:
        """A document with its hash computed. Raises pydantic.ValidationError as the model itself does."""
        content: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": "RoutingPolicy",
            "pdClusterUID": pd_cluster_uid,
            "epoch": epoch,
            "version": version,
            "model": model,
            "thresholds": [threshold.to_wire() for threshold in thresholds],
            "fallback": fallback.value,
        }
        return cls.model_validate(content | {"hash": policy_hash(content)})

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, version): comparable between documents of one `pd_cluster_uid` only."""
        return (self.epoch, self.version)

    def threshold(self, link: str) -> int | None:
        """Tokens of the cut of one link; None when the policy does not use the link."""
        return next((cut.tokens for cut in self.thresholds if cut.link == link), None)


def policy_hash(content: dict[str, Any]) -> str:
    """16 hex digits over the canonical JSON of a policy's wire form, without epoch, version and hash.

    Two documents with one hash tell routers the same, whoever committed them and when: the operator compares hashes to
    see whether a new version is due.
    """
    relevant = {key: value for key, value in content.items() if key not in {"epoch", "version", "hash"}}
    canonical = json.dumps(relevant, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def supersedes(new: RoutingPolicy, current: RoutingPolicy | None, uid_in_api: str | None) -> bool:
    """Whether a router that follows `current` must go over to `new`.

    `uid_in_api` is the pdClusterUID of the document in the ConfigMap as last read from the API (None: not read, or no
    document there). Another UID than the current one wins only if it is that one: the PDCluster was deleted and made
    again, and a late document of the old one must not win over it.
    """
    if current is None:
        return uid_in_api is None or new.pd_cluster_uid == uid_in_api
    if new.pd_cluster_uid != current.pd_cluster_uid:
        return new.pd_cluster_uid == uid_in_api
    return new.order > current.order
