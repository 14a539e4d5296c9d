"""What vLLM refuses after its parser: it ends with an exception, exit status 1, before or while the engine is built.

One function per place in vLLM that checks: the parsed arguments, the environment, the configuration, the model.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import json
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prfaas.worker.commandline.layout import check_layout
from prfaas.worker.commandline.observed import check_observed
from prfaas.worker.commandline.rewrite import CommandLineError, Warn
from prfaas.worker.commandline.table import table

DEFAULT_BATCHED_TOKENS = 8192
"""vLLM's default for its API server on H100, H200 and H20."""
DEFAULT_SEQS = 1024
"""The same of max_num_seqs, and never more than the batched tokens."""
BLOCK_SIZES = {"FLASHMLA": 64, "CUTLASS_MLA": 128}
"""The only block size of an attention backend, which is also its default."""
LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, "greater than or equal to"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "less than or equal to"),
    "lt": (operator.lt, "less than"),
}


def check(args: argparse.Namespace, environment: Mapping[str, str], warn: Warn) -> None:
    """CommandLineError for what vLLM refuses, in the order in which vLLM looks."""
    check_arguments(args, environment)
    check_environment(args, environment, warn)
    check_values(args)
    check_configuration(args, environment)
    check_model(args.model)


def check_arguments(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Combinations of flags."""
    _check_grpc(args, environment)
    _need(
        not args.enable_auto_tool_choice or args.tool_call_parser,
        "Error: --enable-auto-tool-choice requires --tool-call-parser",
    )
    _need(
        not args.enable_log_outputs or args.enable_log_requests,
        "Error: --enable-log-outputs requires --enable-log-requests",
    )
    _need(
        args.sse_keep_alive_interval >= 0,
        "Error: --sse-keep-alive-interval must be a non-negative integer (0 disables keep-alive comments).",
    )
    _need(
        not (args.enable_per_request_metrics and args.disable_log_stats),
        "Error: --enable-per-request-metrics requires engine statistics logging; remove --disable-log-stats",
    )
    if args.data_parallel_multi_port_external_lb:
        _check_multi_port(args)
    _need(
        not (args.headless and (args.api_server_count or 0) > 0),
        f"--api-server-count={args.api_server_count} cannot be used with --headless (it starts no API servers)",
    )
    modes = (
        args.data_parallel_multi_port_external_lb,
        args.data_parallel_external_lb or args.data_parallel_rank is not None,
        args.data_parallel_hybrid_lb
        or (args.data_parallel_start_rank is not None and not args.data_parallel_multi_port_external_lb),
    )
    _need(
        sum(map(bool, modes)) <= 1,
        "Cannot use more than one data parallel load balancing mode. Choose one of: "
        "--data-parallel-multi-port-external-lb, --data-parallel-external-lb (or --data-parallel-rank), "
        "--data-parallel-hybrid-lb (or --data-parallel-start-rank).",
    )


def check_environment(args: argparse.Namespace, environment: Mapping[str, str], warn: Warn) -> None:
    """VLLM_PORT, and names that begin with VLLM_ and are none of vLLM's."""
    port = environment.get("VLLM_PORT")
    if port is not None and not port.lstrip("-").isdecimal():
        _need(
            "://" not in port,
            f"VLLM_PORT '{port}' appears to be a URI. This may be caused by a Kubernetes service discovery issue: "
            "a Service named vllm sets this variable",
        )
        raise CommandLineError(f"VLLM_PORT '{port}' must be a valid integer")
    level = environment.get("VLLM_LOGGING_LEVEL", "INFO")
    _need(
        level.upper() in LEVELS, f"Invalid value '{level}' for VLLM_LOGGING_LEVEL. Valid options: {', '.join(LEVELS)}."
    )
    for name in sorted(environment):
        if name.startswith("VLLM_") and name not in known_environment():
            message = f"Unknown vLLM environment variable detected: {name}"
            _need(not args.fail_on_environ_validation, message)
            warn(message)


def log_level(args: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """`--log-level`, `--logging-config.log_level` or VLLM_LOGGING_LEVEL; info where none says more."""
    configured = (getattr(args, "logging_config", None) or {}).get("log_level")
    level: str = getattr(args, "log_level", None) or configured or environment.get("VLLM_LOGGING_LEVEL", "INFO")
    return "info" if level.upper() == "NOTSET" else level.lower()


@functools.cache
def known_environment() -> frozenset[str]:
    """Every VLLM_ name that vLLM reads."""
    folder = importlib.resources.files("prfaas.worker.commandline")
    return frozenset(json.loads(folder.joinpath("environment.json").read_text(encoding="utf-8")))


def check_values(args: argparse.Namespace) -> None:
    """Bounds, and values from a closed set that the parser lets pass."""
    for flag in table().flags:
        value = getattr(args, flag.dest, None)
        if value is None or value == flag.default:
            continue
        for bound, limit in flag.more.get("constraints", {}).items():
            compare, words = _BOUNDS[bound]
            _need(compare(value, float(limit)), f"{flag.name}: Input should be {words} {limit}, got {value}")
        for allowed, given in ((flag.more.get("values"), value), (flag.more.get("enum_members"), str(value).upper())):
            if allowed and given not in allowed and given != "AUTO":
                raise CommandLineError(f"{flag.name}: unknown value {value!r}. Valid options are: {', '.join(allowed)}")


def check_configuration(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """What vLLM's configuration objects demand of each other."""
    allocator = environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    transfer = transfer_config(args, environment)
    if transfer and "expandable_segments:True" in allocator and not _cumem(args):
        raise CommandLineError(
            f"KV connector {transfer['kv_connector']} is incompatible with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True unless --enable-cumem-allocator is given"
        )
    batched = args.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    if args.max_num_seqs is not None:
        _need(
            batched >= args.max_num_seqs,
            f"max_num_batched_tokens ({batched}) must be greater than or equal to max_num_seqs ({args.max_num_seqs}).",
        )
    if args.enable_chunked_prefill is False and args.max_num_batched_tokens and (args.max_model_len or 0) > 0:
        _need(
            batched >= args.max_model_len,
            f"max_num_batched_tokens ({batched}) is smaller than max_model_len ({args.max_model_len}).",
        )
    active = getattr(args, "max_num_active_seqs", None)
    if active is not None:
        seqs = args.max_num_seqs or min(DEFAULT_SEQS, batched)
        _need(active <= seqs, f"max_num_active_seqs ({active}) cannot be greater than max_num_seqs ({seqs}).")
    check_layout(args)
    check_observed(args)
    _check_block_size(args.block_size, args.attention_backend)


def check_model(model: str) -> None:
    """A path must hold a configuration; other names are taken for those of a repository, which is not asked."""
    if not model.startswith(("/", "./", "../")):
        return
    folder = Path(model)
    if not any((folder / name).is_file() for name in ("config.json", "params.json")):
        raise CommandLineError(
            f"Invalid repository ID or local directory specified: '{model}'.\n"
            "Please verify the following requirements:\n"
            "1. Provide a valid Hugging Face repository ID.\n"
            "2. Specify a local directory that contains a recognized configuration file.\n"
            "   - For Hugging Face models: ensure the presence of a 'config.json'.\n"
            "   - For Mistral models: ensure the presence of a 'params.json'.\n"
        )


def transfer_config(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """`--kv-transfer-config` as the engine sees it; empty where no connector is set.

    `--kv-offloading-size` replaces the connector and the role: with it P/D is silently off.
    """
    given: dict[str, Any] = dict(args.kv_transfer_config or {})
    if args.kv_offloading_size is not None:
        native = (
            "SimpleCPUOffloadConnector" if _on(environment, "VLLM_USE_SIMPLE_KV_OFFLOAD") else "OffloadingConnector"
        )
        connector = native if args.kv_offloading_backend == "native" else "LMCacheMPConnector"
        given |= {"kv_connector": connector, "kv_role": "kv_both"}
    return given if given.get("kv_connector") else {}


def _check_grpc(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    if args.grpc_port is None:
        return
    _need(not args.grpc, "--grpc and --grpc-port are mutually exclusive.")
    _need(_on(environment, "VLLM_USE_RUST_FRONTEND"), "--grpc-port requires VLLM_USE_RUST_FRONTEND=1 vllm serve")
    no_server = args.headless or (args.api_server_count is not None and args.api_server_count <= 0)
    _need(not no_server, "--grpc-port requires a Rust frontend; remove --headless and --api-server-count 0")
    _need(
        not args.data_parallel_multi_port_external_lb,
        "--grpc-port is incompatible with --data-parallel-multi-port-external-lb",
    )
    _need(0 <= args.grpc_port <= 65_535, "--grpc-port must be between 0 and 65535")
    _need(args.grpc_port != args.port or args.uds, "--grpc-port must differ from --port when HTTP uses TCP")


def _check_multi_port(args: argparse.Namespace) -> None:
    flag = "Error: --data-parallel-multi-port-external-lb"
    _need(not args.grpc, f"{flag} does not support --grpc")
    _need(args.uds is None, f"{flag} does not support --uds")
    _need(
        bool(args.ssl_keyfile) == bool(args.ssl_certfile),
        "Error: --ssl-keyfile and --ssl-certfile must be provided together",
    )
    _need(args.api_server_count in (None, 1), f"{flag} currently requires --api-server-count=1")
    _need(args.data_parallel_rank is None, f"{flag} manages child --data-parallel-rank values internally")
    _need(
        not (args.data_parallel_external_lb or args.data_parallel_hybrid_lb),
        f"{flag} cannot be combined with --data-parallel-external-lb or --data-parallel-hybrid-lb",
    )
    _need(args.data_parallel_size >= 2, f"{flag} requires --data-parallel-size > 1")
    local = args.data_parallel_size_local
    _need(local is not None and local >= 2, f"{flag} requires --data-parallel-size-local >= 2")
    _need(local <= args.data_parallel_size, "Error: --data-parallel-size-local cannot exceed --data-parallel-size")


def _check_block_size(size: int | None, backend: str | None) -> None:
    if size is None:
        return
    only = BLOCK_SIZES.get((backend or "").upper())
    _need(
        size % 16 == 0 and only in (None, size),
        f"--block-size {size}: block_size not supported by {backend or 'any attention backend'}"
        f" ({f'only {only}' if only else 'multiples of 16'})",
    )


def _cumem(args: argparse.Namespace) -> bool:
    return bool(args.enable_cumem_allocator or args.enable_sleep_mode)


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0").lower() in ("1", "true")


def _need(condition: object, message: str) -> None:
    if not condition:
        raise CommandLineError(message)
