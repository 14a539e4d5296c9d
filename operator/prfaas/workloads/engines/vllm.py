"""vLLM 0.33: `vllm serve`.

Order on the command line: the model directly after the command (a list flag would swallow it later), the flags that
the operator decides, the user's own arguments last. KV transfer and KV events are one JSON value each: vLLM does not
merge them with dotted flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prfaas.api import labels
from prfaas.api.common import duration_seconds
from prfaas.api.engine import EngineSpec
from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines import flags
from prfaas.workloads.engines.base import (
    TLS_FOLDER,
    Node,
    engine_of,
    events_config,
    events_ports,
    image_name,
    secret_variable,
    ucx,
    variable,
)
from prfaas.workloads.meta import Object
from prfaas.workloads.model import engine_model

HEALTH_TIMEOUT_SECONDS = 2
KV_LEASE_SECONDS = 30
"""vLLM's own default of kv_lease_duration."""
CONNECTORS = {"Nixl": "NixlConnector", "Mooncake": "MooncakeConnector"}
KV_ROLES = {labels.ROLE_PREFILL: "kv_producer", labels.ROLE_DECODE: "kv_consumer"}
"""The real role of each side: `kv_both` is deprecated for NIXL."""
BLOCK_SIZES = {"FLASHMLA": 64, "CUTLASS_MLA": 128}
"""Attention backends that know one block size only."""

_SHAPE_FLAGS = (
    "--quantization",
    "--code-revision",
    "--config-format",
    "--hf-config-path",
    "--hf-overrides",
    "--model-class-overrides",
    "--model-impl",
    "--attention-config",
    "--kv-cache-dtype-skip-layers",
    "--mamba-block-size",
    "--mamba-cache-dtype",
    "--mamba-ssm-cache-dtype",
)
"""Flags without a field of ours that change which layers a model has, or what their cache holds."""
_SHAPE_VARIABLES = (
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MLA_DISABLE",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)
_SPECULATIVE = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")
"""What the handshake hashes of a speculative configuration."""
_SAME_TYPE = {"half": "float16", "float": "float32"}


def arguments(spec: PoolSpec, role: str, node: Node) -> list[str]:
    """Words after `vllm serve`."""
    engine = engine_of(spec, role)
    words = [engine_model(spec), "--served-model-name", spec.model.client_name, "--revision", spec.model.revision]
    words += ["--port", str(engine.port)]
    if spec.model.max_model_length is not None:
        words += ["--max-model-len", str(spec.model.max_model_length)]
    words += _parallelism(spec, engine, node)
    words += ["--kv-transfer-config", kv_transfer_config(spec, role)]
    words += _cache(engine)
    if engine.max_queued_requests is not None:
        words += ["--max-num-queued-reqs", str(engine.max_queued_requests)]
    if engine.max_queued_tokens is not None:
        words += ["--max-num-queued-tokens", str(engine.max_queued_tokens)]
    if engine.tls is not None:
        words += ["--ssl-keyfile", f"{TLS_FOLDER}/tls.key", "--ssl-certfile", f"{TLS_FOLDER}/tls.crt"]
    words += ["--shutdown-timeout", str(duration_seconds(engine.shutdown_timeout))]
    return [*words, *engine.args]


def kv_transfer_config(spec: PoolSpec, role: str) -> str:
    """The JSON value of `--kv-transfer-config`. A load that fails is an error: a silent local prefill of a long prompt
    would stall the decode instance that it lands on."""
    engine = engine_of(spec, role)
    if engine.connector == "Nixl":
        more: dict[str, Any] = {"kv_lease_duration": lease_seconds(engine)}
        if engine.lanes is not None:
            more["num_threads"] = engine.lanes
    else:
        more = {"mooncake_protocol": engine.transport.lower()}
    return _json(
        {
            "kv_connector": CONNECTORS[engine.connector],
            "kv_role": KV_ROLES[role],
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": more,
        }
    )


def lease_seconds(engine: EngineSpec) -> int:
    """How long a prefill instance keeps KV cache for a decode instance that shows no sign of life."""
    return KV_LEASE_SECONDS if engine.kv_lease is None else duration_seconds(engine.kv_lease)


def block_size(engine: EngineSpec) -> int | None:
    """Tokens in a block: as the spec says, or the only size that the backend knows; None: vLLM chooses."""
    return engine.block_size or BLOCK_SIZES.get((engine.attention_backend or "").upper())


def environment(spec: PoolSpec, role: str) -> list[Object]:
    """Variables that vLLM and its connector read."""
    engine = engine_of(spec, role)
    # vLLM gives up on its engine process after ten minutes by itself; the startup probe decides here.
    ours = [variable("VLLM_ENGINE_READY_TIMEOUT_S", str(duration_seconds(engine.startup_deadline)))]
    if engine.connector == "Nixl":
        ours.append(variable("VLLM_NIXL_SIDE_CHANNEL_PORT", str(labels.PORT_KV)))
        ours += ucx(spec, engine)
    else:
        ours.append(variable("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(labels.PORT_BOOTSTRAP)))
        if engine.lanes is not None:
            ours.append(variable("MC_TCP_LANES_PER_PEER", str(engine.lanes)))
    if (secret := engine.api_key_secret_ref) is not None:
        ours.append(secret_variable("VLLM_API_KEY", secret))
    return ours


def address_variables(spec: PoolSpec) -> tuple[str, ...]:
    """What the prefill instance tells decode instances: NIXL has a variable of its own, Mooncake takes vLLM's."""
    return ("VLLM_NIXL_SIDE_CHANNEL_HOST",) if spec.engine.connector == "Nixl" else ("VLLM_HOST_IP",)


def ports(spec: PoolSpec, role: str) -> dict[str, int]:
    """Ports besides HTTP."""
    engine = engine_of(spec, role)
    found = {}
    if engine.connector == "Nixl":
        found["kv"] = labels.PORT_KV
    elif role == labels.ROLE_PREFILL:
        found["bootstrap"] = labels.PORT_BOOTSTRAP
    return found | events_ports(engine)


def shape(spec: PoolSpec, role: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """What the engines hash when they first meet, as far as a spec shows it, and what they check after that.

    Block size and decode context parallelism are among it although plain attention gets by with different ones: hybrid
    models do not. Tensor parallelism is not: sides may differ in it.
    """
    engine = engine_of(spec, role)
    given = flags.read(engine.args)
    dtype = given.text("--dtype") or engine.dtype
    backend = (given.text("--attention-backend") or engine.attention_backend or "auto").upper()
    hybrid_off = given.switch("--disable-hybrid-kv-cache-manager")
    found: dict[str, Any] = {
        "engine": "vLLM",
        "image": image_name(engine),
        "model": engine_model(spec),
        "revision": spec.model.revision,
        "connector": engine.connector,
        "scheme": "http" if engine.tls is None else "https",
        "--dtype": _SAME_TYPE.get(dtype, dtype),
        "--kv-cache-dtype": given.text("--kv-cache-dtype") or engine.kv_cache_dtype,
        "--attention-backend": backend,
        "--block-size": given.text("--block-size") or _text(block_size(engine)),
        "--decode-context-parallel-size": given.text("--decode-context-parallel-size") or "1",
        "--disable-hybrid-kv-cache-manager": hybrid_off,
        "--speculative-config": _speculative(given),
    }
    found |= {flag: given.json(flag) for flag in _SHAPE_FLAGS}
    found |= {name: environment.get(name) for name in _SHAPE_VARIABLES}
    return found


def _speculative(given: flags.Reading) -> dict[str, Any] | None:
    """What the handshake hashes of a draft model: of the JSON flag, and of the short flags that add to it."""
    config = given.json("--speculative-config")
    if config is not None and not isinstance(config, dict):
        return {"config": config}
    found = {str(name).replace("-", "_"): value for name, value in (config or {}).items()}
    for name in ("method", "model"):
        if (text := given.text(f"--spec-{name}")) is not None:
            found[name] = text
    return {name: found[name] for name in _SPECULATIVE if found.get(name) is not None} or None


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _parallelism(spec: PoolSpec, engine: EngineSpec, node: Node) -> list[str]:
    shared = engine.parallelism
    words = ["--tensor-parallel-size", str(shared.tensor_of(spec.gpus_per_instance))]
    if shared.pipeline > 1:
        words += ["--pipeline-parallel-size", str(shared.pipeline)]
    if shared.data > 1:
        words += ["--data-parallel-size", str(shared.data)]
    if node.rank is not None:
        words += ["--nnodes", str(spec.nodes_per_instance), "--node-rank", node.rank]
        words += ["--master-addr", "$(LWS_LEADER_ADDRESS)"]
    if node.headless:
        words += ["--headless"]
    return words


def _cache(engine: EngineSpec) -> list[str]:
    """What KV cache looks like and who is told of it: written out, for what an engine chooses may differ by GPU."""
    words = ["--dtype", engine.dtype, "--kv-cache-dtype", engine.kv_cache_dtype]
    if engine.attention_backend is not None:
        words += ["--attention-backend", engine.attention_backend]
    if (size := block_size(engine)) is not None:
        words += ["--block-size", str(size)]
    words += ["--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching"]
    if engine.kv_events:
        words += ["--kv-events-config", _json({"enable_kv_cache_events": True, **events_config()})]
    return words


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
