"""What an engine is to the operator: words on a command line, environment, ports, and what its KV cache looks like.

One module per engine has these functions. They are pure; what they take of a spec is the same for all engines, so that
a spec changes its engine by `engine.kind`, image and arguments alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas.api import labels
from prfaas.api.common import duration_seconds
from prfaas.api.engine import EngineSpec, SecretKeyRef
from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.workloads.meta import Object

CONTAINER = "engine"
PRESTOP_SECONDS = 5
"""Between leaving the rotation and SIGTERM: routers learn it from EndpointSlices first, since vLLM itself goes on
taking requests after SIGTERM and aborts them."""
KILL_SLACK_SECONDS = 5
STARTUP_PERIOD_SECONDS = 2
MULTUS = "k8s.v1.cni.cncf.io/networks"
"""Annotation by which Multus gives a pod more networks."""
UCX_TRANSPORTS = {"TCP": "tcp,sm,self,cuda_copy,cuda_ipc", "RDMA": "rc,sm,self,cuda_copy,cuda_ipc"}
"""UCX_TLS by `engine.transport`: named, so that a missing RDMA device is an error and not a slow transfer."""
TLS_FOLDER = "/etc/prfaas/tls"
"""Where the certificate and key of `engine.tls` are mounted."""


@dataclass(frozen=True)
class Node:
    """The place of a container in its instance."""

    rank: str | None = None
    """Of an instance that spans nodes: a number, or what Kubernetes makes one of."""
    headless: bool = False
    """Whether this node has no HTTP server."""


class Engine(Protocol):
    """The functions of an engine's module."""

    HEALTH_TIMEOUT_SECONDS: int
    """How long its `/health` may take."""

    def arguments(self, spec: PoolSpec, role: str, node: Node) -> list[str]:
        """Words after the command: those that the operator decides, then the user's."""
        ...

    def environment(self, spec: PoolSpec, role: str) -> list[Object]:
        """Variables that the operator sets, those of the address excepted."""
        ...

    def address_variables(self, spec: PoolSpec) -> tuple[str, ...]:
        """Variables that must hold the address at which peers reach the instance's KV cache."""
        ...

    def ports(self, spec: PoolSpec, role: str) -> dict[str, int]:
        """Ports besides HTTP, by name."""
        ...

    def shape(self, spec: PoolSpec, role: str, environment: Mapping[str, Any]) -> dict[str, Any]:
        """All that two instances must have in common to use each other's KV cache, by what a user would call it."""
        ...


def roles_of(spec: PoolSpec) -> tuple[str, ...]:
    """The roles that instances of this pool can have."""
    return (labels.ROLE_PREFILL, labels.ROLE_DECODE) if isinstance(spec, PDClusterSpec) else (labels.ROLE_PREFILL,)


def engine_of(spec: PoolSpec, role: str) -> EngineSpec:
    """The engine of one role, with the role's own settings over the pool's."""
    if isinstance(spec, PDClusterSpec):
        return spec.engine_for("prefill" if role == labels.ROLE_PREFILL else "decode")
    return spec.engine


def grace_seconds(spec: PoolSpec, role: str) -> int:
    """terminationGracePeriodSeconds: preStop and shutdown fit in it, or the kubelet would cut requests short."""
    return PRESTOP_SECONDS + duration_seconds(engine_of(spec, role).shutdown_timeout) + KILL_SLACK_SECONDS


def image_name(engine: EngineSpec) -> str:
    """The part of an image that is the same in every registry: `vllm-openai:v0.33.0`."""
    return engine.image.rsplit("/", 1)[-1]


def variable(name: str, value: str) -> Object:
    """An environment variable with a fixed value."""
    return {"name": name, "value": value}


def secret_variable(name: str, secret: SecretKeyRef) -> Object:
    """An environment variable whose value is in a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": secret.to_wire()}}


def ucx(spec: PoolSpec, engine: EngineSpec) -> list[Object]:
    """What NIXL's UCX is told of the network, whichever engine NIXL is in."""
    found = [variable("UCX_TLS", UCX_TRANSPORTS[engine.transport])]
    if spec.network.interface is not None and engine.transport == "TCP":
        found.append(variable("UCX_NET_DEVICES", spec.network.interface))
    return found


def events_ports(engine: EngineSpec) -> dict[str, int]:
    """Where KV events are published and replayed, by the ports' names."""
    return {"kv-events": labels.PORT_KV_EVENTS, "kv-replay": labels.PORT_KV_REPLAY} if engine.kv_events else {}


def events_config() -> dict[str, Any]:
    """Where KV events are published and replayed: `*` makes the engine bind, anything else makes it connect."""
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{labels.PORT_KV_EVENTS}",
        "replay_endpoint": f"tcp://*:{labels.PORT_KV_REPLAY}",
    }
