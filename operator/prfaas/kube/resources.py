"""The kinds we talk about, and where each lives in an API server's paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from prfaas.api.base import GROUP, VERSION

Object = dict[str, Any]
"""A Kubernetes object as plain JSON. Never mutate one that came out of an informer: it is shared."""


@dataclass(frozen=True)
class Resource:
    """One kind, as the API server serves it. `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` written in objects of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of the collection, of one object, or of an object's subresource.

        Without a namespace, a namespaced kind's path is the collection over all namespaces; with a name it is an error.
        """
        if name is not None and self.namespaced and not namespace:
            raise ValueError(f"a {self.kind} needs a namespace")
        parts = ["apis", self.group] if self.group else ["api"]
        parts.append(self.version)
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/" + "/".join(quote(part, safe="") for part in parts)


NAMESPACE = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
NODE = Resource("", "v1", "nodes", "Node", namespaced=False)
POD = Resource("", "v1", "pods", "Pod")
SERVICE = Resource("", "v1", "services", "Service")
CONFIG_MAP = Resource("", "v1", "configmaps", "ConfigMap")
SECRET = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNT = Resource("", "v1", "serviceaccounts", "ServiceAccount")
EVENT = Resource("events.k8s.io", "v1", "events", "Event")
DEPLOYMENT = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SET = Resource("apps", "v1", "replicasets", "ReplicaSet")
JOB = Resource("batch", "v1", "jobs", "Job")
POD_DISRUPTION_BUDGET = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
ENDPOINT_SLICE = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
LEASE = Resource("coordination.k8s.io", "v1", "leases", "Lease")
ROLE = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDING = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
CRD = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
LEADER_WORKER_SET = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
PRFAAS_CLUSTER = Resource(GROUP, VERSION, "prfaasclusters", "PrfaaSCluster")
PD_CLUSTER = Resource(GROUP, VERSION, "pdclusters", "PDCluster")
INTER_CLUSTER_LINK = Resource(GROUP, VERSION, "interclusterlinks", "InterClusterLink")

ALL = (
    NAMESPACE,
    NODE,
    POD,
    SERVICE,
    CONFIG_MAP,
    SECRET,
    SERVICE_ACCOUNT,
    EVENT,
    DEPLOYMENT,
    REPLICA_SET,
    JOB,
    POD_DISRUPTION_BUDGET,
    ENDPOINT_SLICE,
    LEASE,
    ROLE,
    ROLE_BINDING,
    CRD,
    LEADER_WORKER_SET,
    PRFAAS_CLUSTER,
    PD_CLUSTER,
    INTER_CLUSTER_LINK,
)
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in ALL}


def resource_of(obj: Mapping[str, Any]) -> Resource:
    """The resource of an object, by its apiVersion and kind. Raises ValueError for a kind that we do not touch."""
    key = (str(obj.get("apiVersion")), str(obj.get("kind")))
    if key not in _BY_KIND:
        raise ValueError(f"not one of our kinds: apiVersion {key[0]}, kind {key[1]}")
    return _BY_KIND[key]


@dataclass(frozen=True, order=True)
class Key:
    """Names one object: which kind, where, what. `namespace` is empty for kinds that have none."""

    api_version: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


def key_of(obj: Mapping[str, Any]) -> Key:
    """The key of an object that carries its apiVersion and kind."""
    metadata = obj["metadata"]
    return Key(obj["apiVersion"], obj["kind"], metadata.get("namespace", ""), metadata["name"])
