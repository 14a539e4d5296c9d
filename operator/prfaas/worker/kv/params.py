"""`kv_transfer_params` as they travel through the router: vLLM 0.33's fifteen fields, written and read.

The prefill answer carries them, the decode request brings them back verbatim. Only a decode worker reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CACHED = "remote_prefill_cached_tokens"


class ParamsError(ValueError):
    """`kv_transfer_params` from which no transfer can be made."""


@dataclass(frozen=True)
class RemoteBlocks:
    """Where a prefilled KV cache lies: engine, request and blocks on the worker at host:port."""

    engine_id: str
    request_id: str
    host: str
    port: int
    tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    tp_size: int = 1
    cached_tokens: int = 0

    def to_params(self) -> dict[str, Any]:
        """The object of a prefill answer."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group) for group in self.block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": self.tp_size,
            "transfer_mode": "pull",
            _CACHED: self.cached_tokens,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> RemoteBlocks:
        """Read the object of a decode request; ParamsError with the field that is missing or wrong."""
        groups = params.get("remote_block_ids")
        if not isinstance(groups, list) or not groups or not all(_is_ints(group) for group in groups):
            raise ParamsError("kv_transfer_params.remote_block_ids must be a list of lists of block ids")
        if params.get("transfer_mode", "pull") != "pull":
            raise ParamsError("kv_transfer_params.transfer_mode must be pull")
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            request_id=_text(params, "remote_request_id"),
            host=_text(params, "remote_host"),
            port=_number(params, "remote_port", 1, 65_535),
            tokens=_number(params, "remote_num_tokens", 1, 2**31),
            block_ids=tuple(tuple(group) for group in groups),
            tp_size=_number(params, "tp_size", 1, 65_536),
            cached_tokens=_number({_CACHED: 0, **params}, _CACHED, 0, 2**31),
        )


def blocks_digest(groups: Sequence[Sequence[int]]) -> str:
    """A short name for a list of blocks, by which a prefill worker sees that a puller means the blocks it holds."""
    text = ";".join(",".join(map(str, group)) for group in groups)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_ints(group: object) -> bool:
    return isinstance(group, list) and all(type(block) is int and block >= 0 for block in group)


def _text(params: Mapping[str, Any], field: str) -> str:
    value = params.get(field)
    if not isinstance(value, str) or not value:
        raise ParamsError(f"kv_transfer_params.{field} must be a string")
    return value


def _number(params: Mapping[str, Any], field: str, low: int, high: int) -> int:
    value = params.get(field)
    if type(value) is not int or not low <= value <= high:
        raise ParamsError(f"kv_transfer_params.{field} must be a whole number from {low} to {high}")
    return value
