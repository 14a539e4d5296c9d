"""What an override of the pod template may not change: what an instance needs to come, to serve and to go in peace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prfaas.api.common import duration_seconds
from prfaas.api.engine import PROBE_WINDOW_SECONDS
from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines.base import (
    MULTUS,
    PRESTOP_SECONDS,
    STARTUP_PERIOD_SECONDS,
    engine_of,
    grace_seconds,
    roles_of,
)
from prfaas.workloads.engines.findings import Finding, engine_override, warning
from prfaas.workloads.engines.vllm import lease_seconds

POD = "spec.podTemplate.spec"
_DECIDED = {"image": "spec.engine.image", "command": "spec.engine.command", "args": "spec.engine.args"}


def findings(spec: PoolSpec) -> Iterator[Finding]:
    """All that the override would break, and what a person should know."""
    yield from _pod(spec, spec.pod_template.spec)
    path, container = engine_override(spec)
    for name, field in _DECIDED.items():
        if name in container:
            yield Finding(
                f"{path}.{name}",
                "what the operator knows of the engine, and says to peers, would be untrue",
                f"set {field}",
            )
    yield from _gpus(spec, path, container)
    yield from _pre_stop(path, container)
    yield from _probes(spec, path, container)


def _pod(spec: PoolSpec, pod: Mapping[str, Any]) -> Iterator[Finding]:
    grace = pod.get("terminationGracePeriodSeconds")
    longest = max(grace_seconds(spec, role) for role in roles_of(spec))
    if "terminationGracePeriodSeconds" in pod and (not isinstance(grace, int) or grace < longest):
        yield Finding(
            f"{POD}.terminationGracePeriodSeconds",
            f"{grace} is shorter than preStop and spec.engine.shutdownTimeout together: requests under way would be "
            "cut off (vllm #36666, #43208)",
            f"at least {longest}, or a shorter shutdownTimeout",
        )
    if pod.get("enableServiceLinks"):
        yield Finding(
            f"{POD}.enableServiceLinks",
            "a Service called vllm would set VLLM_PORT to an address, which vLLM refuses",
            "leave it out",
        )
    host = spec.network.exposure == "HostNetwork"
    if "hostNetwork" in pod and bool(pod["hostNetwork"]) != host:
        change = warning if pod["hostNetwork"] else Finding
        yield change(
            f"{POD}.hostNetwork",
            f"spec.network.exposure is {spec.network.exposure}",
            "set spec.network.exposure instead",
        )
    if spec.network.exposure == "Secondary" and MULTUS in spec.pod_template.metadata.annotations:
        yield Finding(
            f"spec.podTemplate.metadata.annotations[{MULTUS!r}]",
            "it would replace the network that spec.network.attachment names",
            "leave it out, or list all networks of the pod there and set no spec.network",
        )


def _gpus(spec: PoolSpec, path: str, container: Mapping[str, Any]) -> Iterator[Finding]:
    resource = spec.node_pool.gpu_resource
    for where, resources in (
        ("spec.engine.resources", spec.engine.resources.to_wire()),
        (f"{path}.resources", container.get("resources")),
    ):
        for part in ("requests", "limits"):
            amounts = resources.get(part) if isinstance(resources, Mapping) else None
            if isinstance(amounts, Mapping) and resource in amounts:
                yield Finding(
                    f"{where}.{part}[{resource!r}]",
                    "the engine's parallelism is made for spec.gpusPerInstance",
                    "set spec.gpusPerInstance",
                )


def _pre_stop(path: str, container: Mapping[str, Any]) -> Iterator[Finding]:
    lifecycle = container.get("lifecycle", {})
    hook = lifecycle.get("preStop", {}) if isinstance(lifecycle, Mapping) else None
    sleep = hook.get("sleep", {}) if isinstance(hook, Mapping) else None
    seconds = sleep.get("seconds", PRESTOP_SECONDS) if isinstance(sleep, Mapping) else None
    if isinstance(hook, Mapping) and sleep is None and hook.get("exec"):
        return
    if not isinstance(seconds, int) or seconds < PRESTOP_SECONDS:
        yield Finding(
            f"{path}.lifecycle",
            "without preStop, routers send requests to an engine that has begun to end, and it answers them with "
            "status 200 and no text (vllm #36666)",
            f"leave it out, or sleep for at least {PRESTOP_SECONDS} seconds",
        )


def _probes(spec: PoolSpec, path: str, container: Mapping[str, Any]) -> Iterator[Finding]:
    for name, without in (
        ("startupProbe", "liveness probes would kill the engine while it loads the model"),
        ("readinessProbe", "routers would send requests before the model is loaded"),
    ):
        if name in container and container[name] is None:
            yield Finding(f"{path}.{name}", f"without it {without}", "leave it out")
    if "livenessProbe" in container and container["livenessProbe"] is None:
        yield warning(f"{path}.livenessProbe", "a dead engine would not be started anew", "leave it out")
    window = _window(container.get("readinessProbe"), 5, 2)
    lease = min(lease_seconds(engine_of(spec, role)) for role in roles_of(spec))
    if window is not None and window > PROBE_WINDOW_SECONDS and 3 * window > lease:
        yield Finding(
            f"{path}.readinessProbe",
            f"routers would leave a silent instance after {window} s only, and KV cache is kept for {lease} s: a "
            "decode instance could read what was freed (aws-do-eks #84)",
            f"set spec.engine.kvLease to at least {3 * window}s, or probe more often",
        )
    deadline = min(duration_seconds(engine_of(spec, role).startup_deadline) for role in roles_of(spec))
    startup = container.get("startupProbe")
    patience = _window(startup, STARTUP_PERIOD_SECONDS, max(1, deadline // STARTUP_PERIOD_SECONDS))
    if isinstance(startup, Mapping) and patience is not None and patience < deadline - STARTUP_PERIOD_SECONDS:
        yield Finding(
            f"{path}.startupProbe",
            f"it ends the engine after {patience} s, and spec.engine.startupDeadline allows {deadline} s",
            "set spec.engine.startupDeadline",
        )


def _window(probe: Any, period: int, failures: int) -> int | None:
    """Seconds until a probe with these overrides has failed often enough."""
    if not isinstance(probe, Mapping):
        return None
    every, often = probe.get("periodSeconds", period), probe.get("failureThreshold", failures)
    return every * often if isinstance(every, int) and isinstance(often, int) else None
