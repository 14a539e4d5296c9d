"""What stands in front of a role's instances: a headless Service for each compatibility key, and the disruption budget.

Kubernetes copies a Service's labels to its EndpointSlices: so they say of what role and key the endpoints are, and
whoever reads them never pairs two keys.
"""

from __future__ import annotations

from prfaas.api import labels
from prfaas.workloads.meta import Object, Owner


def role_selector(owner: Owner, role: str) -> dict[str, str]:
    """Labels of the pods that serve a role of a pool."""
    return {**owner.selector, labels.ROLE: role}


def group_service(owner: Owner, role: str, key: str, port: int) -> Object:
    """Headless: routers read its EndpointSlices and choose the instance. `port` is the engine's HTTP port."""
    marks = {labels.ROLE: role, labels.COMPATIBILITY_KEY: key}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(labels.group_service(owner.name, role, key), owner.labels(role, **marks)),
        "spec": {
            "clusterIP": "None",
            "selector": {**owner.selector, **marks},
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
        "metadata": owner.metadata(labels.role_name(owner.name, role), owner.labels(role, **{labels.ROLE: role})),
        "spec": {
            "maxUnavailable": max_unavailable,
            # A pod that is not ready serves nobody: it must not keep its node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": role_selector(owner, role)},
        },
    }
