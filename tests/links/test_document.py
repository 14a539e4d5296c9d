"""Documents of a peer: what is accepted, and every refusal before traffic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.conditions import Reason
from prfaas.api.exchange import PoolDocument
from prfaas.links.document import MAX_BYTES, LocalEnd, Refusal, incompatibility, keys_in, read_document, rollout
from tests.links.build import LOCAL, document, published, spec

REMOTE = spec().remote


def read(**changes: Any) -> PoolDocument | Refusal:
    return read_document(published(**changes), REMOTE, "east")


def test_a_good_one() -> None:
    read_one = read()
    assert isinstance(read_one, PoolDocument)
    assert [(each.name, str(each.address), each.ready) for each in read_one.endpoints] == [
        ("h200-0", "10.1.0.4", True),
        ("h200-1", "10.1.0.5", False),
    ]
    assert incompatibility(read_one, LOCAL) is None


def test_members_of_a_later_release_are_ignored() -> None:
    assert isinstance(read(capacity={"gpus": 16}), PoolDocument)


REFUSED: dict[str, tuple[dict[str, Any], Reason, str]] = {
    "another datacenter": ({"clusterID": "north"}, Reason.CLUSTER_ID_MISMATCH, "calls itself north"),
    "another pool": ({"name": "h100"}, Reason.DOCUMENT_INVALID, "another pool: PrfaaSCluster prfaas/h100"),
    "another kind": ({"kind": "PDCluster"}, Reason.DOCUMENT_INVALID, "another pool: PDCluster"),
    "a later version": ({"apiVersion": "prfaas.io/v2"}, Reason.DOCUMENT_INVALID, "apiVersion"),
    "an address that is none": (
        {"endpoints": [{"name": "a", "address": "east.example", "port": 1, "ready": True}]},
        Reason.DOCUMENT_INVALID,
        "endpoints.0.address",
    ),
    "a port that is none": (
        {"endpoints": [{"name": "a", "address": "10.0.0.1", "port": 0, "ready": True}]},
        Reason.DOCUMENT_INVALID,
        "endpoints.0.port",
    ),
    "no JSON": ({"content": "{"}, Reason.DOCUMENT_INVALID, "Invalid JSON"),
    "a list": ({"content": "[]"}, Reason.DOCUMENT_INVALID, "document"),
    "deep nesting": ({"content": "[" * 100_000}, Reason.DOCUMENT_INVALID, ""),
    "too large": ({"content": " " * (MAX_BYTES + 1)}, Reason.DOCUMENT_INVALID, "larger than"),
}


@pytest.mark.parametrize(("changes", "reason", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], reason: Reason, words: str) -> None:
    refusal = read(**changes)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert words in refusal.message


def test_a_config_map_that_is_not_there_or_has_no_document() -> None:
    absent = read_document(None, REMOTE, "east")
    assert isinstance(absent, Refusal)
    assert absent.reason == Reason.REMOTE_NOT_PUBLISHED
    assert "PrfaaSCluster prfaas/h200" in absent.message
    empty = read_document({"metadata": {}}, REMOTE, "east")
    assert isinstance(empty, Refusal)
    assert empty.reason == Reason.DOCUMENT_INVALID


@pytest.mark.parametrize(
    ("local", "reason", "words"),
    [
        (LocalEnd("other", "main", "key-1"), Reason.MODEL_MISMATCH, "m/model at revision main, the local pool other"),
        (LocalEnd("m/model", "v2", "key-2"), Reason.MODEL_MISMATCH, "at v2"),
        (LocalEnd("m/model", "main", "key-2"), Reason.KEY_MISMATCH, "key-1 there, key-2 here"),
    ],
)
def test_incompatible_ends(local: LocalEnd, reason: Reason, words: str) -> None:
    refusal = incompatibility(PoolDocument.model_validate(document()), local)
    assert refusal is not None
    assert refusal.reason == reason
    assert words in refusal.message


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_no_text_raises(text: str) -> None:
    assert isinstance(read(content=text), Refusal)


GROUPS = [
    {"compatibilityKey": "key-1", "prefill": 1, "prefillReady": 1},
    {"compatibilityKey": "key-2", "prefill": 1, "prefillReady": 0},
]


@pytest.mark.parametrize(
    ("document_key", "local", "says"),
    [
        ("key-1", LocalEnd("m/model", "main", "key-1"), "paired by key key-1; only there key-2"),
        ("key-2", LocalEnd("m/model", "main", "key-1"), "paired by key key-1; only there key-2"),
        ("key-2", LocalEnd("m/model", "v2", "key-3", frozenset({"key-1"})), "only here key-3; only there key-2"),
        ("key-2", LocalEnd("m/model", "main", "key-2", frozenset({"key-1"})), "paired by key key-1, key-2"),
    ],
    ids=["it has gone on", "it goes on", "another revision comes", "both go over"],
)
def test_ends_that_are_going_over_to_another_key_are_compatible_and_say_so(
    document_key: str, local: LocalEnd, says: str
) -> None:
    there = PoolDocument.model_validate(document(compatibilityKey=document_key, groups=GROUPS))
    assert incompatibility(there, local) is None
    assert rollout(there, local).endswith(says)


def test_groups_without_instances_do_not_count_and_ends_of_one_key_say_nothing() -> None:
    empty = [{"compatibilityKey": "key-9"}]
    there = PoolDocument.model_validate(document(groups=empty))
    assert keys_in(there) == {"key-1"}
    assert rollout(there, LOCAL) == ""


def test_a_key_that_two_models_share_is_not_believed() -> None:
    refusal = incompatibility(PoolDocument.model_validate(document()), LocalEnd("other", "main", "key-1"))
    assert refusal is not None
    assert refusal.reason == Reason.MODEL_MISMATCH
