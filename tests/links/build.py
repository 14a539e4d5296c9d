"""Values that the tests of this folder share: a link's spec, a peer's document, what it looks like when published."""

from __future__ import annotations

import json
from typing import Any

from prfaas.api.exchange import document_name
from prfaas.api.inter_cluster_link import InterClusterLinkSpec
from prfaas.kube.resources import Key, Object
from prfaas.links.document import LocalEnd

KEY = Key("prfaas.io/v1alpha1", "InterClusterLink", "prfaas", "east")
LOCAL = LocalEnd("m/model", "main", "key-1")


def spec(*, local_source: bool = False, **changes: Any) -> InterClusterLinkSpec:
    source: dict[str, Any] = {"local": {}} if local_source else {"kubeConfigSecretRef": {"name": "peer-east"}}
    members: dict[str, Any] = {
        "local": {"kind": "PDCluster", "name": "h20"},
        "remote": {"kind": "PrfaaSCluster", "namespace": "prfaas", "name": "h200"},
        "peer": {"clusterID": "east", "exchangeNamespace": "prfaas-exchange", "source": source},
        "network": {"line": "east-west", "capacity": "100G"},
        "encryption": {"control": "MutualTLS", "requests": "None", "kv": "None"},
        "probe": {"period": "1s", "timeout": "1s", "failureThreshold": 2, "successThreshold": 1},
    }
    return InterClusterLinkSpec.model_validate(members | changes)


def document(**changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "prfaas.io/v1alpha1",
        "clusterID": "east",
        "kind": "PrfaaSCluster",
        "namespace": "prfaas",
        "name": "h200",
        "generation": 3,
        "model": {"name": "m/model", "revision": "main"},
        "compatibilityKey": "key-1",
        "endpoints": [endpoint("h200-0", "10.1.0.4"), endpoint("h200-1", "10.1.0.5", ready=False)],
    } | changes


def endpoint(
    name: str, address: str, *, port: int = 8000, ready: bool = True, key: str | None = None
) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "address": address, "port": port, "ready": ready}
    return made | ({"compatibilityKey": key} if key else {})


def published(namespace: str = "prfaas-exchange", content: str | None = None, **changes: Any) -> Object:
    """A ConfigMap as the peer's operator makes it."""
    text = json.dumps(document(**changes)) if content is None else content
    name = document_name("PrfaaSCluster", "prfaas", "h200")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": {"document.json": text},
    }
