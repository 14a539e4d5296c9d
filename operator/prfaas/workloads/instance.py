"""The child object of one engine instance: a one-replica Deployment, or a one-group LeaderWorkerSet over several nodes.

The selector is the instance's name alone, so that a role can change in place. The revision label is a hash of the pod
template as rendered for no instance in particular: equal for all instances of a role, different as soon as any of them
would have to restart.
"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.api import labels
from prfaas.api.pool import PoolSpec
from prfaas.workloads import engine, model, strategic
from prfaas.workloads.engines.base import MULTUS
from prfaas.workloads.errors import SpecError
from prfaas.workloads.meta import Object, Owner, digest

NODE_LOST_SECONDS = 30
"""How long an instance stays on a node that is not ready or unreachable."""
_NODE_LOST_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_RESERVED = "prfaas.io/"


def revision(owner: Owner, spec: PoolSpec, role: str) -> str:
    """The revision that an instance of this role should have now. Raises SpecError."""
    parts = [_template(owner, spec, role, "", "", node) for node in _nodes(spec)]
    return digest(parts)


def child(owner: Owner, spec: PoolSpec, name: str, role: str) -> Object:
    """The child of the instance `name` in `role`. Raises SpecError when the pod template override does not fit."""
    number = revision(owner, spec, role)
    metadata = owner.metadata(name, _labels(owner, spec, name, role, number))
    templates = [_template(owner, spec, role, name, number, node) for node in _nodes(spec)]
    if spec.nodes_per_instance == 1:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 1,
                "revisionHistoryLimit": 1,
                # An instance takes all of its GPUs: its successor fits only once it is gone.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": {labels.INSTANCE: name}},
                "template": templates[0],
            },
        }
    leader, worker = templates
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": spec.nodes_per_instance,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }


def _nodes(spec: PoolSpec) -> tuple[str, ...]:
    return ("only",) if spec.nodes_per_instance == 1 else ("leader", "worker")


def _labels(owner: Owner, spec: PoolSpec, name: str, role: str, number: str) -> dict[str, str]:
    own = {labels.ROLE: role, labels.INSTANCE: name, labels.REVISION: number}
    return owner.labels(role, **own, **{labels.COMPATIBILITY_KEY: engine.compatibility_key(spec)})


def _template(owner: Owner, spec: PoolSpec, role: str, name: str, number: str, node: str) -> Object:
    """The pod template of one node of an instance, the user's override merged last."""
    own = _labels(owner, spec, name, role, number)
    if node == "worker":
        # Role Services select by this label, and only the leader answers requests.
        del own[labels.ROLE]
    override = spec.pod_template
    _refuse_reserved("spec.podTemplate.metadata.labels", override.metadata.labels)
    _refuse_reserved("spec.podTemplate.metadata.annotations", override.metadata.annotations)
    metadata: Object = {"labels": {**override.metadata.labels, **own}}
    if annotations := {**_networks(spec), **override.metadata.annotations}:
        metadata["annotations"] = annotations
    try:
        pod = strategic.merge(_pod(spec, role, node), override.spec, "spec.podTemplate.spec")
    except strategic.MergeError as error:
        raise SpecError(error.path, error.problem, "write it as in a Pod's spec") from error
    if engine.CONTAINER not in [item.get("name") for item in pod.get("containers") or []]:
        raise SpecError(
            "spec.podTemplate.spec.containers",
            f"the container {engine.CONTAINER!r} was removed",
            "keep it: it is the instance",
        )
    return {"metadata": metadata, "spec": pod}


def _pod(spec: PoolSpec, role: str, node: str) -> Object:
    rank = None if node == "only" else "0" if node == "leader" else "$(LWS_WORKER_INDEX)"
    pod: Object = {
        "automountServiceAccountToken": False,
        # A Service called `vllm` would otherwise set VLLM_PORT, which the engine reads as its own.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": engine.grace_seconds(spec, role),
        "containers": [engine.container(spec, role, node_rank=rank, headless=node == "worker")],
        "tolerations": _tolerations(spec),
        "volumes": engine.volumes(spec),
    }
    if spec.network.exposure == "HostNetwork":
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if spec.engine.image_pull_secrets:
        pod["imagePullSecrets"] = [secret.to_wire() for secret in spec.engine.image_pull_secrets]
    if spec.node_pool.resource_claims:
        pod["resourceClaims"] = [
            {"name": claim.name, "resourceClaimTemplateName": claim.resource_claim_template_name}
            for claim in spec.node_pool.resource_claims
        ]
    if spec.node_pool.runtime_class_name is not None:
        pod["runtimeClassName"] = spec.node_pool.runtime_class_name
    if spec.node_pool.node_selector:
        pod["nodeSelector"] = dict(spec.node_pool.node_selector)
    return model.attach(spec, pod)


def _networks(spec: PoolSpec) -> dict[str, str]:
    """The second interface of `spec.network`, as Multus is asked for it."""
    if spec.network.interface is None:
        return {}
    return {MULTUS: f"{spec.network.attachment}@{spec.network.interface}"}


def _tolerations(spec: PoolSpec) -> list[Object]:
    """The pool's own, and a short stay on lost nodes where the pool says nothing about them."""
    own = [toleration.to_wire() for toleration in spec.node_pool.tolerations]
    named = {toleration.get("key") for toleration in own}
    lost = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_SECONDS}
        for taint in _NODE_LOST_TAINTS
        if taint not in named
    ]
    return own + lost


def _refuse_reserved(path: str, names: Mapping[str, str]) -> None:
    for name in names:
        if name.startswith(_RESERVED):
            raise SpecError(
                f"{path}[{name!r}]", f"names under {_RESERVED} are the operator's", "choose a name of your own"
            )
