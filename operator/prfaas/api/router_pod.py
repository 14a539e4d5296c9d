"""The router pod's contract: what the operator renders and what the router's commands expect.

One pod: an init container writes Envoy's bootstrap, then Envoy (data plane) and the picker (its external processor)
run side by side and meet on Unix sockets in one shared emptyDir. Both containers run as the same user, or the sockets
cannot be opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RUN_DIR: Final = "/run/prfaas"
"""Mount path, in all three containers, of the emptyDir that they share."""
ENVOY_CONFIG: Final = f"{RUN_DIR}/envoy.yaml"
"""Where the init container writes Envoy's bootstrap."""
RUN_AS: Final = 65532
"""User and group of every container of the pod."""

LIVE_PATH: Final = "/livez"
"""On the admin port: the picker's loop runs."""
READY_PATH: Final = "/readyz"
"""On the admin port: watches have listed, a policy is in force, Envoy answers. Decode instances are not asked for."""
METRICS_PATH: Final = "/metrics"
"""On the admin port: Prometheus text."""
POLICY_PATH: Final = "/v1/policy"
"""On the admin port: GET and PUT of the routing policy, with a bearer token of audience `prfaas-router`."""

DEFAULT_MAX_BODY_BYTES: Final = 32 * 1024 * 1024
"""Bytes. Largest request body that a router takes unless told otherwise."""
DRAIN_SECONDS: Final = 15
"""Seconds of `preStop.sleep` in both containers: streams in flight go on while the Service forgets the pod."""


def bootstrap_command(max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> list[str]:
    """Init container, operator image."""
    return ["prfaas", "router", "bootstrap", "--out", ENVOY_CONFIG, "--max-body-bytes", str(max_body_bytes)]


def envoy_command(concurrency: int = 2) -> list[str]:
    """Container `envoy`, Envoy image. Listens on PORT_ROUTER; `concurrency` is its number of worker threads."""
    threads = ["--concurrency", str(concurrency)]
    return ["envoy", "-c", ENVOY_CONFIG, *threads, "--disable-hot-restart", "--log-level", "warning"]


def serve_command(
    namespace: str,
    cluster: str,
    policy_writers: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> list[str]:
    """Container `picker`, operator image. Listens on PORT_ROUTER_ADMIN.

    `policy_writers` are user names (`system:serviceaccount:NAMESPACE:NAME`) that may read and put the policy; a valid
    token of anyone else is answered with 403.
    """
    command = ["prfaas", "router", "serve", "--namespace", namespace, "--cluster", cluster]
    for user in policy_writers:
        command += ["--policy-writer", user]
    return [*command, "--max-body-bytes", str(max_body_bytes)]


def role_rules() -> list[dict[str, object]]:
    """Rules of the namespaced Role that the picker's service account needs."""
    verbs = ["get", "list", "watch"]
    return [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": verbs},
    ]


def cluster_role_rules() -> list[dict[str, object]]:
    """Rules that need a ClusterRoleBinding: reviewing the tokens that come with `PUT /v1/policy`."""
    return [{"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}]
