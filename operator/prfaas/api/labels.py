"""Labels, annotations and names on everything we make. These are API: stable, documented, tested."""

from __future__ import annotations

PART_OF = "prfaas"
MANAGED_BY = "prfaas-operator"

LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_PART_OF = "app.kubernetes.io/part-of"

CLUSTER = "prfaas.io/cluster"
"""Name of the PrfaaSCluster or PDCluster that an object belongs to."""
KIND = "prfaas.io/kind"
"""Kind of that owner, lower case: `prfaascluster`, `pdcluster` or `interclusterlink`."""
INSTANCE = "prfaas.io/instance"
"""Name of the engine instance; the only label in an instance's selector, since its role may change."""
ROLE = "prfaas.io/role"
"""`prefill`, `decode` or `router`."""
ROLE_PREFILL = "prefill"
ROLE_DECODE = "decode"
ROLE_ROUTER = "router"
REVISION = "prfaas.io/revision"
"""Hash of what the instance's pod template was rendered from."""
MODEL = "prfaas.io/model"
"""Hash of what a fetch Job fetches, and to where."""
NODE = "prfaas.io/node"
"""Annotation: the node whose disk a fetch Job fills."""
LINK = "prfaas.io/link"
"""Name of the InterClusterLink that an object was mirrored over."""
ORIGIN = "prfaas.io/origin"
"""`<kind>.<namespace>.<name>` of the object that a published or mirrored object comes from; the sweep goes by it."""

SERVICE_NAME = "kubernetes.io/service-name"
"""Kubernetes' own: the Service that an EndpointSlice belongs to."""

REMOVE = "prfaas.io/remove"
"""Annotation with value `true` on an instance's child: when the pool shrinks next, this instance goes first."""
COMPATIBILITY_KEY = "prfaas.io/compatibility-key"
"""Key of the KV cache that an instance reads and writes: on its child and pods, on Services and EndpointSlices."""
SPEC_HASH = "prfaas.io/spec-hash"
"""Annotation: hash of the object as last applied, so that an unchanged one is not applied again."""

PORT_HTTP = 8000
"""Default port of an engine's HTTP server."""
PORT_KV = 5600
"""Port of an engine's NIXL side channel; KV bytes cross the line on it (VLLM_NIXL_SIDE_CHANNEL_PORT)."""
PORT_BOOTSTRAP = 8998
"""Port on which a prefill instance with the Mooncake connector, or with SGLang, says where its KV cache is."""
PORT_KV_EVENTS = 5557
"""Port on which an engine publishes KV events; data parallel rank n on the nth port after it."""
PORT_KV_REPLAY = 5657
"""Port on which an engine replays KV events that were missed; ranks as above, clear of the side channel's."""
PORT_ROUTER = 8080
"""Port of the router's Envoy for clients."""
PORT_ROUTER_ADMIN = 8081
"""Port of the picker's own server: health, metrics, policy."""
ROUTER_AUDIENCE = "prfaas-router"
"""Audience of the bearer token with which a policy is put to a router."""
POLICY_KEY = "policy.json"
"""Key of the policy document in the ConfigMap `<pdcluster>-routing-policy`."""
EXCHANGE_KEY = "document.json"
"""Key of a published document in its ConfigMap in the exchange namespace."""


def policy_config_map(pd_cluster: str) -> str:
    """Name of the ConfigMap that holds a PDCluster's routing policy."""
    return f"{pd_cluster}-routing-policy"


def role_name(cluster: str, role: str) -> str:
    """Name of what there is one of for each role of a pool."""
    return f"{cluster}-{role}"


def group_service(cluster: str, role: str, key: str) -> str:
    """Name of the headless Service (and prefix of the EndpointSlices) of one role and compatibility key of a pool.

    The key is cut to fit: the label has the whole.
    """
    return f"{cluster}-{role}-{key[:10]}"


def mirror_service(link: str) -> str:
    """Name of the selector-less Service, in the link's namespace, that mirrors the peer's prefill endpoints."""
    return f"{link}-remote-prefill"
