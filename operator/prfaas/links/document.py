"""What a peer publishes, read with suspicion: one pool's document, or the reason why there is none.

Pure. The peer is another organisation's software, perhaps of another release: whatever it sends either becomes a
PoolDocument or a refusal with words for a person, never an exception further in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from prfaas.api.conditions import Reason
from prfaas.api.exchange import PoolDocument
from prfaas.api.inter_cluster_link import RemotePool
from prfaas.api.labels import EXCHANGE_KEY
from prfaas.kube.resources import Object

MAX_BYTES = 512 * 1024
"""Largest document that is read; a thousand endpoints take about a fifth of it."""


@dataclass(frozen=True)
class Refusal:
    """Why what the peer publishes is not used."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class LocalEnd:
    """What the pool at this end needs of the other one."""

    model: str
    revision: str
    compatibility_key: str
    """The key that its spec asks for."""
    keys: frozenset[str] = frozenset()
    """Keys that its instances have now."""

    @property
    def all_keys(self) -> frozenset[str]:
        """Keys that it has or is to have."""
        return self.keys | {self.compatibility_key}


def read_document(config_map: Object | None, remote: RemotePool, cluster_id: str) -> PoolDocument | Refusal:
    """The document of `remote`, published under `cluster_id`; or why it cannot be used."""
    if config_map is None:
        where = f"{remote.kind} {remote.namespace}/{remote.name}"
        return Refusal(
            Reason.REMOTE_NOT_PUBLISHED,
            f"the peer publishes no {where}; check spec.remote and that the pool exists there",
        )
    data = config_map.get("data")
    text = data.get(EXCHANGE_KEY) if isinstance(data, dict) else None
    if not isinstance(text, str):
        return Refusal(Reason.DOCUMENT_INVALID, f"the peer's ConfigMap has no key {EXCHANGE_KEY}")
    if len(text.encode()) > MAX_BYTES:
        return Refusal(Reason.DOCUMENT_INVALID, f"the peer's document is larger than {MAX_BYTES} bytes")
    try:
        document = PoolDocument.model_validate_json(text)
    except ValidationError as error:
        return Refusal(Reason.DOCUMENT_INVALID, _first_complaint(error))
    if document.cluster_id != cluster_id:
        return Refusal(
            Reason.CLUSTER_ID_MISMATCH,
            f"the peer calls itself {document.cluster_id}, spec.peer.clusterID says {cluster_id}",
        )
    said = (document.kind, document.namespace, document.name)
    if said != (remote.kind, remote.namespace, remote.name):
        return Refusal(
            Reason.DOCUMENT_INVALID, f"the peer's document is about another pool: {said[0]} {said[1]}/{said[2]}"
        )
    return document


def keys_in(document: PoolDocument) -> frozenset[str]:
    """Compatibility keys that the remote pool has or is to have."""
    there = {group.compatibility_key for group in document.by_key if group.prefill or group.decode}
    return frozenset({document.compatibility_key, *there})


def incompatibility(document: PoolDocument, local: LocalEnd) -> Refusal | None:
    """Why KV cache of the remote pool cannot be used here; None when it can, or could once a rollout has got further.

    Model and revision are part of the key: while one end goes over to another revision, they share an older key.
    """
    ours, theirs = (local.model, local.revision), (document.model.name, document.model.revision)
    same_key = document.compatibility_key == local.compatibility_key
    if keys_in(document) & local.all_keys and not (same_key and ours != theirs):
        return None
    if ours != theirs:
        return Refusal(
            Reason.MODEL_MISMATCH,
            f"the peer serves {theirs[0]} at revision {theirs[1]}, the local pool {ours[0]} at {ours[1]}",
        )
    return Refusal(
        Reason.KEY_MISMATCH,
        f"the KV caches differ in form: compatibility key {document.compatibility_key} there, "
        f"{local.compatibility_key} here; engine image, arguments or connector are not the same",
    )


def rollout(document: PoolDocument, local: LocalEnd) -> str:
    """What there is to say of two compatible ends that have more than one key between them; empty of two with one."""
    here, there = local.all_keys, keys_in(document)
    if here == there and len(here) == 1:
        return ""
    alone = [(f"only here {', '.join(sorted(here - there))}", here - there)]
    alone += [(f"only there {', '.join(sorted(there - here))}", there - here)]
    return "; ".join([f"paired by key {', '.join(sorted(here & there))}", *(text for text, some in alone if some)])


def _first_complaint(error: ValidationError) -> str:
    complaint = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in complaint["loc"])
    return f"the peer's document cannot be read: {path or 'document'}: {complaint['msg']}"[:500]
