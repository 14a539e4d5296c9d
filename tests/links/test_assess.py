"""From spec, peer and local pool to conditions and to what is mirrored."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from prfaas.api.conditions import REASONS, Condition, Reason, Type, condition
from prfaas.links.assess import Assessment, assess
from prfaas.links.contact import Connected, NotConnected
from prfaas.links.document import LocalEnd
from prfaas.links.peer import PeerSnapshot
from tests.links.build import LOCAL, document, endpoint, published, spec

LOST = datetime(2026, 1, 1, tzinfo=UTC)


def seen(**changes: Any) -> PeerSnapshot:
    return PeerSnapshot(contact=Connected("v1.37"), config_map=published(**changes), read=True)


def lost(reason: Reason = Reason.UNREACHABLE, *, known: bool = True) -> PeerSnapshot:
    contact = NotConnected(reason, "why", LOST)
    return replace(seen(), contact=contact) if known else PeerSnapshot(contact=contact)


def short(assessment: Assessment) -> dict[str, tuple[bool | None, str]]:
    for finding in assessment.findings:
        assert finding.reason in REASONS[finding.type], finding
    return {finding.type.value: (finding.status, finding.reason.value) for finding in assessment.findings}


def names(assessment: Assessment) -> list[str] | None:
    return None if assessment.mirror is None else [each.name for each in assessment.mirror.endpoints]


def test_all_is_well() -> None:
    assessment = assess(spec(), seen(), LOCAL)
    assert short(assessment) == {
        "Accepted": (True, "Valid"),
        "CredentialsValid": (True, "Valid"),
        "PeerAPIReachable": (True, "Reachable"),
        "Compatible": (True, "Matched"),
        "EndpointsMirrored": (True, "Mirrored"),
        "Encrypted": (False, "DeclaredNone"),
    }
    assert names(assessment) == ["h200-0", "h200-1"]
    assert (assessment.cluster_id, assessment.version, assessment.lost_since) == ("east", "v1.37", None)
    assert assessment.compatibility_key == "key-1"
    assert assessment.find(Type.ENCRYPTED).message == "the spec says None for: requests, kv"


REFUSED = {
    "another datacenter": (seen(clusterID="north"), LOCAL, "ClusterIDMismatch"),
    "another model": (seen(), LocalEnd("x", "main", "key-1"), "ModelMismatch"),
    "another KV form": (seen(compatibilityKey="key-2"), LOCAL, "KeyMismatch"),
    "no JSON": (seen(content="{"), LOCAL, "DocumentInvalid"),
    "not published": (PeerSnapshot(Connected("v1"), None, read=True), LOCAL, "RemoteNotPublished"),
}


@pytest.mark.parametrize(("peer", "local", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_refused_document_withdraws_every_endpoint(peer: PeerSnapshot, local: LocalEnd, reason: str) -> None:
    assessment = assess(spec(), peer, local)
    states = short(assessment)
    assert states["Compatible"] == states["EndpointsMirrored"] == (False, reason)
    assert names(assessment) == []


@pytest.mark.parametrize(
    ("reason", "credentials", "reachable"),
    [
        (Reason.UNREACHABLE, (None, "Unreachable"), (False, "Unreachable")),
        (Reason.UNAUTHORIZED, (False, "Unauthorized"), (True, "Reachable")),
        (Reason.FORBIDDEN, (False, "Forbidden"), (True, "Reachable")),
        (Reason.SECRET_NOT_FOUND, (False, "SecretNotFound"), (None, "NotProbed")),
        (Reason.KUBE_CONFIG_INVALID, (False, "KubeConfigInvalid"), (None, "NotProbed")),
    ],
)
def test_a_lost_peer_keeps_its_endpoints_and_every_condition_says_what_is_known(
    reason: Reason, credentials: tuple[bool | None, str], reachable: tuple[bool | None, str]
) -> None:
    assessment = assess(spec(), lost(reason), LOCAL)
    states = short(assessment)
    assert states["CredentialsValid"] == credentials
    assert states["PeerAPIReachable"] == reachable
    assert states["Compatible"] == (True, "Matched")
    assert states["EndpointsMirrored"] == (None, "LastKnown")
    assert names(assessment) == ["h200-0", "h200-1"]
    assert assessment.lost_since == "2026-01-01T00:00:00Z"


def test_a_peer_never_read_by_this_process_leaves_what_is_mirrored_alone() -> None:
    assessment = assess(spec(), lost(known=False), LOCAL)
    states = short(assessment)
    assert states["Compatible"] == (None, "PeerLost")
    assert states["EndpointsMirrored"] == (None, "LastKnown")
    assert names(assessment) is None


def test_the_beginning_of_a_loss_written_by_an_earlier_process_stays() -> None:
    before = "2025-12-31T00:00:00Z"
    assert assess(spec(), lost(), LOCAL, lost_since=before).lost_since == before
    assert assess(spec(), PeerSnapshot(), LOCAL, lost_since=before).lost_since == before
    assert assess(spec(), seen(), LOCAL, lost_since=before).lost_since is None


def conditions(assessment: Assessment) -> tuple[Condition, ...]:
    return tuple(
        condition(each.type, each.status, each.reason, each.message, generation=1, now=LOST)
        for each in assessment.findings
    )


@pytest.mark.parametrize("earlier", [seen(), lost(), lost(known=False)], ids=["well", "lost", "never read"])
def test_a_fresh_process_lets_stand_what_it_finds(earlier: PeerSnapshot) -> None:
    before = assess(spec(), earlier, LOCAL)
    fresh = assess(spec(), PeerSnapshot(), LOCAL, before=conditions(before))
    assert fresh.findings == before.findings
    assert fresh.mirror is None
    half = assess(spec(), replace(PeerSnapshot(), read=True, config_map=published()), LOCAL, before=conditions(before))
    for kind in (Type.CREDENTIALS_VALID, Type.PEER_API_REACHABLE):
        assert half.find(kind) == before.find(kind)


def test_a_new_link_knows_nothing_yet() -> None:
    states = short(assess(spec(), PeerSnapshot(), LOCAL))
    for kind in ("CredentialsValid", "PeerAPIReachable", "Compatible", "EndpointsMirrored"):
        assert states[kind] == (None, "NotProbed")


def test_without_a_local_pool_nothing_is_mirrored() -> None:
    assessment = assess(spec(), seen(), None)
    assert short(assessment)["Accepted"] == (False, "LocalNotFound")
    assert short(assessment)["EndpointsMirrored"] == (False, "LocalNotFound")
    assert names(assessment) == []


def test_no_ready_instance_and_a_bad_address_are_said() -> None:
    assessment = assess(
        spec(), seen(endpoints=[endpoint("a", "127.0.0.1"), endpoint("b", "10.0.0.1", ready=False)]), LOCAL
    )
    finding = assessment.find(Type.ENDPOINTS_MIRRORED)
    assert (finding.status, finding.reason) == (False, Reason.NO_REMOTE_ENDPOINTS)
    assert (
        finding.message == "the peer publishes no instance that is ready; endpoint a: 127.0.0.1 is a loopback address"
    )
    assert names(assessment) == ["b"]


def test_endpoints_left_out_are_named_and_no_more_than_three() -> None:
    bad = [endpoint(f"bad-{index}", f"127.0.0.{index}") for index in range(1, 6)]
    finding = assess(spec(), seen(endpoints=[*bad, endpoint("good", "10.0.0.1")]), LOCAL).find(Type.ENDPOINTS_MIRRORED)
    assert (finding.status, finding.reason) == (True, Reason.MIRRORED)
    assert finding.message.startswith("left out: endpoint bad-1: 127.0.0.1 is a loopback address; endpoint bad-2")
    assert finding.message.count("endpoint ") == 3
    assert assess(spec(), seen(), LOCAL).find(Type.ENDPOINTS_MIRRORED).message == ""


def test_the_end_at_the_prefill_pool_mirrors_nothing_and_is_complete() -> None:
    link = spec(
        local={"kind": "PrfaaSCluster", "name": "h200"},
        remote={"kind": "PDCluster", "namespace": "prfaas", "name": "h20"},
    )
    text = json.dumps(document(kind="PDCluster", name="h20", endpoints=[]))
    assessment = assess(link, seen(content=text), LOCAL)
    assert short(assessment)["Compatible"] == (True, "Matched")
    assert short(assessment)["EndpointsMirrored"] == (True, "NotConfigured")
    assert names(assessment) == []


def test_a_peer_in_this_api_server_needs_no_credentials() -> None:
    states = short(assess(spec(local_source=True), replace(seen(), local=True), LOCAL))
    assert states["CredentialsValid"] == states["PeerAPIReachable"] == (True, "NotNeeded")
    assert states["EndpointsMirrored"] == (True, "Mirrored")


@pytest.mark.parametrize("peer", [PeerSnapshot(), seen(), lost(), lost(known=False), seen(content="{")])
@pytest.mark.parametrize("local", [LOCAL, None])
def test_every_reason_is_one_that_its_type_documents(peer: PeerSnapshot, local: LocalEnd | None) -> None:
    short(assess(spec(), peer, local))


def test_endpoints_of_every_key_that_is_here_or_comes_are_mirrored_and_no_others() -> None:
    published_ones = [endpoint(f"e-{key}", f"10.1.0.{key}", key=f"key-{key}") for key in (1, 2, 3)]
    groups = [{"compatibilityKey": f"key-{key}", "prefill": 1, "prefillReady": 1} for key in (1, 2, 3)]
    peer = seen(endpoints=published_ones, groups=groups, compatibilityKey="key-3")
    assessment = assess(spec(), peer, LocalEnd("m/model", "main", "key-2", frozenset({"key-1"})))
    assert short(assessment)["Compatible"] == (True, "Matched")
    assert names(assessment) == ["e-1", "e-2"]
    assert assessment.mirror is not None
    assert [each.compatibility_key for each in assessment.mirror.endpoints] == ["key-1", "key-2"]
    assert assessment.compatibility_key == "key-3"
    assert [group.compatibility_key for group in assessment.groups] == ["key-1", "key-2", "key-3"]


def test_a_peer_of_an_older_release_is_one_group() -> None:
    assessment = assess(spec(), seen(), LOCAL)
    assert [group.to_wire() for group in assessment.groups] == [
        {"compatibilityKey": "key-1", "prefill": 2, "prefillReady": 1, "decode": 0, "decodeReady": 0}
    ]
    assert assessment.mirror is not None
    assert {each.compatibility_key for each in assessment.mirror.endpoints} == {"key-1"}
