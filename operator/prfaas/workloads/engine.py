"""The engine's container: vLLM 0.33's command line, environment, ports and probes.

Order on the command line: the model directly after the command (a list flag would swallow it later), the flags that
the operator decides, the user's own arguments last, so that a user's flag wins. KV transfer is one JSON value: vLLM
does not merge it with dotted flags.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from prfaas.api import labels
from prfaas.api.common import EnvVar, duration_seconds
from prfaas.api.engine import EngineSpec
from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.workloads.errors import SpecError
from prfaas.workloads.meta import Object, digest

CONTAINER = "engine"
KV_LEASE_SECONDS = 30
"""How long a prefill instance keeps KV cache for a decode instance that shows no sign of life."""
PRESTOP_SECONDS = 5
"""Between leaving the rotation and SIGTERM: routers learn it from EndpointSlices first, since vLLM itself goes on
taking requests after SIGTERM and aborts them."""
KILL_SLACK_SECONDS = 5
PROBE_PERIOD_SECONDS = 2

_KV_ROLES = {labels.ROLE_PREFILL: "kv_producer", labels.ROLE_DECODE: "kv_consumer"}
_KV_FLAGS = (
    "--dtype",
    "--kv-cache-dtype",
    "--attention-backend",
    "--speculative-config",
    "--disable-hybrid-kv-cache-manager",
    "--no-disable-hybrid-kv-cache-manager",
)
"""Arguments that change what KV cache looks like: the engines compare them when they first meet."""


def engine_of(spec: PoolSpec, role: str) -> EngineSpec:
    """The engine of one role, with the role's own settings over the pool's."""
    if isinstance(spec, PDClusterSpec):
        return spec.engine_for("prefill" if role == labels.ROLE_PREFILL else "decode")
    return spec.engine


def command_line(spec: PoolSpec, role: str, *, node_rank: str | None = None, headless: bool = False) -> list[str]:
    """The whole command. `node_rank` is given for instances that span nodes; a `headless` node has no HTTP server."""
    engine = engine_of(spec, role)
    words = [*engine.command_words, spec.model.name]
    words += ["--served-model-name", spec.model.client_name]
    words += ["--revision", spec.model.revision]
    words += ["--port", str(engine.port)]
    if spec.model.max_model_length is not None:
        words += ["--max-model-len", str(spec.model.max_model_length)]
    words += ["--tensor-parallel-size", str(spec.gpus_per_instance)]
    if node_rank is not None:
        words += ["--nnodes", str(spec.nodes_per_instance), "--node-rank", node_rank]
        words += ["--master-addr", "$(LWS_LEADER_ADDRESS)"]
    if headless:
        words += ["--headless"]
    words += ["--kv-transfer-config", kv_transfer_config(role)]
    words += ["--shutdown-timeout", str(duration_seconds(engine.shutdown_timeout))]
    return [*words, *engine.args]


def kv_transfer_config(role: str) -> str:
    """The JSON value of `--kv-transfer-config`. A load that fails is an error: a silent local prefill of a long prompt
    would stall the decode instance that it lands on."""
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLES[role],
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_SECONDS},
    }
    return json.dumps(config, separators=(",", ":"))


def grace_seconds(spec: PoolSpec, role: str) -> int:
    """terminationGracePeriodSeconds: preStop and shutdown fit in it, or the kubelet would cut requests short."""
    return PRESTOP_SECONDS + duration_seconds(engine_of(spec, role).shutdown_timeout) + KILL_SLACK_SECONDS


def container(spec: PoolSpec, role: str, *, node_rank: str | None = None, headless: bool = False) -> Object:
    """The container of one node of an instance."""
    engine = engine_of(spec, role)
    command = command_line(spec, role, node_rank=node_rank, headless=headless)
    result: Object = {
        "name": CONTAINER,
        "image": engine.image,
        "imagePullPolicy": engine.image_pull_policy,
        "command": command[: len(engine.command_words)],
        "args": command[len(engine.command_words) :],
        "env": _environment(engine.env),
        "resources": _resources(spec, engine),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_SECONDS}}},
    }
    if headless:
        return result
    health = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 2}
    failures = max(1, math.ceil(duration_seconds(engine.startup_deadline) / PROBE_PERIOD_SECONDS))
    return result | {
        "ports": [
            {"name": "http", "containerPort": engine.port, "protocol": "TCP"},
            {"name": "kv", "containerPort": labels.PORT_KV, "protocol": "TCP"},
        ],
        "startupProbe": {**health, "periodSeconds": PROBE_PERIOD_SECONDS, "failureThreshold": failures},
        "readinessProbe": {**health, "periodSeconds": 5, "failureThreshold": 2},
        # Only a dead engine answers 503, and it never recovers by itself.
        "livenessProbe": {**health, "periodSeconds": 10, "failureThreshold": 3},
    }


def compatibility_key(spec: PoolSpec) -> str:
    """Hash of what must be equal at both ends for KV cache to be usable, as far as a spec shows it.

    Of a PDCluster that is the form that its decode instances read, for they are the other end of every transfer;
    `check_roles_agree` sees to it that its prefill instances write the same. The engines compare more when they first
    meet. Of the image only the last part counts (`vllm:0.33.0`), since each datacenter may have a registry of its own.
    """
    engine = engine_of(spec, labels.ROLE_DECODE if isinstance(spec, PDClusterSpec) else labels.ROLE_PREFILL)
    content = {
        "model": spec.model.name,
        "revision": spec.model.revision,
        "connector": engine.connector,
        "engine": engine.image.rsplit("/", 1)[-1],
        "flags": _kv_flags(engine.args),
    }
    return digest(content, 16)


def check_roles_agree(spec: PoolSpec) -> None:
    """Raises SpecError when a PDCluster's own decode instances could not read what its prefill instances write."""
    if not isinstance(spec, PDClusterSpec):
        return
    prefill, decode = (_kv_flags(engine_of(spec, role).args) for role in (labels.ROLE_PREFILL, labels.ROLE_DECODE))
    differing = sorted(flag for flag in prefill.keys() | decode.keys() if prefill.get(flag) != decode.get(flag))
    if not differing:
        return
    flag = differing[0]
    role = "decode" if flag in _kv_flags(spec.roles.decode.args) else "prefill"
    raise SpecError(
        f"spec.roles.{role}.args",
        f"{flag} is {_said(prefill.get(flag))} for prefill and {_said(decode.get(flag))} for decode: neither role "
        "could use the other's KV cache",
        "give it in spec.engine.args, for both",
    )


def _said(value: str | None) -> str:
    return "not given" if value is None else repr(value) if value else "given"


def _kv_flags(args: Sequence[str]) -> dict[str, str]:
    """The arguments that shape KV cache, in any form (`--a-b value`, `--a-b=value`, `--a_b`); the last one counts."""
    found = {}
    for index, word in enumerate(args):
        written, equals, value = word.partition("=")
        name = written.replace("_", "-")
        if name not in _KV_FLAGS:
            continue
        following = args[index + 1] if index + 1 < len(args) else ""
        found[name] = value if equals else "" if following.startswith("-") else following
    return found


def _environment(own: Sequence[EnvVar]) -> list[Object]:
    """Ours first, the user's over it by name."""
    ours: list[Object] = [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(labels.PORT_KV)},
    ]
    return list({item["name"]: item for item in (*ours, *(variable.to_wire() for variable in own))}.values())


def _resources(spec: PoolSpec, engine: EngineSpec) -> Object:
    resources: Object = engine.resources.to_wire()
    gpus = spec.gpus_per_instance // spec.nodes_per_instance
    return {**resources, "limits": {**resources.get("limits", {}), spec.node_pool.gpu_resource: gpus}}
