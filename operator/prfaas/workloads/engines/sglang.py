"""SGLang 0.5: `python3 -m sglang.launch_server`.

Its prefill and decode meet at the prefill instance's bootstrap port, and work on a request at the same time. The
router of a PDCluster cannot drive that yet; a pool without one, or a PrfaaSCluster with a router of one's own, can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prfaas.api import labels
from prfaas.api.engine import EngineSpec
from prfaas.api.pool import PoolSpec
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

HEALTH_TIMEOUT_SECONDS = 10
"""Its `/health` generates a token and looks once a second whether it came."""
_RENDEZVOUS_PORT = 20000
"""Where the nodes of one instance meet."""
_API_KEY = "PRFAAS_ENGINE_API_KEY"
"""SGLang reads its key from the command line alone: Kubernetes puts this variable's value there."""
_SHAPE_FLAGS = (
    "--quantization",
    "--json-model-override-args",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--prefill-attention-backend",
    "--decode-attention-backend",
)
_SAME_TYPE = {"half": "float16", "float": "float32", "bf16": "bfloat16"}


def arguments(spec: PoolSpec, role: str, node: Node) -> list[str]:
    """Words after the command."""
    engine = engine_of(spec, role)
    words = ["--model-path", engine_model(spec), "--served-model-name", spec.model.client_name]
    words += ["--revision", spec.model.revision, "--host", "0.0.0.0", "--port", str(engine.port)]
    if spec.model.max_model_length is not None:
        words += ["--context-length", str(spec.model.max_model_length)]
    words += _parallelism(spec, engine, node)
    words += ["--disaggregation-mode", "prefill" if role == labels.ROLE_PREFILL else "decode"]
    words += ["--disaggregation-transfer-backend", transfer_backend(engine)]
    if role == labels.ROLE_PREFILL:
        words += ["--disaggregation-bootstrap-port", str(labels.PORT_BOOTSTRAP)]
    words += ["--dtype", engine.dtype, "--kv-cache-dtype", engine.kv_cache_dtype]
    if engine.attention_backend is not None:
        words += ["--attention-backend", engine.attention_backend]
    if engine.block_size is not None:
        words += ["--page-size", str(engine.block_size)]
    if not engine.prefix_caching:
        words += ["--disable-radix-cache"]
    if engine.kv_events:
        words += ["--kv-events-config", json.dumps(events_config(), separators=(",", ":"))]
    if engine.tls is not None:
        words += ["--ssl-keyfile", f"{TLS_FOLDER}/tls.key", "--ssl-certfile", f"{TLS_FOLDER}/tls.crt"]
    if engine.api_key_secret_ref is not None:
        words += ["--api-key", f"$({_API_KEY})"]
    return [*words, "--enable-metrics", "--enable-cache-report", *engine.args]


def transfer_backend(engine: EngineSpec) -> str:
    """Value of `--disaggregation-transfer-backend`; Mooncake over TCP has a name of its own."""
    if engine.connector == "Nixl":
        return "nixl"
    return "mooncake_tcp" if engine.transport == "TCP" else "mooncake"


def environment(spec: PoolSpec, role: str) -> list[Object]:
    """Variables that SGLang and its connector read."""
    engine = engine_of(spec, role)
    ours: list[Object] = []
    if engine.connector == "Nixl":
        ours += ucx(spec, engine)
        if engine.lanes is not None:
            parameters = json.dumps({"num_threads": str(engine.lanes)}, separators=(",", ":"))
            ours.append(variable("SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", parameters))
    elif engine.lanes is not None:
        ours.append(variable("MC_TCP_LANES_PER_PEER", str(engine.lanes)))
    if (secret := engine.api_key_secret_ref) is not None:
        ours.append(secret_variable(_API_KEY, secret))
    return ours


def address_variables(spec: PoolSpec) -> tuple[str, ...]:
    """What the prefill instance registers at its bootstrap port."""
    return ("SGLANG_HOST_IP",)


def ports(spec: PoolSpec, role: str) -> dict[str, int]:
    """Ports besides HTTP; those of the transfer itself are chosen by SGLang."""
    engine = engine_of(spec, role)
    found = {}
    if role == labels.ROLE_PREFILL:
        found["bootstrap"] = labels.PORT_BOOTSTRAP
    return found | events_ports(engine)


def shape(spec: PoolSpec, role: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang compares little when instances meet, so everything that shapes KV cache is here."""
    engine = engine_of(spec, role)
    given = _given(engine.args)
    return {
        "engine": "SGLang",
        "image": image_name(engine),
        "model": engine_model(spec),
        "revision": spec.model.revision,
        "connector": engine.connector,
        "scheme": "http" if engine.tls is None else "https",
        "--dtype": _SAME_TYPE.get(engine.dtype, engine.dtype),
        "--kv-cache-dtype": _SAME_TYPE.get(engine.kv_cache_dtype, engine.kv_cache_dtype),
        "--attention-backend": (engine.attention_backend or "").lower() or None,
        "--page-size": engine.block_size,
        **{flag: given.get(flag) for flag in _SHAPE_FLAGS},
    }


def _given(args: tuple[str, ...]) -> dict[str, str]:
    """Flags of the user's arguments with their values, the last one counting."""
    found = {}
    for index, word in enumerate(args):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = args[index + 1] if index + 1 < len(args) else ""
            found[name.replace("_", "-")] = value if equals else "" if following.startswith("--") else following
    return found


def _parallelism(spec: PoolSpec, engine: EngineSpec, node: Node) -> list[str]:
    shared = engine.parallelism
    words = ["--tp-size", str(shared.tensor_of(spec.gpus_per_instance))]
    if shared.pipeline > 1:
        words += ["--pp-size", str(shared.pipeline)]
    if shared.data > 1:
        words += ["--dp-size", str(shared.data)]
    if node.rank is not None:
        words += ["--nnodes", str(spec.nodes_per_instance), "--node-rank", node.rank]
        words += ["--dist-init-addr", f"$(LWS_LEADER_ADDRESS):{_RENDEZVOUS_PORT}"]
    return words
