"""`kv_transfer_params` as they travel through the router: vLLM 0.33's fields, written and read.

What a decode worker makes of an object that is not right depends on the connector, and is vLLM's: it fails the request
(ParamsError), waits for a cache that nobody will send (Nowhere), or stops the engine (FatalParamsError).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CACHED = "remote_prefill_cached_tokens"
_WHERE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class ParamsError(ValueError):
    """`kv_transfer_params` from which no transfer can be made: the request fails."""


class FatalParamsError(ParamsError):
    """`kv_transfer_params` that stop vLLM's engine, by an exception in its scheduler."""


@dataclass(frozen=True)
class Nowhere:
    """A cache that is said to be elsewhere, without saying where: vLLM warns and waits until the request is aborted."""

    missing: str
    cached_tokens: int = 0


@dataclass(frozen=True)
class RemoteBlocks:
    """Where a prefilled KV cache lies: engine, request and blocks on the worker at host:port (NIXL pull)."""

    engine_id: str
    request_id: str
    host: str
    port: int
    tokens: int | None
    """None where the object does not say."""
    block_ids: tuple[tuple[int, ...], ...]
    tp_size: int | None = 1
    """None where the object does not say: taken for 1, and without heartbeats."""
    pp_size: int = 1
    cached_tokens: int | None = 0
    """None: the prefill did not end at its first token, so its scheduler adds no such field."""

    def to_params(self) -> dict[str, Any]:
        """The object of a prefill answer."""
        ranks = (self.tp_size or 1) * self.pp_size
        fields = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group) for group in self.block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "dcp_size": 1,
            "pp_size": self.pp_size,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": ranks,
            "transfer_mode": "pull",
        }
        return fields if self.cached_tokens is None else fields | {_CACHED: self.cached_tokens}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> RemoteBlocks | Nowhere:
        """Read the object of a decode request."""
        groups = params.get("remote_block_ids")
        if not groups:
            raise FatalParamsError("kv_transfer_params.remote_block_ids is missing or empty: nothing to load from")
        if not isinstance(groups, list) or not all(_is_ints(group) for group in groups):
            raise ParamsError("kv_transfer_params.remote_block_ids must be a list of lists of block ids")
        if missing := [field for field in _WHERE if params.get(field) is None]:
            return Nowhere(", ".join(missing))
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            request_id=_text(params, "remote_request_id"),
            host=_text(params, "remote_host"),
            port=_number(params, "remote_port", 1, 65_535),
            tokens=_optional(params, "remote_num_tokens", 0, 2**31, None),
            block_ids=tuple(tuple(group) for group in groups),
            tp_size=_optional(params, "tp_size", 1, 65_536, None),
            pp_size=_optional(params, "pp_size", 1, 65_536, 1) or 1,
            cached_tokens=_optional(params, _CACHED, 0, 2**31, 0),
        )


@dataclass(frozen=True)
class RemoteWriter:
    """The prefill worker that will write a KV cache here (NIXL push)."""

    engine_id: str
    request_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1
    cached_tokens: int | None = 0

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> RemoteWriter:
        """Read the object of a decode request; a required field that is missing stops the engine."""
        for field in (*_WHERE, "tp_size"):
            if field not in params:
                raise FatalParamsError(f"kv_transfer_params.{field} is missing: the scheduler raises KeyError")
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            request_id=_text(params, "remote_request_id"),
            host=_text(params, "remote_host"),
            port=_number(params, "remote_port", 1, 65_535),
            tp_size=_number(params, "tp_size", 1, 65_536),
            pp_size=_optional(params, "pp_size", 1, 65_536, 1) or 1,
        )


def pushed_params(kept: RemoteBlocks) -> dict[str, Any]:
    """The object of a prefill answer with NIXL push: that of pull without two fields."""
    fields = kept.to_params() | {"transfer_mode": "push"}
    del fields["remote_blocks_expiry_time"], fields["remote_registration_generation"]
    return fields


@dataclass(frozen=True)
class RemoteTransfer:
    """A KV cache that both legs name by one id; where it is, a bootstrap server knows (Mooncake)."""

    bootstrap: str
    engine_id: str
    transfer_id: str
    cached_tokens: int | None = 0

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> RemoteTransfer | Nowhere:
        """Read the object of a decode request."""
        needed = ("remote_bootstrap_addr", "remote_engine_id", "transfer_id")
        if missing := [field for field in needed if params.get(field) is None]:
            return Nowhere(", ".join(missing))
        bootstrap, engine_id, transfer_id = (_text(params, field) for field in needed)
        return cls(bootstrap, engine_id, transfer_id)


Remote = RemoteBlocks | RemoteWriter | RemoteTransfer | Nowhere


def blocks_digest(groups: Sequence[Sequence[int]]) -> str:
    """A short name for a list of blocks, by which a prefill worker sees that a reader means the blocks it holds."""
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


def _optional(params: Mapping[str, Any], field: str, low: int, high: int, default: int | None) -> int | None:
    return default if params.get(field) is None else _number(params, field, low, high)
