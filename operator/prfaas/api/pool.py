"""What both kinds of pool have in common: the model, where instances run, the engine, and how they are changed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from prfaas.api.base import ApiModel
from prfaas.api.common import (
    Args,
    Duration,
    Env,
    ImagePullPolicy,
    Port,
    Resources,
    Toleration,
)
from prfaas.api.labels import PORT_HTTP
from prfaas.api.rules import Ruled, rule

Instances = Annotated[int, Field(ge=0, le=1000)]


class ModelSpec(ApiModel):
    """The model that the pool serves. Pools joined by a link must serve the same one."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    """What the engine loads: a repository name, or a path in the image."""
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name that clients put in a request; absent: `name`."""
    revision: Annotated[str, Field(min_length=1, max_length=128)] = "main"
    """Revision of the model's repository. Part of the compatibility key: KV cache never crosses between revisions."""
    max_model_length: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Longest prompt and answer together, in tokens; absent: what the model's own configuration says."""

    @property
    def client_name(self) -> str:
        """The model's name in requests."""
        return self.served_name or self.name


_toleration_schema = Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})


class NodePool(ApiModel):
    """Which nodes the instances run on, and what they take of a node."""

    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], _toleration_schema] = ()
    """Taints that the instances tolerate."""
    gpu_resource: Annotated[str, Field(min_length=1, max_length=253)] = "nvidia.com/gpu"
    """Name of the extended resource that counts GPUs."""
    accelerator: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Name of the accelerator, such as `H200`; shown by `kubectl get -o wide`, nothing else depends on it."""


class EngineSpec(ApiModel):
    """The inference engine: one container in every instance."""

    image: Annotated[str, Field(min_length=1, max_length=512)]
    """Container image."""
    image_pull_policy: ImagePullPolicy = "IfNotPresent"
    """When the image is pulled."""
    command: Args = ("vllm", "serve")
    """Words before the model's name."""
    args: Args = ()
    """Arguments after those that the operator sets (model, port, KV transfer)."""
    env: Env = ()
    """Environment variables, merged by name over those that the operator sets."""
    connector: Literal["Nixl"] = "Nixl"
    """KV connector of the engine. `Nixl`: the decode instance pulls KV cache from the prefill instance."""
    port: Port = PORT_HTTP
    """TCP port of the engine's HTTP server."""
    resources: Resources = Resources()
    """Compute resources of the engine's container; the GPUs of the pool are added."""
    startup_deadline: Duration = "30m"
    """Longest time from the start of the container until it is healthy; then it is started anew."""
    shutdown_timeout: Duration = "60s"
    """Longest time for requests under way when an instance is converted, replaced or removed; then it is killed."""


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


@rule(
    "self.gpusPerInstance % self.nodesPerInstance == 0",
    "gpusPerInstance must be a multiple of nodesPerInstance: every node of an instance has the same number of GPUs",
    holds=lambda spec: spec.gpus_per_instance % spec.nodes_per_instance == 0,
)
@rule("self.nodesPerInstance == oldSelf.nodesPerInstance", "nodesPerInstance cannot be changed")
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
    pod_template: PodTemplate = PodTemplate()
    """Overrides of the instances' pod template, merged last."""
    rollout: RolloutSpec = RolloutSpec()
    """How changes reach the instances."""
    paused: bool = False
    """While true the operator changes nothing: only the status is written, and says so."""
