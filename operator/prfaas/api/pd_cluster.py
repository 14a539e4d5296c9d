"""PDCluster: a pool that prefills short prompts, decodes everything, and has the router that clients talk to."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from prfaas.api.base import ApiModel
from prfaas.api.common import Args, Env, ImagePullPolicy, OwnName, Resources, Tokens, unique_by
from prfaas.api.conditions import Conditions
from prfaas.api.engine import EngineSpec
from prfaas.api.group import Groups
from prfaas.api.pool import Instances, PoolSpec
from prfaas.api.prfaas_cluster import Count, Generation
from prfaas.api.resource import AGE_COLUMN, READY_COLUMNS, ApiObject, Column, Resource, Scale
from prfaas.api.rules import Ruled, rule

Role = Literal["prefill", "decode"]


@rule(
    "!has(self.max) || self.min <= self.max",
    "min may not be above max",
    holds=lambda bounds: bounds.max is None or bounds.min <= bounds.max,
)
class RoleBounds(Ruled):
    """Bounds on the number of instances of one role."""

    min: Annotated[int, Field(ge=1, le=1000)] = 1
    """Fewest instances of the role."""
    max: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Most instances of the role; absent: whatever the other role leaves."""


@rule(
    "self.instances == 0 || self.instances >= self.prefill.min + self.decode.min",
    "instances must be 0 (the pool is off) or at least prefill.min + decode.min",
    holds=lambda pool: pool.instances == 0 or pool.instances >= pool.prefill.min + pool.decode.min,
    field_path=".instances",
)
@rule(
    "!has(self.prefill.max) || !has(self.decode.max) || self.instances <= self.prefill.max + self.decode.max",
    "instances may not be above prefill.max + decode.max",
    holds=lambda pool: (
        pool.prefill.max is None or pool.decode.max is None or pool.instances <= pool.prefill.max + pool.decode.max
    ),
    field_path=".instances",
)
@rule(
    "!has(self.initialPrefill) || self.initialPrefill >= self.prefill.min",
    "initialPrefill may not be below prefill.min",
    holds=lambda pool: pool.initial_prefill is None or pool.initial_prefill >= pool.prefill.min,
    field_path=".initialPrefill",
)
@rule(
    "!has(self.initialPrefill) || !has(self.prefill.max) || self.initialPrefill <= self.prefill.max",
    "initialPrefill may not be above prefill.max",
    holds=lambda pool: (
        pool.initial_prefill is None or pool.prefill.max is None or pool.initial_prefill <= pool.prefill.max
    ),
    field_path=".initialPrefill",
)
class Pool(Ruled):
    """How many instances there are, and how they may be divided between the roles."""

    instances: Instances
    """Number of instances of both roles together (Np + Nd); the scale subresource. 0 turns the pool off."""
    prefill: RoleBounds = RoleBounds()
    """Bounds on prefill instances (Np)."""
    decode: RoleBounds = RoleBounds()
    """Bounds on decode instances (Nd)."""
    initial_prefill: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Prefill instances to begin with, held to the bounds; absent: `prefill.min`."""

    def prefill_instances(self, wanted: int | None = None) -> int:
        """Np for `wanted` (None: `initialPrefill`), held to both roles' bounds; 0 when the pool is off."""
        if self.instances == 0:
            return 0
        wanted = wanted if wanted is not None else self.initial_prefill or self.prefill.min
        lowest = max(self.prefill.min, 0 if self.decode.max is None else self.instances - self.decode.max)
        highest = self.instances - self.decode.min
        if self.prefill.max is not None:
            highest = min(highest, self.prefill.max)
        return max(lowest, min(highest, wanted))


class RoleEngine(ApiModel):
    """What differs in the engine of one role."""

    args: Args = ()
    """Arguments after those of `engine.args`."""
    env: Env = ()
    """Environment variables, merged by name over those of `engine.env`."""
    resources: Resources | None = None
    """Compute resources instead of those of `engine.resources`."""


class Roles(ApiModel):
    """What differs between the roles' engines."""

    prefill: RoleEngine = RoleEngine()
    """Of prefill instances."""
    decode: RoleEngine = RoleEngine()
    """Of decode instances."""


@rule(
    "!has(self.minThreshold) || self.minThreshold <= self.initialThreshold",
    "initialThreshold may not be below minThreshold",
    holds=lambda remote: remote.min_threshold is None or remote.min_threshold <= remote.initial_threshold,
)
@rule(
    "!has(self.maxThreshold) || self.initialThreshold <= self.maxThreshold",
    "initialThreshold may not be above maxThreshold",
    holds=lambda remote: remote.max_threshold is None or remote.initial_threshold <= remote.max_threshold,
)
class RemotePrefill(Ruled):
    """A link over which long prompts are prefilled elsewhere."""

    link_ref: OwnName
    """Name of the InterClusterLink, in this namespace."""
    initial_threshold: Tokens
    """Threshold t, in tokens: a request whose uncached length is above it is prefilled at the link's other end."""
    min_threshold: Tokens | None = None
    """Lowest threshold, in tokens: `initialThreshold` may not be below it."""
    max_threshold: Tokens | None = None
    """Highest threshold, in tokens: `initialThreshold` may not be above it."""


@rule(
    "!has(self.nodePort) || self.type == 'NodePort'",
    "nodePort needs type NodePort",
    holds=lambda service: service.node_port is None or service.type == "NodePort",
)
class RouterService(Ruled):
    """The Service in front of the router."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    node_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on every node, for type NodePort; absent: the API server chooses."""


class Router(ApiModel):
    """The router: Envoy and its picker, in one pod."""

    replicas: Annotated[int, Field(ge=0, le=100)] = 2
    """Number of router pods."""
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Image of Envoy; absent: the one that the operator was installed with."""
    image_pull_policy: ImagePullPolicy = "IfNotPresent"
    """When that image is pulled."""
    service: RouterService = RouterService()
    """The Service that clients talk to."""
    fallback: Literal["LocalPrefill", "Reject"] = "LocalPrefill"
    """What becomes of a request for remote prefill when no remote instance can take it: prefill here, or error 503."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 8 << 20
    """Largest request body, in bytes; a larger one gets error 413."""
    resources: Resources = Resources()
    """Compute resources of Envoy's container."""


class PDClusterSpec(PoolSpec):
    """What the pool should be."""

    pool: Pool
    """How many instances, and of which role."""
    roles: Roles = Roles()
    """What differs between the roles' engines."""
    remote_prefill: Annotated[tuple[RemotePrefill, ...], Field(max_length=8), *unique_by("link_ref")] = ()
    """Links over which long prompts are prefilled elsewhere; none: every prompt is prefilled here."""
    router: Router = Router()
    """The router that clients talk to."""

    def engine_for(self, role: Role) -> EngineSpec:
        """The engine of a role: `engine` with the role's arguments appended, environment and resources overridden."""
        override = self.roles.prefill if role == "prefill" else self.roles.decode
        env = {each.name: each for each in (*self.engine.env, *override.env)}
        return self.engine.model_copy(
            update={
                "args": (*self.engine.args, *override.args),
                "env": tuple(env.values()),
                "resources": override.resources or self.engine.resources,
            }
        )


class _Status(ApiModel):
    model_config = ConfigDict(extra="ignore")


class RoleStatus(_Status):
    """Instances of one role."""

    desired: Count | None = None
    """Instances there should be."""
    ready: Count | None = None
    """Instances that are ready."""
    updated: Count | None = None
    """Instances of the newest revision."""
    draining: Count | None = None
    """Instances that are leaving service."""


class RolesStatus(_Status):
    """Instances by role."""

    prefill: RoleStatus | None = None
    """Prefill instances (Np)."""
    decode: RoleStatus | None = None
    """Decode instances (Nd)."""


class ThresholdStatus(_Status):
    """The threshold in force for one link."""

    link: OwnName
    """Name of the InterClusterLink."""
    tokens: Tokens
    """Threshold, in tokens."""


class PolicyStatus(_Status):
    """The routing policy committed, and how many routers use it."""

    epoch: Generation | None = None
    """Leadership in which the policy was committed."""
    version: Generation | None = None
    """Version of the policy; orders policies within an epoch."""
    hash: Annotated[str, Field(max_length=128)] | None = None
    """Hash of the policy document."""
    thresholds: Annotated[tuple[ThresholdStatus, ...], Field(max_length=8), *unique_by("link")] = ()
    """Thresholds in force, by link."""
    routers_acknowledged: Count | None = None
    """Router pods that use this policy."""
    routers_total: Count | None = None
    """Router pods that exist."""
    since: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] | None = None
    """When this policy was committed."""


class PDClusterStatus(_Status):
    """What the pool is."""

    observed_generation: Generation | None = None
    """`metadata.generation` that this status is about."""
    instances: Count | None = None
    """Instances that exist, of both roles."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the pods, for the scale subresource."""
    compatibility_key: Annotated[str, Field(max_length=128)] | None = None
    """Hash of what must be equal at both ends for KV cache to be usable."""
    groups: Groups = ()
    """Instances by compatibility key; more than one: a rollout to another key is under way."""
    roles: RolesStatus | None = None
    """Instances by role."""
    policy: PolicyStatus | None = None
    """The routing policy in force."""
    warm_up_seconds: Count | None = None
    """Seconds from the start of an engine's container until it is ready: the median of the instances that run.
    Rewritten only when it moves by more than a tenth."""
    conditions: Conditions = ()
    """Observations, one per type."""


class PDCluster(ApiObject):
    """A pool of instances that prefill or decode, with a router that sends long prompts to remote prefill pools."""

    resource: ClassVar[Resource] = Resource(
        kind="PDCluster",
        plural="pdclusters",
        singular="pdcluster",
        short_names=("pdc",),
        columns=(
            *READY_COLUMNS,
            Column("Np", ".status.roles.prefill.ready", "Prefill instances that are ready.", "integer"),
            Column("Nd", ".status.roles.decode.ready", "Decode instances that are ready.", "integer"),
            Column("T", ".status.policy.thresholds[0].tokens", "Threshold of the first link, in tokens."),
            Column("Policy", ".status.policy.version", "Version of the routing policy.", "integer"),
            Column("Acks", ".status.policy.routersAcknowledged", "Routers that use that policy.", "integer"),
            Column("Routers", ".status.policy.routersTotal", "Routers that exist.", "integer"),
            Column("Instances", ".spec.pool.instances", "Instances asked for, of both roles.", "integer", priority=1),
            Column("Accelerator", ".spec.nodePool.accelerator", "Accelerator of the pool.", priority=1),
            Column("Model", ".spec.model.name", "Model served.", priority=1),
            Column("Epoch", ".status.policy.epoch", "Leadership that committed the policy.", "integer", priority=1),
            AGE_COLUMN,
        ),
        scale=Scale(".spec.pool.instances", ".status.instances", ".status.selector"),
    )

    kind: Literal["PDCluster"]
    """Kind of this object."""
    spec: PDClusterSpec
    """What the pool should be."""
    status: PDClusterStatus = PDClusterStatus()
    """What the pool is; written by the operator."""
