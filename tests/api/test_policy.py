"""The routing policy document: its hash, its checks and its order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prfaas.api.policy import Fallback, LinkThreshold, RoutingPolicy, policy_hash, supersedes


def document(**changes: Any) -> RoutingPolicy:
    fields: dict[str, Any] = {
        "pd_cluster_uid": "uid-1",
        "epoch": 3,
        "version": 7,
        "model": "kimi",
        "thresholds": (LinkThreshold(link="to-east", tokens=19_400),),
        "fallback": Fallback.REJECT,
    }
    return RoutingPolicy.build(**(fields | changes))


def test_wire_form_is_stable() -> None:
    assert document().to_wire() == {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "RoutingPolicy",
        "pdClusterUID": "uid-1",
        "epoch": 3,
        "version": 7,
        "hash": "b6240e0086878944",
        "model": "kimi",
        "thresholds": [{"link": "to-east", "tokens": 19_400}],
        "fallback": "Reject",
    }


def test_round_trip_keeps_the_document() -> None:
    assert RoutingPolicy.model_validate(document().to_wire()) == document()


def test_an_altered_document_is_refused() -> None:
    altered = document().to_wire() | {"model": "other"}
    with pytest.raises(ValidationError, match="the document was altered"):
        RoutingPolicy.model_validate(altered)


def test_a_link_listed_twice_is_refused() -> None:
    cut = LinkThreshold(link="to-east", tokens=1)
    with pytest.raises(ValidationError, match="'to-east' is listed more than once"):
        document(thresholds=(cut, cut))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**53 + 1}, "epoch"),
        ({"version": 2**53 + 1}, "version"),
        ({"version": 0}, "version"),
        ({"model": ""}, "model"),
        ({"pdClusterUID": ""}, "pdClusterUID"),
        ({"fallback": "Maybe"}, "fallback"),
        ({"thresholds": [{"link": "to-east", "tokens": -1}]}, "tokens"),
        ({"thresholds": [{"link": "To East", "tokens": 1}]}, "link"),
        ({"treshold": 1}, "treshold"),
    ],
)
def test_bad_fields_are_refused_with_their_path(changes: dict[str, Any], path: str) -> None:
    wire = document().to_wire() | changes
    wire["hash"] = policy_hash(wire)
    with pytest.raises(ValidationError) as caught:
        RoutingPolicy.model_validate(wire)
    assert any(path in error["loc"] for error in caught.value.errors())


def test_hash_ignores_who_committed_and_when() -> None:
    assert document(epoch=9, version=99).hash == document().hash


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"pd_cluster_uid": "uid-2"},
        {"thresholds": (LinkThreshold(link="to-east", tokens=19_401),)},
        {"fallback": Fallback.LOCAL_PREFILL},
    ],
)
def test_hash_covers_the_content(changes: dict[str, Any]) -> None:
    assert document(**changes).hash != document().hash


def test_threshold_of_a_link() -> None:
    assert document().threshold("to-east") == 19_400
    assert document().threshold("to-north") is None


orders = st.tuples(st.integers(0, 5), st.integers(1, 5))


@given(orders, orders)
def test_order_within_one_uid_is_epoch_then_version(a: tuple[int, int], b: tuple[int, int]) -> None:
    new, current = document(epoch=a[0], version=a[1]), document(epoch=b[0], version=b[1])
    assert supersedes(new, current, "uid-1") == (a > b)


def test_another_uid_wins_only_when_the_api_says_so() -> None:
    current, recreated = document(epoch=9), document(pd_cluster_uid="uid-2", epoch=1, version=1)
    assert supersedes(recreated, current, uid_in_api="uid-2")
    assert not supersedes(recreated, current, uid_in_api="uid-1")
    assert not supersedes(recreated, current, uid_in_api=None)


def test_first_document_is_taken_unless_the_api_knows_another_uid() -> None:
    assert supersedes(document(), None, uid_in_api=None)
    assert supersedes(document(), None, uid_in_api="uid-1")
    assert not supersedes(document(), None, uid_in_api="uid-2")
