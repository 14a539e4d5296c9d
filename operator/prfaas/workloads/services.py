"""What stands in front of a role's instances: the headless Service and the disruption budget."""

from __future__ import annotations

from prfaas.api import labels
from prfaas.workloads.meta import Object, Owner


def role_selector(owner: Owner, role: str) -> dict[str, str]:
    """Labels of the pods that serve a role of a pool."""
    return {**owner.selector, labels.ROLE: role}


def role_service(owner: Owner, role: str, port: int) -> Object:
    """Headless: routers read its EndpointSlices and choose the instance. `port` is the engine's HTTP port."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(labels.role_service(owner.name, role), owner.labels(role, **{labels.ROLE: role})),
        "spec": {
            "clusterIP": "None",
            "selector": role_selector(owner, role),
            "ports": [
                {"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"},
                {"name": "kv", "port": labels.PORT_KV, "targetPort": "kv", "protocol": "TCP"},
            ],
        },
    }


def disruption_budget(owner: Owner, role: str, max_unavailable: int) -> Object:
    """How many pods of a role an eviction (a node drain) may take at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(labels.role_service(owner.name, role), owner.labels(role, **{labels.ROLE: role})),
        "spec": {
            "maxUnavailable": max_unavailable,
            # A pod that is not ready serves nobody: it must not keep its node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": role_selector(owner, role)},
        },
    }
