"""Which nodes may get instances of a pool, by what its pods ask for: the scheduler decides, this only foresees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prfaas.api.pool import PoolSpec
from prfaas.kube.resources import Object


def matching(spec: PoolSpec, nodes: Iterable[Object]) -> list[str]:
    """Names of those that are ready, with the pool's labels and GPUs, and without taints that it cannot bear."""
    pool = spec.node_pool
    gpus = spec.gpus_per_instance // spec.nodes_per_instance
    found = []
    for node in nodes:
        own, status = node.get("spec") or {}, node.get("status") or {}
        have = node["metadata"].get("labels") or {}
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or [])
        if not ready or own.get("unschedulable"):
            continue
        if any(have.get(name) != value for name, value in pool.node_selector.items()):
            continue
        # Devices that are claimed are counted nowhere in a node: labels and taints decide alone.
        if not pool.resource_claims and int((status.get("allocatable") or {}).get(pool.gpu_resource, 0)) < gpus:
            continue
        if all(_tolerated(spec, taint) for taint in own.get("taints") or []):
            found.append(node["metadata"]["name"])
    return sorted(found)


def _tolerated(spec: PoolSpec, taint: Mapping[str, str]) -> bool:
    if taint.get("effect") not in ("NoSchedule", "NoExecute"):
        return True
    return any(
        (each.key is None or each.key == taint.get("key"))
        and (each.effect is None or each.effect == taint.get("effect"))
        and (each.operator == "Exists" or (each.value or "") == (taint.get("value") or ""))
        for each in spec.node_pool.tolerations
    )
