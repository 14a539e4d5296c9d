"""A group: instances of one pool that have one compatibility key, counted. In status, and in what peers may read."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from prfaas.api.base import ApiModel
from prfaas.api.common import unique_by

CompatibilityKey = Annotated[str, Field(min_length=1, max_length=63)]
"""Hash of what must be equal at both ends for KV cache to be usable; a label's value."""
_Count = Annotated[int, Field(ge=0, le=1_000_000)]


class Group(ApiModel):
    """Instances of one compatibility key. Two groups at a time: a rollout to another key is under way."""

    model_config = ConfigDict(extra="ignore")

    compatibility_key: CompatibilityKey
    """Key of the instances' pod template."""
    prefill: _Count = 0
    """Prefill instances that exist."""
    prefill_ready: _Count = 0
    """Prefill instances that are ready."""
    decode: _Count = 0
    """Decode instances that exist."""
    decode_ready: _Count = 0
    """Decode instances that are ready."""


_unique, _schema = unique_by("compatibility_key")
Groups = Annotated[tuple[Group, ...], Field(max_length=64), _unique, _schema]
