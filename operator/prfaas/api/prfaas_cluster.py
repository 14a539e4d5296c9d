"""PrfaaSCluster: a prefill-only pool in this datacenter, offered to peers over links."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from prfaas.api.base import ApiModel
from prfaas.api.conditions import Conditions
from prfaas.api.group import Groups
from prfaas.api.pool import Instances, PoolSpec
from prfaas.api.resource import AGE_COLUMN, READY_COLUMNS, ApiObject, Column, Resource, Scale

Count = Annotated[int, Field(ge=0, le=1_000_000)]
Generation = Annotated[int, Field(ge=0, le=2**53)]


class PrfaaSClusterSpec(PoolSpec):
    """What the pool should be."""

    instances: Instances = 1
    """Number of prefill instances; the scale subresource."""


class PrfaaSClusterStatus(ApiModel):
    """What the pool is."""

    model_config = ConfigDict(extra="ignore")

    observed_generation: Generation | None = None
    """`metadata.generation` that this status is about."""
    instances: Count | None = None
    """Instances that exist."""
    ready_instances: Count | None = None
    """Instances that are ready."""
    updated_instances: Count | None = None
    """Instances of the newest revision."""
    draining_instances: Count | None = None
    """Instances that are leaving service."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the pods, for the scale subresource."""
    compatibility_key: Annotated[str, Field(max_length=128)] | None = None
    """Hash of what must be equal at both ends for KV cache to be usable."""
    groups: Groups = ()
    """Instances by compatibility key; more than one: a rollout to another key is under way."""
    endpoints: Count | None = None
    """Prefill endpoints published to peers."""
    warm_up_seconds: Count | None = None
    """Seconds from the start of an engine's container until it is ready: the median of the instances that run.
    Rewritten only when it moves by more than a tenth."""
    conditions: Conditions = ()
    """Observations, one per type."""


class PrfaaSCluster(ApiObject):
    """A pool of prefill-only instances, offered to the PDClusters of other datacenters over InterClusterLinks."""

    resource: ClassVar[Resource] = Resource(
        kind="PrfaaSCluster",
        plural="prfaasclusters",
        singular="prfaascluster",
        short_names=("pfc",),
        columns=(
            *READY_COLUMNS,
            Column("Instances", ".spec.instances", "Instances asked for.", "integer"),
            Column("Up", ".status.readyInstances", "Instances that are ready.", "integer"),
            Column("Published", ".status.endpoints", "Endpoints that peers see.", "integer"),
            Column("Accelerator", ".spec.nodePool.accelerator", "Accelerator of the pool.", priority=1),
            Column("Model", ".spec.model.name", "Model served.", priority=1),
            Column("Updated", ".status.updatedInstances", "Instances of the newest revision.", "integer", priority=1),
            Column("Draining", ".status.drainingInstances", "Instances leaving service.", "integer", priority=1),
            AGE_COLUMN,
        ),
        scale=Scale(".spec.instances", ".status.instances", ".status.selector"),
    )

    kind: Literal["PrfaaSCluster"]
    """Kind of this object."""
    spec: PrfaaSClusterSpec
    """What the pool should be."""
    status: PrfaaSClusterStatus = PrfaaSClusterStatus()
    """What the pool is; written by the operator."""
