"""What vLLM's HTTP server was told at its start, apart from the engine: which routes there are, limits, TLS, names."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, loaded at the start or later."""

    name: str
    path: str


@dataclass(frozen=True)
class Tls:
    """`--ssl-*`."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None
    refresh: bool = False
    """`--enable-ssl-refresh`: files that change are read again."""


@dataclass(frozen=True)
class FrontEnd:
    """Settings of the HTTP server."""

    tls: Tls | None = None
    uds: str | None = None
    """A socket's path, instead of host and port."""
    headless: bool = False
    """A further node of an instance: no HTTP server at all."""
    root_path: str = ""
    sse_keep_alive: int = 0
    per_request_metrics: bool = False
    max_logprobs: int = 20
    max_prompts: int = 1024
    max_answers: int = 16_384
    max_stop_strings: int = 4
    max_header_bytes: int = 4 * 1024 * 1024
    tokenizer_info: bool = False
    scale_out: bool = False
    tokens_only: bool = False
    profiler: bool = False
    fault_tolerance: bool = False
    docs: bool = True
    dev_mode: bool = False
    lora: bool = False
    lora_updates: bool = False
    adapters: tuple[Adapter, ...] = ()
    store_responses: bool = False
    elastic: bool = False
    any_model_name: bool = False
    """VLLM_SKIP_MODEL_NAME_VALIDATION: a name that is not served is answered as the first one."""
    auto_tools: bool = False
    priorities: bool = False
    default_max_tokens: int | None = None
    """`max_new_tokens` of --override-generation-config: the limit of requests that set none, and of those that do."""
    fingerprint: str | None = "vllm-0.33.0-nohash"
    """`system_fingerprint`; None: the field is null."""
    supervisor_port: int | None = None
    """`--data-parallel-multi-port-external-lb`: a server per local rank, and one port for the health of all."""
    local_ranks: int = 1
    origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    random_request_ids: bool = True
    keep_alive_on_death: bool = False


def read_front_end(args: argparse.Namespace, environment: Mapping[str, str], version: str) -> FrontEnd:
    """From vLLM's flags and variables."""
    return FrontEnd(
        tls=_tls(args),
        uds=args.uds,
        headless=args.headless or args.api_server_count == 0,
        root_path=(args.root_path or "").rstrip("/"),
        sse_keep_alive=args.sse_keep_alive_interval,
        per_request_metrics=args.enable_per_request_metrics,
        max_logprobs=args.max_logprobs,
        max_prompts=_number(environment, "VLLM_MAX_COMPLETION_PROMPTS", 1024),
        max_answers=_number(environment, "VLLM_MAX_N_SEQUENCES", 16_384),
        max_stop_strings=_number(environment, "VLLM_MAX_STOP_STRINGS", 4),
        max_header_bytes=args.h11_max_incomplete_event_size,
        tokenizer_info=args.enable_tokenizer_info_endpoint,
        scale_out=args.enable_scale_out or args.tokens_only,
        tokens_only=args.tokens_only,
        profiler=bool((args.profiler_config or {}).get("profiler")),
        fault_tolerance=args.enable_fault_tolerance,
        docs=not args.disable_fastapi_docs,
        dev_mode=_on(environment, "VLLM_SERVER_DEV_MODE"),
        lora=args.enable_lora or bool(args.lora_modules),
        lora_updates=_on(environment, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        adapters=tuple(Adapter(each["name"], each["path"]) for each in args.lora_modules or ()),
        store_responses=_on(environment, "VLLM_ENABLE_RESPONSES_API_STORE"),
        elastic=args.enable_elastic_ep,
        any_model_name=_on(environment, "VLLM_SKIP_MODEL_NAME_VALIDATION"),
        auto_tools=args.enable_auto_tool_choice,
        priorities=args.scheduling_policy == "priority",
        default_max_tokens=(args.override_generation_config or {}).get("max_new_tokens"),
        fingerprint=_fingerprint(args, version),
        supervisor_port=args.data_parallel_supervisor_port if args.data_parallel_multi_port_external_lb else None,
        local_ranks=args.data_parallel_size_local if args.data_parallel_multi_port_external_lb else 1,
        origins=tuple(args.allowed_origins),
        allow_credentials=args.allow_credentials,
        random_request_ids=not _on(environment, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"),
        keep_alive_on_death=_on(environment, "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"),
    )


def fingerprint(version: str, parallel: Mapping[str, int], inputs: Mapping[str, Any]) -> str:
    """`vllm-<version>[-tp8-...]-<hash8>`."""
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return "-".join((f"vllm-{version}", *(f"{name}{size}" for name, size in parallel.items() if size > 1), digest))


def _fingerprint(args: argparse.Namespace, version: str) -> str | None:
    if args.fingerprint_mode in ("none", "custom"):
        value: str | None = args.fingerprint_value
        return value if args.fingerprint_mode == "custom" else None
    sizes = {"tp": args.tensor_parallel_size, "pp": args.pipeline_parallel_size, "dp": args.data_parallel_size}
    inputs = sizes | {"model": args.model, "dtype": args.dtype, "cache": args.kv_cache_dtype, "args": args.revision}
    return fingerprint(version, sizes if args.fingerprint_mode == "full" else {}, inputs)


def _tls(args: argparse.Namespace) -> Tls | None:
    if not args.ssl_certfile and not args.ssl_keyfile:
        return None
    if not args.ssl_certfile:
        raise ValueError("--ssl-keyfile needs --ssl-certfile")
    return Tls(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        ca_certs=args.ssl_ca_certs,
        cert_reqs=args.ssl_cert_reqs,
        ciphers=args.ssl_ciphers,
        refresh=args.enable_ssl_refresh,
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return int(text)


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0").strip().lower() in ("1", "true")
