"""Conditions: their types and reasons as documented enums, and the helper that keeps them quiet.

Every condition has the polarity of its name. `lastTransitionTime` moves only when `status` flips; a message holds no
counter and no time, so that a status is rewritten only when something a person should know has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field

from prfaas.api.base import ApiModel
from prfaas.api.common import unique_by

ConditionStatus = Literal["True", "False", "Unknown"]


class _Documented(StrEnum):
    """A value of the API together with its meaning."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class Type(_Documented):
    """Types of conditions that the operator computes."""

    READY = "Ready", "The object does all that its spec asks for."
    RECONCILING = "Reconciling", "The operator is on its way from what is to what the spec asks for."
    STALLED = "Stalled", "The operator cannot go on before a person changes something; what runs is kept."
    PODS_PLACED = "PodsPlaced", "Every instance has a node."
    MODEL_CACHED = "ModelCached", "The model is where the instances load it from."
    EXPORTED = "Exported", "The pool is published in this datacenter's exchange namespace, where peers may read it."
    ROUTER_READY = "RouterReady", "At least one router pod is ready for clients."
    ROUTER_SYNCED = "RouterSynced", "Every router pod that is ready uses the policy that is committed."
    REMOTE_PREFILL_AVAILABLE = (
        "RemotePrefillAvailable",
        "At least one link has a remote instance that is ready.",
    )
    ACCEPTED = "Accepted", "The link's spec fits what is here: its local pool exists."
    PEER_API_REACHABLE = "PeerAPIReachable", "The peer's API server answers."
    CREDENTIALS_VALID = "CredentialsValid", "The peer's API server accepts our credentials for its exchange namespace."
    COMPATIBLE = "Compatible", "Both ends serve the same model in the same way: KV cache of one is usable by the other."
    ENCRYPTED = "Encrypted", "All that crosses the line is encrypted, as far as the spec says."
    ENDPOINTS_MIRRORED = "EndpointsMirrored", "The peer's prefill endpoints are known here as they are there."


class Reason(_Documented):
    """Why a condition is as it is. Values are API: never renamed, never removed."""

    AS_SPECIFIED = "AsSpecified", "All is as the spec asks."
    PROGRESSING = "Progressing", "Children are being made, changed or removed, or are not ready yet."
    ROLLING_OUT = "RollingOut", "Instances get the new template one after the other; the others serve meanwhile."
    WAITING_FOR_PEER = (
        "WaitingForPeer",
        "A paired rollout keeps its last old instance until a linked pool can serve with the new key.",
    )
    PAUSED = "Paused", "`spec.paused` is true: nothing is written."
    INVALID_SPEC = "InvalidSpec", "The spec passed the schema and cannot be carried out; the message names the field."
    NAME_CONFLICT = "NameConflict", "An object of a name that is needed exists and is not ours."
    API_ERROR = "APIError", "The API server refused a write; the message is its own."
    PLACED = "Placed", "Every instance has a node."
    UNSCHEDULABLE = "Unschedulable", "No node has room for a pod, or it is refused before one is looked for."
    STARTING = "Starting", "Pods exist and are not ready yet."
    CRASHING = (
        "Crashing",
        "A container ends again and again, or cannot be started, as when its image cannot be pulled.",
    )
    NO_INSTANCES = "NoInstances", "The pool is scaled to nothing."
    PUBLISHED = "Published", "The document in the exchange namespace is up to date."
    PUBLISH_FAILED = "PublishFailed", "The document could not be written; the message is the API server's."
    AVAILABLE = "Available", "At least one is ready."
    NO_ROUTERS = "NoRouters", "`router.replicas` is 0, or no router pod exists yet."
    ACKNOWLEDGED = "Acknowledged", "Every router pod that is ready has said that it uses the policy."
    POLICY_PENDING = (
        "PolicyPending",
        "Some router pod that is ready does not use the policy yet, or none is ready.",
    )
    NOT_CONFIGURED = "NotConfigured", "The spec does not ask for it."
    LINK_NOT_FOUND = "LinkNotFound", "An InterClusterLink that the spec names does not exist."
    LINK_NOT_READY = "LinkNotReady", "No InterClusterLink that the spec names is ready."
    NO_REMOTE_ENDPOINTS = "NoRemoteEndpoints", "The other end has no prefill instance that is ready."
    LOCAL_NOT_FOUND = "LocalNotFound", "The pool that `spec.local` names does not exist in this namespace."
    REACHABLE = "Reachable", "It answers."
    UNREACHABLE = "Unreachable", "It did not answer as many times in a row as `probe.failureThreshold` says."
    NOT_PROBED = "NotProbed", "It has not been asked yet."
    VALID = "Valid", "It is accepted."
    SECRET_NOT_FOUND = "SecretNotFound", "The Secret that holds the kubeconfig, or its key, does not exist."
    KUBE_CONFIG_INVALID = "KubeConfigInvalid", "The kubeconfig cannot be used; the message says why."
    UNAUTHORIZED = "Unauthorized", "The peer does not accept our credentials."
    FORBIDDEN = "Forbidden", "The peer knows us, and we may not read its exchange namespace."
    NOT_NEEDED = "NotNeeded", "The peer is this same API server."
    MATCHED = "Matched", "Both ends have, or are to have, instances of one compatibility key."
    MODEL_MISMATCH = (
        "ModelMismatch",
        "The ends serve different models or revisions, and neither is going over to the other's.",
    )
    KEY_MISMATCH = (
        "KeyMismatch",
        "The ends serve the same model in ways whose KV caches differ, and neither is going over to the other's.",
    )
    CLUSTER_ID_MISMATCH = "ClusterIDMismatch", "The peer publishes another identity than `peer.clusterID`."
    REMOTE_NOT_PUBLISHED = (
        "RemoteNotPublished",
        "The peer's exchange has no document of the pool in `spec.remote`.",
    )
    DOCUMENT_INVALID = "DocumentInvalid", "The peer's document cannot be read; the message says why."
    PEER_LOST = "PeerLost", "There is no contact with the peer."
    ALL_ENCRYPTED = "AllEncrypted", "Everything is encrypted."
    DECLARED_NONE = "DeclaredNone", "The spec says `None` for part of the traffic; the message names it."
    MIRRORED = "Mirrored", "The EndpointSlices here show what the peer publishes."
    LAST_KNOWN = "LastKnown", "The EndpointSlices here show what the peer published last; there is no contact now."
    IN_IMAGE = "InImage", "`model.source` is absent: the model is in the image, or the engine fetches it by itself."
    ON_CLAIM = "OnClaim", "The model is on the claim that `model.source` names, which is mounted as it is."
    CACHED = "Cached", "The model is whole wherever an instance runs."
    FETCHING = "Fetching", "The model is on its way, or about to be; `prfaas status` shows how far it is."
    GATED = "Gated", "The model's repository is not open to everyone, and the token is missing or not enough."
    ACCESS_DENIED = "AccessDenied", "The store does not let us read the bucket."
    RATE_LIMITED = "RateLimited", "The source asks for patience; fetching goes on by itself."
    NOT_FOUND = "NotFound", "The source has no such repository, revision, bucket or prefix."
    SOURCE_UNREACHABLE = "SourceUnreachable", "The source does not answer, or answers with errors of its own."
    DISK_FULL = "DiskFull", "The model does not fit where it is to be kept."
    CHECKSUM_MISMATCH = "ChecksumMismatch", "A file that was fetched is not what the source says it is."
    FETCH_FAILED = "FetchFailed", "Fetching failed in another way; the message says how."
    NO_NODES = "NoNodes", "No instance has a node yet: it is not known where the model is needed."


_POOL = (Type.READY, Type.RECONCILING, Type.STALLED, Type.PODS_PLACED, Type.MODEL_CACHED)
CONDITIONS: Mapping[str, tuple[Type, ...]] = {
    "PrfaaSCluster": (*_POOL, Type.EXPORTED),
    "PDCluster": (*_POOL, Type.ROUTER_READY, Type.ROUTER_SYNCED, Type.REMOTE_PREFILL_AVAILABLE),
    "InterClusterLink": (
        Type.READY,
        Type.RECONCILING,
        Type.STALLED,
        Type.ACCEPTED,
        Type.CREDENTIALS_VALID,
        Type.PEER_API_REACHABLE,
        Type.COMPATIBLE,
        Type.ENDPOINTS_MIRRORED,
        Type.ENCRYPTED,
    ),
}
"""Which conditions each kind has, in the order in which they are written."""

_STALLED = (Reason.INVALID_SPEC, Reason.NAME_CONFLICT, Reason.API_ERROR)
FETCH_FAILURES = (
    Reason.GATED,
    Reason.ACCESS_DENIED,
    Reason.NOT_FOUND,
    Reason.CHECKSUM_MISMATCH,
    Reason.DISK_FULL,
    Reason.RATE_LIMITED,
    Reason.SOURCE_UNREACHABLE,
    Reason.FETCH_FAILED,
)
"""What a fetch can end with, the worst first: what a person has to see to comes before what may pass."""
_OWN: Mapping[Type, tuple[Reason, ...]] = {
    Type.STALLED: (Reason.AS_SPECIFIED, *_STALLED),
    Type.PODS_PLACED: (Reason.PLACED, Reason.NO_INSTANCES, Reason.PROGRESSING, Reason.UNSCHEDULABLE),
    Type.MODEL_CACHED: (
        Reason.IN_IMAGE,
        Reason.ON_CLAIM,
        Reason.CACHED,
        Reason.NO_INSTANCES,
        Reason.NO_NODES,
        Reason.FETCHING,
        *FETCH_FAILURES,
        Reason.UNSCHEDULABLE,
        Reason.CRASHING,
    ),
    Type.EXPORTED: (Reason.PUBLISHED, Reason.PUBLISH_FAILED),
    Type.ROUTER_READY: (Reason.AVAILABLE, Reason.NO_ROUTERS, Reason.STARTING, Reason.UNSCHEDULABLE, Reason.CRASHING),
    Type.ROUTER_SYNCED: (Reason.ACKNOWLEDGED, Reason.POLICY_PENDING, Reason.NO_ROUTERS),
    Type.REMOTE_PREFILL_AVAILABLE: (
        Reason.AVAILABLE,
        Reason.NOT_CONFIGURED,
        Reason.LINK_NOT_FOUND,
        Reason.LINK_NOT_READY,
        Reason.NO_REMOTE_ENDPOINTS,
    ),
    Type.ACCEPTED: (Reason.VALID, Reason.LOCAL_NOT_FOUND),
    Type.CREDENTIALS_VALID: (
        Reason.VALID,
        Reason.NOT_NEEDED,
        Reason.NOT_PROBED,
        Reason.SECRET_NOT_FOUND,
        Reason.KUBE_CONFIG_INVALID,
        Reason.UNAUTHORIZED,
        Reason.FORBIDDEN,
        Reason.UNREACHABLE,
    ),
    Type.PEER_API_REACHABLE: (Reason.REACHABLE, Reason.UNREACHABLE, Reason.NOT_PROBED, Reason.NOT_NEEDED),
    Type.COMPATIBLE: (
        Reason.MATCHED,
        Reason.MODEL_MISMATCH,
        Reason.KEY_MISMATCH,
        Reason.CLUSTER_ID_MISMATCH,
        Reason.REMOTE_NOT_PUBLISHED,
        Reason.LOCAL_NOT_FOUND,
        Reason.DOCUMENT_INVALID,
        Reason.PEER_LOST,
        Reason.NOT_PROBED,
    ),
    Type.ENDPOINTS_MIRRORED: (
        Reason.MIRRORED,
        Reason.LAST_KNOWN,
        Reason.NOT_CONFIGURED,
        Reason.NO_REMOTE_ENDPOINTS,
        Reason.LOCAL_NOT_FOUND,
        Reason.MODEL_MISMATCH,
        Reason.KEY_MISMATCH,
        Reason.CLUSTER_ID_MISMATCH,
        Reason.REMOTE_NOT_PUBLISHED,
        Reason.DOCUMENT_INVALID,
        Reason.NOT_PROBED,
        Reason.API_ERROR,
    ),
    Type.ENCRYPTED: (Reason.ALL_ENCRYPTED, Reason.DECLARED_NONE),
}
_GOING = (Reason.AS_SPECIFIED, Reason.PROGRESSING, Reason.STARTING, Reason.CRASHING)
SUMMARY_REASONS: Mapping[Type, tuple[Reason, ...]] = {
    Type.READY: (*_GOING, *_STALLED),
    Type.RECONCILING: (*_GOING, Reason.ROLLING_OUT, Reason.WAITING_FOR_PEER, Reason.PAUSED, *_STALLED),
}
"""The reasons of `Ready` and `Reconciling` beside those that they take over from whatever they wait for."""


def _with_taken_over(own: tuple[Reason, ...]) -> tuple[Reason, ...]:
    return tuple(dict.fromkeys((*own, *(reason for reasons in _OWN.values() for reason in reasons))))


REASONS: Mapping[Type, tuple[Reason, ...]] = {
    **{kind: _with_taken_over(own) for kind, own in SUMMARY_REASONS.items()},
    **_OWN,
}
"""The reasons that each type may have."""


@dataclass(frozen=True)
class Verdict:
    """One condition before it gets its generation and time. status None: unknown."""

    type: Type
    status: bool | None
    reason: Reason
    message: str = ""


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
    """A condition observed at `now`; status None is Unknown. `merge` keeps the older transition time.

    :raises ValueError: the reason is not documented for this type.
    """
    if reason not in REASONS[kind]:
        raise ValueError(f"{reason.value} is no documented reason of {kind.value}")
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


def find(conditions: Iterable[Condition | Mapping[str, Any]], kind: Type) -> Condition | None:
    """The condition of that type, or None; of models or of plain objects as the API server gives them.

    :raises ValidationError: a plain object of that type is no condition.
    """
    for each in conditions:
        if isinstance(each, Condition):
            if each.type == kind.value:
                return each
        elif each.get("type") == kind.value:
            return Condition.model_validate(each)
    return None
