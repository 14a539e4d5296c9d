"""What a link's state is, and which endpoints it should mirror: from its spec, its peer, and the local pool.

Pure. Nothing is mirrored before the peer's document has been found to be of the right datacenter, pool, model and KV
form; whatever is wrong with it withdraws what was mirrored. Losing contact withdraws nothing: the last known endpoints
stay, and serving with them. Until a fresh process has its first verdict, the conditions that it finds stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.api.conditions import REASONS, Condition, Reason, Type, Verdict, timestamp
from prfaas.api.exchange import PoolDocument
from prfaas.api.group import Group
from prfaas.api.inter_cluster_link import InterClusterLinkSpec
from prfaas.links.contact import Connected, Contact, NotConnected, NotProbed
from prfaas.links.document import LocalEnd, Refusal, incompatibility, read_document, rollout
from prfaas.links.mirror import Mirrored, usable
from prfaas.links.peer import PeerSnapshot


@dataclass(frozen=True)
class Assessment:
    """What to say about a link, and what to mirror."""

    findings: tuple[Verdict, ...]
    mirror: Mirrored | None
    """Endpoints to mirror, perhaps none; None: leave what is mirrored as it is."""
    compatibility_key: str | None = None
    """The key that the spec of the remote pool asks for; None: not known."""
    groups: tuple[Group, ...] = ()
    """The remote pool's instances by key."""
    cluster_id: str | None = None
    version: str | None = None
    lost_since: str | None = None
    """For the link's status; None where it says nothing."""

    def find(self, kind: Type) -> Verdict:
        return next(each for each in self.findings if each.type == kind)


def assess(
    spec: InterClusterLinkSpec,
    peer: PeerSnapshot,
    local: LocalEnd | None,
    *,
    before: Sequence[Condition] = (),
    lost_since: str | None = None,
) -> Assessment:
    """`local`: the pool at this end, None: it does not exist. `before` and `lost_since` are from the link's status."""
    accepted = _accepted(spec, local)
    encrypted = _encrypted(spec)
    if isinstance(peer.contact, NotProbed) and not peer.read:
        kept = tuple(
            _standing(kind, before)
            for kind in (Type.CREDENTIALS_VALID, Type.PEER_API_REACHABLE, Type.COMPATIBLE, Type.ENDPOINTS_MIRRORED)
        )
        return Assessment((accepted, *kept, encrypted), None, lost_since=lost_since)
    document = read_document(peer.config_map, spec.remote, spec.peer.cluster_id) if peer.read else None
    compatible = _compatible(document, local)
    mirror = _mirror(spec, document, compatible, local)
    contact = peer.contact
    return Assessment(
        findings=(
            accepted,
            _credentials_valid(peer, before),
            _reachable(peer, before),
            compatible,
            _endpoints_mirrored(spec, peer, compatible, mirror),
            encrypted,
        ),
        mirror=mirror,
        compatibility_key=document.compatibility_key if isinstance(document, PoolDocument) else None,
        groups=document.by_key if isinstance(document, PoolDocument) else (),
        cluster_id=document.cluster_id if isinstance(document, PoolDocument) else None,
        version=(contact.version or None) if isinstance(contact, Connected) else None,
        lost_since=_lost_since(contact, lost_since),
    )


def _lost_since(contact: Contact, before: str | None) -> str | None:
    """A loss that an earlier process has written down began then, not at our own start."""
    match contact:
        case Connected():
            return None
        case NotConnected():
            return before or timestamp(contact.lost_since)
        case NotProbed():
            return before


def _accepted(spec: InterClusterLinkSpec, local: LocalEnd | None) -> Verdict:
    if local is None:
        text = f"spec.local: there is no {spec.local.kind} {spec.local.name} in this namespace"
        return Verdict(Type.ACCEPTED, False, Reason.LOCAL_NOT_FOUND, text)
    return Verdict(Type.ACCEPTED, True, Reason.VALID)


def _encrypted(spec: InterClusterLinkSpec) -> Verdict:
    plain = [name for name in ("control", "requests", "kv") if getattr(spec.encryption, name) == "None"]
    if plain:
        text = f"the spec says None for: {', '.join(plain)}"
        return Verdict(Type.ENCRYPTED, False, Reason.DECLARED_NONE, text)
    return Verdict(Type.ENCRYPTED, True, Reason.ALL_ENCRYPTED)


def _standing(kind: Type, before: Sequence[Condition]) -> Verdict:
    found = next((each for each in before if each.type == kind.value), None)
    if found is None:
        return Verdict(kind, None, Reason.NOT_PROBED, "the peer has not been asked yet")
    status = {"True": True, "False": False, "Unknown": None}[found.status]
    reason = next((each for each in REASONS[kind] if each.value == found.reason), Reason.NOT_PROBED)
    return Verdict(kind, status, reason, found.message)


def _credentials_valid(peer: PeerSnapshot, before: Sequence[Condition]) -> Verdict:
    kind = Type.CREDENTIALS_VALID
    if peer.local:
        return Verdict(kind, True, Reason.NOT_NEEDED)
    if isinstance(peer.contact, Connected):
        return Verdict(kind, True, Reason.VALID)
    if isinstance(peer.contact, NotProbed):
        return _standing(kind, before)
    if peer.contact.reason == Reason.UNREACHABLE:
        return Verdict(kind, None, Reason.UNREACHABLE, "the peer does not answer, so the credentials cannot be tried")
    return Verdict(kind, False, peer.contact.reason, peer.contact.message)


def _reachable(peer: PeerSnapshot, before: Sequence[Condition]) -> Verdict:
    kind = Type.PEER_API_REACHABLE
    if isinstance(peer.contact, Connected):
        return Verdict(kind, True, Reason.NOT_NEEDED if peer.local else Reason.REACHABLE)
    if isinstance(peer.contact, NotProbed):
        return _standing(kind, before)
    if peer.contact.reason == Reason.UNREACHABLE:
        return Verdict(kind, False, Reason.UNREACHABLE, peer.contact.message)
    if peer.contact.reason in (Reason.UNAUTHORIZED, Reason.FORBIDDEN):
        return Verdict(kind, True, Reason.REACHABLE, "it answers, and refuses us; see CredentialsValid")
    return Verdict(kind, None, Reason.NOT_PROBED, "it cannot be asked; see CredentialsValid")


def _compatible(document: PoolDocument | Refusal | None, local: LocalEnd | None) -> Verdict:
    kind = Type.COMPATIBLE
    if document is None:
        return Verdict(kind, None, Reason.PEER_LOST, "there is no contact with the peer, and nothing of it is known")
    if isinstance(document, Refusal):
        return Verdict(kind, False, document.reason, document.message)
    if local is None:
        return Verdict(kind, None, Reason.LOCAL_NOT_FOUND, "there is no pool at this end to compare with")
    refusal = incompatibility(document, local)
    if refusal is not None:
        return Verdict(kind, False, refusal.reason, refusal.message)
    return Verdict(kind, True, Reason.MATCHED, rollout(document, local))


def _mirror(
    spec: InterClusterLinkSpec, document: PoolDocument | Refusal | None, compatible: Verdict, local: LocalEnd | None
) -> Mirrored | None:
    """Endpoints of the keys that the local pool has or is to have: what else there is, nobody here can pair with."""
    if document is None:
        return None
    if (
        isinstance(document, Refusal)
        or local is None
        or compatible.status is not True
        or spec.remote.kind != "PrfaaSCluster"
    ):
        return Mirrored(())
    named = [each.model_copy(update={"compatibility_key": document.key_of(each)}) for each in document.endpoints]
    return usable(each for each in named if each.compatibility_key in local.all_keys)


def _endpoints_mirrored(
    spec: InterClusterLinkSpec,
    peer: PeerSnapshot,
    compatible: Verdict,
    mirror: Mirrored | None,
) -> Verdict:
    kind = Type.ENDPOINTS_MIRRORED
    if spec.remote.kind != "PrfaaSCluster":
        return Verdict(kind, True, Reason.NOT_CONFIGURED, f"a {spec.remote.kind} offers no prefill to its peers")
    if mirror is None:
        return Verdict(kind, None, Reason.LAST_KNOWN, "no contact with the peer: endpoints mirrored before stay")
    if compatible.status is not True:
        return Verdict(kind, False, compatible.reason, "none; see Compatible")
    refused = "; ".join(mirror.refused[:3])
    if isinstance(peer.contact, NotConnected):
        return Verdict(kind, None, Reason.LAST_KNOWN, "no contact with the peer: the endpoints known last stay")
    if not any(each.ready for each in mirror.endpoints):
        text = "the peer publishes no instance that is ready"
        return Verdict(kind, False, Reason.NO_REMOTE_ENDPOINTS, f"{text}; {refused}" if refused else text)
    return Verdict(kind, True, Reason.MIRRORED, f"left out: {refused}" if refused else "")
