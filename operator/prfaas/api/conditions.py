"""Conditions: their types and reasons as documented enums, and the helper that keeps them quiet.

Every condition has the polarity of its name. `lastTransitionTime` moves only when `status` flips; a message holds no
counter and no time, so that a status is rewritten only when something a person should know has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from prfaas.api.base import ApiModel
from prfaas.api.common import unique_by

ConditionStatus = Literal["True", "False", "Unknown"]


class Type(StrEnum):
    """Types of conditions that the operator computes."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    PODS_PLACED = "PodsPlaced"
    EXPORTED = "Exported"
    ROUTER_READY = "RouterReady"
    ROUTER_SYNCED = "RouterSynced"
    REMOTE_PREFILL_AVAILABLE = "RemotePrefillAvailable"
    ACCEPTED = "Accepted"
    PEER_API_REACHABLE = "PeerAPIReachable"
    CREDENTIALS_VALID = "CredentialsValid"
    COMPATIBLE = "Compatible"
    ENCRYPTED = "Encrypted"
    ENDPOINTS_MIRRORED = "EndpointsMirrored"


class Reason(StrEnum):
    """Why a condition is as it is. Values are API: never renamed, never removed."""

    AS_SPECIFIED = "AsSpecified"
    NOT_READY = "NotReady"
    PROGRESSING = "Progressing"
    DRAINING = "Draining"
    PAUSED = "Paused"
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    API_ERROR = "APIError"
    PLACED = "Placed"
    UNSCHEDULABLE = "Unschedulable"
    STARTING = "Starting"
    CRASHING = "Crashing"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    NO_INSTANCES = "NoInstances"
    PUBLISHED = "Published"
    PUBLISH_FAILED = "PublishFailed"
    AVAILABLE = "Available"
    NO_ROUTERS = "NoRouters"
    ACKNOWLEDGED = "Acknowledged"
    POLICY_PENDING = "PolicyPending"
    NOT_CONFIGURED = "NotConfigured"
    LINK_NOT_FOUND = "LinkNotFound"
    LINK_NOT_READY = "LinkNotReady"
    NO_REMOTE_ENDPOINTS = "NoRemoteEndpoints"
    LOCAL_NOT_FOUND = "LocalNotFound"
    REACHABLE = "Reachable"
    UNREACHABLE = "Unreachable"
    NOT_PROBED = "NotProbed"
    VALID = "Valid"
    SECRET_NOT_FOUND = "SecretNotFound"
    KUBE_CONFIG_INVALID = "KubeConfigInvalid"
    UNAUTHORIZED = "Unauthorized"
    FORBIDDEN = "Forbidden"
    NOT_NEEDED = "NotNeeded"
    MATCHED = "Matched"
    MODEL_MISMATCH = "ModelMismatch"
    KEY_MISMATCH = "KeyMismatch"
    CLUSTER_ID_MISMATCH = "ClusterIDMismatch"
    REMOTE_NOT_PUBLISHED = "RemoteNotPublished"
    DOCUMENT_INVALID = "DocumentInvalid"
    PEER_LOST = "PeerLost"
    ALL_ENCRYPTED = "AllEncrypted"
    DECLARED_NONE = "DeclaredNone"
    MIRRORED = "Mirrored"
    LAST_KNOWN = "LastKnown"


class Condition(ApiModel):
    """One observation of an object's state, in Kubernetes' form."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(min_length=1, max_length=63)]
    """What is observed."""
    status: ConditionStatus
    """Whether it is so."""
    reason: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9]*)$", max_length=63)]
    """Why, from a documented list."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """The same for a person: what is wrong, where, and what would be right."""
    observed_generation: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """`metadata.generation` that the observation is about."""
    last_transition_time: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
    """When `status` last changed."""


_unique, _schema = unique_by("type")
Conditions = Annotated[tuple[Condition, ...], Field(max_length=32), _unique, _schema]


def timestamp(moment: datetime) -> str:
    """Kubernetes' form of a moment: UTC, whole seconds, `Z`. ValueError for a moment without a zone."""
    if moment.tzinfo is None:
        raise ValueError("a moment needs its time zone")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(
    kind: Type, status: bool | None, reason: Reason, message: str = "", *, generation: int, now: datetime
) -> Condition:
    """A condition observed at `now`; status None is Unknown. `merge` keeps the older transition time."""
    text: ConditionStatus = "Unknown" if status is None else "True" if status else "False"
    return Condition(
        type=kind.value,
        status=text,
        reason=reason.value,
        message=message,
        observed_generation=generation,
        last_transition_time=timestamp(now),
    )


def merge(before: Iterable[Condition], observed: Iterable[Condition]) -> tuple[Condition, ...]:
    """The conditions to write: those observed, each with its older transition time where it did not flip.

    Conditions of `before` that were not observed are dropped: an operator that no longer computes one must not leave
    its last word standing.
    """
    old = {each.type: each for each in before}

    def kept(new: Condition) -> Condition:
        previous = old.get(new.type)
        if previous is None or previous.status != new.status:
            return new
        return new.model_copy(update={"last_transition_time": previous.last_transition_time})

    return tuple(kept(each) for each in observed)


def find(conditions: Iterable[Condition], kind: Type) -> Condition | None:
    """The condition of that type, or None."""
    return next((each for each in conditions if each.type == kind.value), None)
