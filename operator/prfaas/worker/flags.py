"""From parsed flags and the environment to a WorkerConfig. The flags themselves are in cli/worker.py.

Values that vLLM refuses are refused here too, so that a manifest that starts the fake starts the real one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from prfaas.api.labels import PORT_KV
from prfaas.api.profile import Profile
from prfaas.api.profiles import parse_profile, shipped, shipped_names
from prfaas.worker.config import DEFAULT_LEASE_SECONDS, KVTransfer, Role, WorkerConfig

ROLES: tuple[Role, ...] = get_args(Role)
CONNECTORS = ("NixlConnector", "NixlPullConnector")
_SAME = {
    # attribute of the parsed flags: field of WorkerConfig, with its default there
    "time_scale": "time_scale",
    "kv_byte_scale": "kv_byte_scale",
    "host": "host",
    "port": "port",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "block_size": "block_size",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "tensor_parallel_size": "tensor_parallel_size",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "attention_backend": "attention_backend",
    "shutdown_timeout": "shutdown_timeout",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
    "enable_prompt_tokens_details": "prompt_tokens_details",
    "enable_force_include_usage": "force_include_usage",
    "enable_request_id_headers": "request_id_headers",
    "enable_server_load_tracking": "load_tracking",
}
_TRANSFER_FIELDS = {
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
}


class FlagError(ValueError):
    """A flag's value is wrong; the message names the flag."""


def read_config(args: argparse.Namespace, environment: Mapping[str, str]) -> WorkerConfig:
    """The configuration; ValueError (FlagError is one) names the flag that is wrong."""
    for flag, value, least in (
        ("--max-model-len", args.max_model_len, 1),
        ("--max-num-seqs", args.max_num_seqs, 1),
        ("--tensor-parallel-size", args.tensor_parallel_size, 1),
        ("--block-size", args.block_size, 1),
        ("--num-gpu-blocks-override", args.num_gpu_blocks_override, 1),
        ("--max-num-queued-reqs", args.max_num_queued_reqs, 0),
        ("--max-num-queued-tokens", args.max_num_queued_tokens, 0),
        ("--shutdown-timeout", args.shutdown_timeout, 0),
    ):
        if value is not None and value < least:
            raise FlagError(f"{flag} must be at least {least}, got {value}")
    keys = args.api_key or ([environment["VLLM_API_KEY"]] if environment.get("VLLM_API_KEY") else [])
    given = {name: getattr(args, flag) for flag, name in _SAME.items() if getattr(args, flag) is not None}
    return WorkerConfig(
        model=args.model,
        profile=find_profile(args.profile),
        served_names=tuple(args.served_model_name or ()),
        kv_transfer=read_kv_transfer(args.kv_transfer_config, environment),
        api_keys=tuple(keys),
        keep_alive_seconds=_environment_number(environment, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", 5),
        **given,
    )


def find_profile(name: str) -> Profile:
    """A shipped profile by its name, or the one in a file."""
    if name in shipped_names():
        return shipped(name)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(shipped_names())
        raise FlagError(f"--profile {name}: neither a shipped profile ({known}) nor a readable file") from error
    try:
        return parse_profile(text)
    except ValueError as error:
        raise FlagError(f"--profile {name}: {error}") from error


def read_kv_transfer(text: str | None, environment: Mapping[str, str]) -> KVTransfer | None:
    """`--kv-transfer-config`: None where it is absent or names no connector."""
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise FlagError(f"--kv-transfer-config is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise FlagError("--kv-transfer-config must be a JSON object")
    if unknown := sorted(fields.keys() - _TRANSFER_FIELDS):
        raise FlagError(f"--kv-transfer-config has no field {', '.join(unknown)}")
    connector = fields.get("kv_connector")
    if connector is None:
        return None
    if connector not in CONNECTORS:
        raise FlagError(f"--kv-transfer-config: kv_connector must be one of {', '.join(CONNECTORS)}, got {connector}")
    policy = fields.get("kv_load_failure_policy", "fail")
    if policy not in ("fail", "recompute"):
        raise FlagError(f"--kv-transfer-config: kv_load_failure_policy must be fail or recompute, got {policy}")
    extra = fields.get("kv_connector_extra_config") or {}
    lease = extra.get("kv_lease_duration", DEFAULT_LEASE_SECONDS) if isinstance(extra, dict) else None
    if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0 < lease <= 86_400:
        raise FlagError("--kv-transfer-config: kv_connector_extra_config.kv_lease_duration must be seconds above 0")
    engine = {"engine_id": str(fields["engine_id"])} if fields.get("engine_id") else {}
    return KVTransfer(
        role=_role(fields.get("kv_role")),
        lease_seconds=float(lease),
        recompute_on_failure=policy == "recompute",
        host=environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or "localhost",
        port=_environment_number(environment, "VLLM_NIXL_SIDE_CHANNEL_PORT", PORT_KV),
        **engine,
    )


def _role(given: object) -> Role:
    for role in ROLES:
        if role == given:
            return role
    raise FlagError(f"--kv-transfer-config: kv_role must be one of {', '.join(ROLES)}, got {given}")


def _environment_number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) > 65_535:
        raise FlagError(f"{name} must be a whole number up to 65535, got {text!r}")
    return int(text)
