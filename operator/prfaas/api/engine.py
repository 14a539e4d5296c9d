"""The inference engine of a pool, and the network that its KV cache takes.

What shapes KV cache (backend, types, block size, connector) is written here once for both roles, since prefill and
decode can only use each other's cache when it is equal; how fast an engine works goes into its arguments.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prfaas.api.base import ApiModel
from prfaas.api.common import (
    Args,
    Duration,
    Env,
    ImagePullPolicy,
    ObjectName,
    Port,
    Quantity,
    Resources,
    duration_seconds,
    unique_by,
)
from prfaas.api.labels import PORT_HTTP
from prfaas.api.rules import Ruled, rule

PROBE_WINDOW_SECONDS = 10
"""How long an instance may be silent before routers leave it: two readiness probes, five seconds apart."""
LEAST_LEASE_SECONDS = 3 * PROBE_WINDOW_SECONDS


class SecretKeyRef(ApiModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in its data."""


class PullSecret(ApiModel):
    """A Secret with credentials for a registry."""

    name: ObjectName
    """Name of the Secret, in the same namespace."""


class EngineTLS(ApiModel):
    """Encryption of the engine's own HTTP server."""

    secret_name: ObjectName
    """Name of a Secret of type `kubernetes.io/tls`, in the same namespace."""


class Parallelism(ApiModel):
    """How the GPUs of an instance share the work; tensor * pipeline * data = gpusPerInstance."""

    tensor: Annotated[int, Field(ge=1, le=1024)] | None = None
    """GPUs over which each layer is divided; absent: all that `pipeline` and `data` leave."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages into which the layers are divided."""
    data: Annotated[int, Field(ge=1, le=32)] = 1
    """Copies of the model behind one HTTP server."""

    def tensor_of(self, gpus: int) -> int:
        """GPUs over which each layer is divided, of an instance of `gpus` GPUs."""
        return self.tensor or gpus // (self.pipeline * self.data)


@rule(
    "self.prefixCaching || !self.kvEvents",
    "kvEvents needs prefixCaching: the events are about the blocks of the prefix cache",
    holds=lambda engine: engine.prefix_caching or not engine.kv_events,
)
@rule(
    "!has(self.kvLease) || duration(self.kvLease) >= duration('30s')",
    "kvLease must be at least 30s: three times the 10s after which routers leave a silent instance",
    holds=lambda engine: engine.kv_lease is None or duration_seconds(engine.kv_lease) >= LEAST_LEASE_SECONDS,
)
@rule(
    "!has(self.kvLease) || (self.kind == 'VLLM' && self.connector == 'Nixl')",
    "kvLease is a setting of vLLM's NIXL connector: leave it out for other engines and connectors",
    holds=lambda engine: engine.kv_lease is None or (engine.kind == "VLLM" and engine.connector == "Nixl"),
)
@rule(
    "!has(self.lanes) || self.transport == 'TCP'",
    "lanes are TCP connections: leave them out for transport RDMA",
    holds=lambda engine: engine.lanes is None or engine.transport == "TCP",
)
@rule(
    "self.kind == 'VLLM' || (!has(self.maxQueuedRequests) && !has(self.maxQueuedTokens))",
    "SGLang has no queue limits where prefill and decode are apart: leave maxQueuedRequests and maxQueuedTokens out",
    holds=lambda engine: (
        engine.kind == "VLLM" or (engine.max_queued_requests is None and engine.max_queued_tokens is None)
    ),
)
class EngineSpec(Ruled):
    """The inference engine: one container in every instance."""

    kind: Literal["VLLM", "SGLang"] = "VLLM"
    """Which engine the image holds. The router of a PDCluster drives `VLLM` with connector `Nixl` only, so far."""
    image: Annotated[str, Field(min_length=1, max_length=512)]
    """Container image. Its last part, such as `vllm-openai:v0.33.0`, must be equal at both ends of a link."""
    image_pull_policy: ImagePullPolicy = "IfNotPresent"
    """When the image is pulled."""
    image_pull_secrets: Annotated[tuple[PullSecret, ...], Field(max_length=8), *unique_by("name")] = ()
    """Secrets with which the images of an instance are pulled."""
    command: Args | None = None
    """Words before the model's name; absent: `vllm serve`, or `python3 -m sglang.launch_server`."""
    args: Args = ()
    """Arguments after those that the operator sets; what breaks the division into prefill and decode is refused."""
    env: Env = ()
    """Environment variables, merged by name over those that the operator sets."""
    connector: Literal["Nixl", "Mooncake"] = "Nixl"
    """KV connector of the engine. `Nixl`: the decode instance pulls KV cache from the prefill instance. `Mooncake`:
    both work at the same time, and the prefill instance sends."""
    transport: Literal["TCP", "RDMA"] = "TCP"
    """What KV cache travels over."""
    lanes: Annotated[int, Field(ge=1, le=64)] | None = None
    """TCP connections that one transfer may use at the same time; absent: what the connector does by itself."""
    attention_backend: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=64)] | None = None
    """Attention kernels, such as `FLASH_ATTN_MLA`. Absent: the engine chooses by the GPU at hand, and engines that
    choose differently refuse each other's KV cache."""
    kv_cache_dtype: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$", max_length=64)] = "auto"
    """Type of KV cache values; `auto`: that of the model."""
    dtype: Literal["auto", "bfloat16", "float", "float16", "float32", "half"] = "auto"
    """Type of weights and activations; `auto`: that of the model."""
    block_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Tokens in one block of KV cache; absent: what the attention backend asks for."""
    prefix_caching: bool = True
    """Whether an instance keeps the KV cache of prompts for later ones that begin alike."""
    kv_events: bool = True
    """Whether an instance publishes what enters and leaves its prefix cache, on port 5557."""
    kv_lease: Duration | None = None
    """How long a prefill instance keeps KV cache for a decode instance that shows no sign of life; absent: 30s."""
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests, waiting and running, above which an instance answers 503; absent: no limit."""
    max_queued_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Prompt tokens before and in prefill above which an instance answers 503; absent: no limit."""
    parallelism: Parallelism = Parallelism()
    """How the GPUs of an instance share the work."""
    port: Port = PORT_HTTP
    """TCP port of the engine's HTTP server."""
    tls: EngineTLS | None = None
    """Encryption of the engine's HTTP server; absent: plain HTTP. A PDCluster's own router speaks plain HTTP only."""
    api_key_secret_ref: SecretKeyRef | None = None
    """Key that requests to an instance must carry; the router hands on what the client sent."""
    resources: Resources = Resources()
    """Compute resources of the engine's container; the GPUs of the pool are added."""
    shared_memory: Quantity | None = None
    """Largest size of /dev/shm; absent: what the node allows."""
    startup_deadline: Duration = "30m"
    """Longest time from the start of the container until it is healthy; then it is started anew."""
    shutdown_timeout: Duration = "60s"
    """Longest time for requests under way when an instance is converted, replaced or removed; then it is killed."""

    @property
    def command_words(self) -> tuple[str, ...]:
        """Words before the model's name."""
        if self.command is not None:
            return self.command
        return ("vllm", "serve") if self.kind == "VLLM" else ("python3", "-m", "sglang.launch_server")


@rule(
    "self.exposure == 'Secondary' ? has(self.attachment) && has(self.interface)"
    " : !has(self.attachment) && !has(self.interface)",
    "attachment and interface go with exposure Secondary, and only with it",
    holds=lambda network: (
        (network.attachment is not None) == (network.exposure == "Secondary")
        and (network.interface is not None) == (network.exposure == "Secondary")
    ),
)
class NetworkSpec(Ruled):
    """The address at which the other end of a transfer reaches an instance's KV cache."""

    exposure: Literal["PodIP", "HostNetwork", "Secondary"] = "PodIP"
    """`PodIP`: the pod's own. `HostNetwork`: the node's; the pod runs in its network. `Secondary`: that of a second
    interface; HTTP stays on the pod's own."""
    attachment: Annotated[str, Field(pattern=r"^([a-z0-9][-a-z0-9]*/)?[a-z0-9][-a-z0-9.]*$", max_length=253)] | None = (
        None
    )
    """NetworkAttachmentDefinition (Multus) of the second interface: its name, or `namespace/name`."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]*$", max_length=15)] | None = None
    """Name of the second interface in the pod, such as `net1`."""
