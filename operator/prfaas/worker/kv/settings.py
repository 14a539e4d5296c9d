"""From `--kv-transfer-config` and the environment to a KVTransfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from prfaas.api.labels import PORT_KV
from prfaas.worker.config import DEFAULT_LEASE_SECONDS, KVTransfer, Mode, Role
from prfaas.worker.exposed import STORES
from prfaas.worker.kv.lanes import MOST_LANES

_FLAG = "--kv-transfer-config"
_EXTRA = f"{_FLAG}: kv_connector_extra_config"
ROLES: tuple[Role, ...] = get_args(Role)
CONNECTORS: Mapping[str, Mode] = {
    "NixlConnector": "pull",
    "NixlPullConnector": "pull",
    "NixlPushConnector": "push",
    "MooncakeConnector": "mooncake",
}
_DAY = 86_400.0
_DRAFT_MODELS = ("eagle", "eagle3", "mtp")
_DRAFT_FIELDS = (
    *("method", "model", "revision", "code_revision"),
    *("parallel_drafting", "kv_cache_dtype", "auxiliary_layer_ids"),
)


def read_kv_transfer(fields: Mapping[str, Any], environment: Mapping[str, str]) -> KVTransfer | None:
    """The flag, parsed: None where it is absent or names no connector. ValueError says what is wrong with it."""
    connector = fields.get("kv_connector")
    if connector is None:
        return None
    if connector in STORES:
        return None  # its tiers are not modelled: its metrics are there and stay at 0
    extra = fields.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"{_EXTRA} must be an object")
    if connector == "MultiConnector":
        children = extra.get("connectors") or ()
        return next(filter(None, (read_kv_transfer(child, environment) for child in children)), None)
    if connector not in CONNECTORS:
        raise ValueError(f"{_FLAG}: kv_connector must be one of {', '.join(CONNECTORS)}, got {connector}")
    mode = CONNECTORS[connector]
    if extra.get("bidirectional_kv_xfer"):
        why = "NixlPushConnector has it not" if mode == "push" else "this worker does not read back from decode workers"
        raise ValueError(f"{_EXTRA}.bidirectional_kv_xfer: {why}")
    host = environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    if mode == "mooncake":
        host = environment.get("VLLM_HOST_IP") or host
    named: dict[str, Any] = {"engine_id": str(fields["engine_id"])} if fields.get("engine_id") else {}
    return KVTransfer(
        role=_role(fields.get("kv_role")),
        mode=mode,
        **named,
        recompute_on_failure=fields.get("kv_load_failure_policy", "fail") == "recompute",
        lease_seconds=_seconds(extra, "kv_lease_duration", DEFAULT_LEASE_SECONDS),
        enforce_compatibility=_flag(extra, "enforce_handshake_compat", default=True),
        engine_ttl=_number(extra, "engine_ttl", 3_600),
        push_registration_seconds=_seconds(
            extra, "push_registration_timeout", _seconds(extra, "decoder_kv_blocks_ttl", 480)
        ),
        host=host or "localhost",
        port=number(environment, "VLLM_NIXL_SIDE_CHANNEL_PORT", PORT_KV, 65_535),
        lanes=_lanes(mode, extra, environment),
        abort_seconds=number(environment, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480, int(_DAY)),
        bootstrap_port=number(environment, "VLLM_MOONCAKE_BOOTSTRAP_PORT", 8998, 65_535),
        bootstrap_address=_address(extra.get("bootstrap_server_address")),
        bootstrap_seconds=_positive(environment, "VLLM_MOONCAKE_CONNECTOR_TIMEOUT", 30),
    )


def draft_model(speculative: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of `--speculative-config` is in the handshake's hash: a draft model that shares the KV cache."""
    if not speculative or speculative.get("method") not in _DRAFT_MODELS:
        return None
    return {field: speculative.get(field) for field in _DRAFT_FIELDS}


def number(environment: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A whole number from a variable; ValueError names it."""
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) > most:
        raise ValueError(f"{name} must be a whole number up to {most}, got {text!r}")
    return int(text)


def _lanes(mode: Mode, extra: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    if mode == "mooncake":
        lanes = number(environment, "MC_TCP_LANES_PER_PEER", 4, MOST_LANES)
        if lanes < 1:
            raise ValueError(f"MC_TCP_LANES_PER_PEER must be a whole number from 1 to {MOST_LANES}, got {lanes}")
        return lanes
    threads = extra.get("num_threads", 4)
    if type(threads) is not int or threads < 0:
        raise ValueError(f"{_EXTRA}.num_threads must be a whole number, got {threads!r}")
    return min(max(threads, 1), MOST_LANES)


def _role(given: object) -> Role:
    for role in ROLES:
        if role == given:
            return role
    raise ValueError(f"{_FLAG}: kv_role must be one of {', '.join(ROLES)}, got {given}")


def _seconds(extra: Mapping[str, Any], name: str, default: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _DAY:
        raise ValueError(f"{_EXTRA}.{name} must be seconds above 0, got {value!r}")
    return float(value)


def _number(extra: Mapping[str, Any], name: str, default: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_EXTRA}.{name} must be a number of seconds, got {value!r}")
    return float(value)


def _flag(extra: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = extra.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{_EXTRA}.{name} must be true or false, got {value!r}")
    return value


def _address(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given.rpartition(":")[2].isdecimal():
        raise ValueError(f"{_EXTRA}.bootstrap_server_address must be host:port, got {given!r}")
    return given


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= _DAY:
        raise ValueError(f"{name} must be seconds above 0, got {text!r}")
    return value
