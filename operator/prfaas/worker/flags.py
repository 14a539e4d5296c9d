"""From parsed flags and the environment to a WorkerConfig. The flags themselves are in `commandline`.

What vLLM refuses was refused before (commandline.parser, commandline.checks); here is what only this worker refuses.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.api.profile import Profile
from prfaas.api.profiles import parse_profile, shipped, shipped_names
from prfaas.worker.batching import batch
from prfaas.worker.commandline.checks import BLOCK_SIZES, transfer_config
from prfaas.worker.config import DEFAULT_MAX_MODEL_LEN, VLLM_VERSION, WorkerConfig
from prfaas.worker.events import EventsConfig
from prfaas.worker.exposed import read_exposed
from prfaas.worker.faults import FaultError, Faults
from prfaas.worker.faults import parse as parse_faults
from prfaas.worker.frontend import read_front_end
from prfaas.worker.kv.settings import draft_model, read_kv_transfer

_SAME = {
    # attribute of the parsed flags: field of WorkerConfig, with its default there
    "time_scale": "time_scale",
    "kv_byte_scale": "kv_byte_scale",
    "host": "host",
    "port": "port",
    "max_model_len": "max_model_len",
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
    "enable_prefix_caching": "prefix_caching",
    "prefix_caching_hash_algo": "hash_algorithm",
    "enable_chunked_prefill": "chunked_prefill",
    "scheduling_policy": "scheduling_policy",
    "attention": "attention",
}


class FlagError(ValueError):
    """A flag's value is wrong; the message names the flag."""


def read_config(args: argparse.Namespace, environment: Mapping[str, str]) -> WorkerConfig:
    """The configuration; ValueError (FlagError is one) names the flag that is wrong."""
    refuse_what_is_not_emulated(args)
    keys = args.api_key or [environment.get("VLLM_API_KEY", "")]
    given = {name: getattr(args, flag) for flag, name in _SAME.items() if getattr(args, flag) is not None}
    if args.max_model_len == -1:  # left to the model
        del given["max_model_len"]
    if args.shutdown_timeout < 0:
        raise FlagError(f"--shutdown-timeout must be at least 0, got {args.shutdown_timeout}")
    given.setdefault("block_size", BLOCK_SIZES.get((args.attention_backend or "").upper(), 16))
    profile = find_profile(args.profile)
    limits = batch(
        profile.accelerator,
        tokens=args.max_num_batched_tokens,
        sequences=args.max_num_seqs,
        max_model_len=given.get("max_model_len", DEFAULT_MAX_MODEL_LEN),
        chunked=given.get("chunked_prefill", True),
        throughput=args.performance_mode == "throughput",
    )
    return WorkerConfig(
        model=args.model,
        profile=profile,
        max_num_batched_tokens=limits.tokens,
        max_num_seqs=limits.sequences,
        served_names=tuple(args.served_model_name or ()),
        faults=read_faults(args),
        kv_transfer=read_kv_transfer(transfer_config(args, environment), environment),
        hybrid_manager=not args.disable_hybrid_kv_cache_manager,
        draft_model=draft_model(args.speculative_config),
        api_keys=tuple(key for key in keys if key),
        front=read_front_end(args, environment, VLLM_VERSION),
        retention_interval=args.prefix_cache_retention_interval,
        kv_events=read_kv_events(args.kv_events_config, environment),
        exposed=read_exposed(args, transfer_config(args, environment), environment),
        event_host=environment.get("VLLM_HOST_IP") or "127.0.0.1",
        python_hash_seed=environment.get("PYTHONHASHSEED"),
        keep_alive_seconds=_environment_number(environment, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", 5),
        **given,
    )


def read_kv_events(fields: Mapping[str, Any] | None, environment: Mapping[str, str]) -> EventsConfig | None:
    """`--kv-events-config`, parsed: None where it is absent."""
    if fields is None:
        return None
    int_hashes = environment.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1").strip().lower() in ("1", "true")
    given = {key: value for key, value in fields.items() if value is not None}
    return EventsConfig(**given, int_hashes=int_hashes)


def read_faults(args: argparse.Namespace) -> Faults | None:
    """`--enable-faults` and `--faults`: None where none may be asked for."""
    if not args.enable_faults:
        if args.faults is not None:
            raise FlagError("--faults: only together with --enable-faults")
        return None
    try:
        return parse_faults(args.faults or "", at_start=True)
    except FaultError as error:
        raise FlagError(f"--faults: {error}") from error


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


def refuse_what_is_not_emulated(args: argparse.Namespace) -> None:
    """Flags that would make vLLM serve something else than this worker can stand for."""
    for flag, given, instead in (
        ("--grpc", args.grpc, "HTTP"),
        ("--runner pooling", args.runner == "pooling", "a generating model"),
        ("--convert", args.convert not in ("auto", "none"), "a generating model"),
    ):
        if given:
            raise FlagError(f"{flag}: this worker stands for {instead} only")


def _environment_number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) > 65_535:
        raise FlagError(f"{name} must be a whole number up to 65535, got {text!r}")
    return int(text)
