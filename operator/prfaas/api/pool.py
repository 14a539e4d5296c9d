"""What both kinds of pool have in common: the model, where instances run, the engine, and how they are changed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from prfaas.api.base import ApiModel
from prfaas.api.common import Name, ObjectName, Toleration, unique_by
from prfaas.api.engine import EngineSpec, NetworkSpec, Parallelism
from prfaas.api.model import Endpoint, ModelCache, SecretRef, Source
from prfaas.api.rules import Ruled, rule

Instances = Annotated[int, Field(ge=0, le=1000)]


def _uses_all_gpus(parallelism: Parallelism, gpus: int) -> bool:
    return parallelism.tensor_of(gpus) * parallelism.pipeline * parallelism.data == gpus


@rule(
    "!has(self.source) || self.source.startsWith('pvc://') || has(self.cache)",
    "a source of hf:// or s3:// needs cache: where the model is kept",
    holds=lambda model: model.source is None or model.source.startswith("pvc://") or model.cache is not None,
)
@rule(
    "!has(self.cache) || (has(self.source) && !self.source.startsWith('pvc://'))",
    "cache needs a source of hf:// or s3://: a claim is mounted as it is, and without source the model is in the image",
    holds=lambda model: model.cache is None or model.fetched,
)
@rule(
    "!has(self.secretRef) || (has(self.source) && !self.source.startsWith('pvc://'))",
    "secretRef needs a source of hf:// or s3://",
    holds=lambda model: model.secret_ref is None or model.fetched,
)
@rule(
    "!has(self.endpoint) || (has(self.source) && !self.source.startsWith('pvc://'))",
    "endpoint needs a source of hf:// or s3://",
    holds=lambda model: model.endpoint is None or model.fetched,
)
class ModelSpec(Ruled):
    """The model that the pool serves. Pools joined by a link must serve the same one."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    """What the engine loads where no source is given: a repository name, or a path in the image."""
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name that clients put in a request; absent: `name`."""
    revision: Annotated[str, Field(min_length=1, max_length=128)] = "main"
    """Revision of the model's repository. Part of the compatibility key: KV cache never crosses between revisions."""
    max_model_length: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Longest prompt and answer together, in tokens; absent: what the model's own configuration says."""
    source: Source | None = None
    """Where the model comes from: `hf://ORG/NAME`, `s3://BUCKET/PREFIX` or `pvc://CLAIM/PATH`; absent: it is in the
    image, or the engine fetches it by itself. With a source the engine loads `/models/<name>/<revision>`."""
    endpoint: Endpoint | None = None
    """URL of a mirror of Hugging Face, or of an S3-compatible store; absent: the public ones."""
    secret_ref: SecretRef | None = None
    """Secret whose keys are environment variables of whatever fetches the model: `HF_TOKEN`; `AWS_ACCESS_KEY_ID`,
    `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN` and `AWS_REGION`; `HTTPS_PROXY`."""
    cache: ModelCache | None = None
    """Where a model that is fetched is kept."""

    @property
    def client_name(self) -> str:
        """The model's name in requests."""
        return self.served_name or self.name

    @property
    def fetched(self) -> bool:
        """Whether the model is brought to a cache."""
        return self.source is not None and not self.source.startswith("pvc://")


_toleration_schema = Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})


class ResourceClaim(ApiModel):
    """A claim on devices that is made for each pod (dynamic resource allocation)."""

    name: Name
    """Name of the claim in the pod."""
    resource_claim_template_name: ObjectName
    """Name of the ResourceClaimTemplate, in the same namespace."""
    request: Name | None = None
    """Request of the claim that the engine gets; absent: all of them."""


class NodePool(ApiModel):
    """Which nodes the instances run on, and what they take of a node."""

    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], _toleration_schema] = ()
    """Taints that the instances tolerate."""
    gpu_resource: Annotated[str, Field(min_length=1, max_length=253)] = "nvidia.com/gpu"
    """Name of the extended resource that counts GPUs, where there are no `resourceClaims`."""
    resource_claims: Annotated[tuple[ResourceClaim, ...], Field(max_length=8), *unique_by("name")] = ()
    """Claims by which an instance gets its GPUs and network devices instead of `gpuResource`; together they must give
    each of its nodes as many GPUs as `gpusPerInstance` says."""
    accelerator: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Name of the accelerator, such as `H200`; shown by `kubectl get -o wide`, nothing else depends on it."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the instances, such as `nvidia`; absent: the cluster's own."""


class PodTemplateMetadata(ApiModel):
    """Labels and annotations added to the pods."""

    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Labels; those that the operator needs cannot be changed."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=16384)]], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Annotations."""


class PodTemplate(ApiModel):
    """Overrides of the instances' pod template, merged last: maps by key, lists of named things by name."""

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    """Labels and annotations added to the pods."""
    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] = Field(
        default_factory=dict
    )
    """Any part of a pod's spec. The engine's container is called `engine`."""


class RolloutSpec(ApiModel):
    """How a changed pod template reaches the instances."""

    max_unavailable: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of instances that may be out of service at a time because of the rollout."""
    pairing: Literal["Paired", "Independent"] = "Paired"
    """`Paired`: an instance goes only while the others, here and at the peers, can serve what they could before; so a
    new compatibility key replaces the old one step by step at both ends. `Independent`: `maxUnavailable` alone counts.
    """


@rule(
    "self.gpusPerInstance % self.nodesPerInstance == 0",
    "gpusPerInstance must be a multiple of nodesPerInstance: every node of an instance has the same number of GPUs",
    holds=lambda spec: spec.gpus_per_instance % spec.nodes_per_instance == 0,
)
@rule("self.nodesPerInstance == oldSelf.nodesPerInstance", "nodesPerInstance cannot be changed")
@rule(
    "has(self.engine.parallelism.tensor) ? self.engine.parallelism.tensor * self.engine.parallelism.pipeline"
    " * self.engine.parallelism.data == self.gpusPerInstance"
    " : self.gpusPerInstance % (self.engine.parallelism.pipeline * self.engine.parallelism.data) == 0",
    "engine.parallelism must use all GPUs of an instance: tensor * pipeline * data = gpusPerInstance",
    holds=lambda spec: _uses_all_gpus(spec.engine.parallelism, spec.gpus_per_instance),
)
@rule(
    "self.nodesPerInstance == 1 || self.engine.parallelism.data == 1",
    "engine.parallelism.data must be 1 where nodesPerInstance is above 1: only the first node answers requests",
    holds=lambda spec: spec.nodes_per_instance == 1 or spec.engine.parallelism.data == 1,
)
class PoolSpec(Ruled):
    """The part of the spec that every pool has."""

    model: ModelSpec
    """The model that the pool serves."""
    gpus_per_instance: Annotated[int, Field(ge=1, le=1024)]
    """GPUs of one instance, over all its nodes."""
    nodes_per_instance: Annotated[int, Field(ge=1, le=64)] = 1
    """Nodes that one instance spans; above 1 an instance is a LeaderWorkerSet of that size. Cannot be changed."""
    node_pool: NodePool = NodePool()
    """Which nodes the instances run on."""
    engine: EngineSpec
    """The inference engine."""
    network: NetworkSpec = NetworkSpec()
    """The address at which instances offer their KV cache."""
    pod_template: PodTemplate = PodTemplate()
    """Overrides of the instances' pod template, merged last."""
    rollout: RolloutSpec = RolloutSpec()
    """How changes reach the instances."""
    paused: bool = False
    """While true the operator changes nothing: only the status is written, and says so."""
