"""The engine's container, and the key by which instances that can use each other's KV cache know each other.

What differs between engines is in `engines/`; here is what all have in common: probes, preStop, GPUs, TLS, and the
address that peers are told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from prfaas.api import labels
from prfaas.api.common import EnvVar, duration_seconds
from prfaas.api.engine import EngineSpec
from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines import engine_for, flags, rules
from prfaas.workloads.engines.base import (
    CONTAINER,
    PRESTOP_SECONDS,
    STARTUP_PERIOD_SECONDS,
    TLS_FOLDER,
    Node,
    engine_of,
    grace_seconds,
)
from prfaas.workloads.engines.findings import environment_of
from prfaas.workloads.engines.interface import with_address_of
from prfaas.workloads.engines.rules import warnings
from prfaas.workloads.errors import SpecError
from prfaas.workloads.meta import Object, digest

__all__ = [
    "CONTAINER",
    "check",
    "check_roles_agree",
    "command_line",
    "compatibility_key",
    "container",
    "engine_of",
    "grace_seconds",
    "volumes",
    "warnings",
]


def check(spec: PoolSpec) -> None:
    """Raises SpecError for a spec that the schema accepts and that would not serve."""
    rules.check(spec)
    check_roles_agree(spec)


def command_line(spec: PoolSpec, role: str, *, node_rank: str | None = None, headless: bool = False) -> list[str]:
    """The whole command. `node_rank` is given for instances that span nodes; a `headless` node has no HTTP server."""
    arguments = engine_for(spec).arguments(spec, role, Node(node_rank, headless))
    return [*engine_of(spec, role).command_words, *arguments]


def container(spec: PoolSpec, role: str, *, node_rank: str | None = None, headless: bool = False) -> Object:
    """The container of one node of an instance."""
    engine = engine_of(spec, role)
    words = command_line(spec, role, node_rank=node_rank, headless=headless)
    command, arguments = words[: len(engine.command_words)], words[len(engine.command_words) :]
    if spec.network.interface is not None:
        command = with_address_of(spec.network.interface, engine_for(spec).address_variables(spec), command)
    result: Object = {
        "name": CONTAINER,
        "image": engine.image,
        "imagePullPolicy": engine.image_pull_policy,
        "command": command,
        "args": arguments,
        "env": _environment(spec, role, engine.env),
        "resources": _resources(spec, engine),
        "volumeMounts": _mounts(engine),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_SECONDS}}},
    }
    if engine.transport == "RDMA":
        # A network card reads and writes only memory that is locked.
        result["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if headless:
        return result
    ports = {"http": engine.port, **engine_for(spec).ports(spec, role)}
    return result | {
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        **_probes(engine, engine_for(spec).HEALTH_TIMEOUT_SECONDS),
    }


def volumes(spec: PoolSpec) -> list[Object]:
    """Volumes that the engine's container mounts."""
    memory: Object = {"medium": "Memory"}
    if spec.engine.shared_memory is not None:
        memory["sizeLimit"] = spec.engine.shared_memory
    found: list[Object] = [{"name": "shm", "emptyDir": memory}]
    if spec.engine.tls is not None:
        found.append({"name": "tls", "secret": {"secretName": spec.engine.tls.secret_name}})
    return found


def compatibility_key(spec: PoolSpec) -> str:
    """Hash of what must be equal at both ends for KV cache to be usable, as far as a spec shows it.

    Of a PDCluster that is the form that its decode instances read, for they are the other end of every transfer;
    `check_roles_agree` sees to it that its prefill instances write the same. The engines compare more when they first
    meet. Of the image only the last part counts (`vllm:0.33.0`), since each datacenter may have a registry of its own.
    """
    return digest(_shape(spec, labels.ROLE_DECODE if isinstance(spec, PDClusterSpec) else labels.ROLE_PREFILL), 16)


def check_roles_agree(spec: PoolSpec) -> None:
    """Raises SpecError when a PDCluster's own decode instances could not read what its prefill instances write."""
    if not isinstance(spec, PDClusterSpec):
        return
    prefill, decode = (_shape(spec, role) for role in (labels.ROLE_PREFILL, labels.ROLE_DECODE))
    differing = [name for name in prefill if prefill[name] != decode.get(name)]
    if not differing:
        return
    name = differing[0]
    part = "args" if name.startswith("--") else "env"
    role = "decode" if _said_by(spec.roles.decode.args, spec.roles.decode.env, name) else "prefill"
    raise SpecError(
        f"spec.roles.{role}.{part}",
        f"{name} is {_said(prefill[name])} for prefill and {_said(decode[name])} for decode: neither role could use "
        "the other's KV cache",
        f"give it in spec.engine.{part}, for both",
    )


def _shape(spec: PoolSpec, role: str) -> dict[str, Any]:
    return engine_for(spec).shape(spec, role, environment_of(spec, role))


def _said_by(args: Sequence[str], env: Sequence[EnvVar], name: str) -> bool:
    """Whether a role's own settings have a flag, in whatever form, or a variable of that name."""
    if not name.startswith("--"):
        return any(variable.name == name for variable in env)
    given = {each.flag for each in flags.read(args).given}
    return name in given or (name == "--speculative-config" and bool(given & {"--spec-method", "--spec-model"}))


def _said(value: Any) -> str:
    return "not given" if value is None else repr(value)


def _environment(spec: PoolSpec, role: str, own: Sequence[EnvVar]) -> list[Object]:
    """Ours first, the user's over it by name."""
    engine = engine_for(spec)
    ours: list[Object] = []
    if spec.network.interface is None:
        address = "status.hostIP" if spec.network.exposure == "HostNetwork" else "status.podIP"
        source = {"fieldRef": {"fieldPath": address}}
        ours += [{"name": name, "valueFrom": source} for name in engine.address_variables(spec)]
    ours += engine.environment(spec, role)
    return list({item["name"]: item for item in (*ours, *(variable.to_wire() for variable in own))}.values())


def _probes(engine: EngineSpec, timeout: int) -> Object:
    get: Object = {"path": "/health", "port": "http"}
    if engine.tls is not None:
        get["scheme"] = "HTTPS"
    health = {"httpGet": get, "timeoutSeconds": timeout}
    failures = max(1, math.ceil(duration_seconds(engine.startup_deadline) / STARTUP_PERIOD_SECONDS))
    return {
        "startupProbe": {**health, "periodSeconds": STARTUP_PERIOD_SECONDS, "failureThreshold": failures},
        "readinessProbe": {**health, "periodSeconds": 5, "failureThreshold": 2},
        # Only a dead engine answers 503, and it never recovers by itself.
        "livenessProbe": {**health, "periodSeconds": 10, "failureThreshold": 3},
    }


def _mounts(engine: EngineSpec) -> list[Object]:
    mounts: list[Object] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if engine.tls is not None:
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    return mounts


def _resources(spec: PoolSpec, engine: EngineSpec) -> Object:
    resources: Object = engine.resources.to_wire()
    claims = spec.node_pool.resource_claims
    if claims:
        own = [{"name": claim.name, "request": claim.request} for claim in claims]
        return {**resources, "claims": [{name: value for name, value in each.items() if value} for each in own]}
    gpus = spec.gpus_per_instance // spec.nodes_per_instance
    return {**resources, "limits": {**resources.get("limits", {}), spec.node_pool.gpu_resource: gpus}}
