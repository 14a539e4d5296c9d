"""The router of a PDCluster: Deployment, Service, service account, its rights, and the policy's ConfigMap.

What the pod's commands expect is `api/router_pod.py`; here it becomes objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.api import labels, router_pod
from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.policy import RoutingPolicy
from prfaas.workloads.meta import Object, Owner
from prfaas.workloads.services import disruption_budget, role_selector


@dataclass(frozen=True)
class RouterSettings:
    """What the operator's own installation decides about routers."""

    operator_image: str
    """Image with `prfaas`: picker and bootstrap."""
    envoy_image: str
    """Image with `envoy`, where the PDCluster names none."""
    cluster_role: str
    """ClusterRole with the picker's rights, bound in the PDCluster's namespace."""
    policy_writers: Sequence[str] = ()
    """Users that may put a policy: the operator's service account."""
    image_pull_policy: str = "IfNotPresent"


def objects(owner: Owner, spec: PDClusterSpec, settings: RouterSettings) -> list[Object]:
    """Everything the router needs but the policy, in the order in which it is to be applied."""
    return [
        _service_account(owner),
        _role_binding(owner, settings),
        _service(owner, spec),
        disruption_budget(owner, labels.ROLE_ROUTER, 1),
        _deployment(owner, spec, settings),
    ]


def policy_config_map(owner: Owner, policy: RoutingPolicy) -> Object:
    """The committed policy, which pickers watch."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(labels.policy_config_map(owner.name), owner.labels("policy")),
        "data": {labels.POLICY_KEY: policy.model_dump_json(by_alias=True, exclude_none=True)},
    }


def router_name(owner: Owner) -> str:
    """Name of the router's Deployment, Service and service account."""
    return labels.role_name(owner.name, labels.ROLE_ROUTER)


def _labels(owner: Owner) -> dict[str, str]:
    return owner.labels(labels.ROLE_ROUTER, **{labels.ROLE: labels.ROLE_ROUTER})


def _service_account(owner: Owner) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(router_name(owner), _labels(owner)),
    }


def _role_binding(owner: Owner, settings: RouterSettings) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": owner.metadata(router_name(owner), _labels(owner)),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": settings.cluster_role,
        },
        "subjects": [{"kind": "ServiceAccount", "name": router_name(owner), "namespace": owner.namespace}],
    }


def _service(owner: Owner, spec: PDClusterSpec) -> Object:
    port: Object = {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}
    if spec.router.service.node_port is not None:
        port["nodePort"] = spec.router.service.node_port
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(router_name(owner), _labels(owner)),
        "spec": {
            "type": spec.router.service.type,
            "selector": role_selector(owner, labels.ROLE_ROUTER),
            "ports": [port],
        },
    }


def _deployment(owner: Owner, spec: PDClusterSpec, settings: RouterSettings) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(router_name(owner), _labels(owner)),
        "spec": {
            "replicas": spec.router.replicas,
            "revisionHistoryLimit": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": role_selector(owner, labels.ROLE_ROUTER)},
            "template": {"metadata": {"labels": _labels(owner)}, "spec": _pod(owner, spec, settings)},
        },
    }


def _pod(owner: Owner, spec: PDClusterSpec, settings: RouterSettings) -> Object:
    limit = spec.router.max_body_bytes
    own = {"image": settings.operator_image, "imagePullPolicy": settings.image_pull_policy}
    shared = {
        "volumeMounts": [{"name": "run", "mountPath": router_pod.RUN_DIR}, {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    drain = {"lifecycle": {"preStop": {"sleep": {"seconds": router_pod.DRAIN_SECONDS}}}}
    return {
        "serviceAccountName": router_name(owner),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 2 * router_pod.DRAIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": router_pod.RUN_AS,
            "runAsGroup": router_pod.RUN_AS,
            "fsGroup": router_pod.RUN_AS,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "run", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        "initContainers": [{"name": "bootstrap", **own, "command": router_pod.bootstrap_command(limit), **shared}],
        "containers": [
            {
                "name": "envoy",
                "image": spec.router.image or settings.envoy_image,
                "imagePullPolicy": spec.router.image_pull_policy if spec.router.image else settings.image_pull_policy,
                "command": router_pod.envoy_command(),
                "ports": [{"name": "http", "containerPort": labels.PORT_ROUTER, "protocol": "TCP"}],
                "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 5},
                "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10, "failureThreshold": 3},
                "resources": spec.router.resources.to_wire(),
                **drain,
                **shared,
            },
            {
                "name": "picker",
                **own,
                "command": router_pod.serve_command(owner.namespace, owner.name, settings.policy_writers, limit),
                "ports": [{"name": "admin", "containerPort": labels.PORT_ROUTER_ADMIN, "protocol": "TCP"}],
                "startupProbe": _probe(router_pod.LIVE_PATH, period=1, failures=60),
                "readinessProbe": _probe(router_pod.READY_PATH, period=5, failures=2),
                "livenessProbe": _probe(router_pod.LIVE_PATH, period=10, failures=3),
                "resources": {"requests": {"cpu": "50m", "memory": "96Mi"}},
                **drain,
                **shared,
            },
        ],
    }


def _probe(path: str, *, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "admin"},
        "periodSeconds": period,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }
