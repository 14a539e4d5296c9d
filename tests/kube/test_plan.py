"""The difference between children as they are and as wanted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.labels import SPEC_HASH
from prfaas.kube.apply import plan, stamped
from prfaas.kube.resources import Object


def config_map(name: str, value: str = "1", **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "ns", **metadata},
        "data": {"k": value},
    }


def live(obj: Object, **metadata: Any) -> Object:
    """As the server returns what was applied."""
    applied = stamped(obj)
    return {**applied, "metadata": {**applied["metadata"], "uid": "u", "resourceVersion": "1", **metadata}}


def test_what_is_as_wanted_is_left_alone() -> None:
    assert plan([live(config_map("a"))], [config_map("a")]).empty


def test_each_set() -> None:
    current = [live(config_map("same")), live(config_map("changed", "old")), live(config_map("extra"))]
    steps = plan(current, [config_map("same"), config_map("changed"), config_map("new")])
    assert [step.key.name for step in steps.create] == ["new"]
    assert [step.key.name for step in steps.apply] == ["changed"]
    assert [obj["metadata"]["name"] for obj in steps.delete] == ["extra"]
    assert not steps.terminating


def test_an_edit_by_hand_is_drift_though_the_hash_is_right() -> None:
    edited = {**live(config_map("a")), "data": {"k": "edited"}}
    assert [step.key.name for step in plan([edited], [config_map("a")]).apply] == ["a"]


def test_a_member_we_no_longer_want_is_seen_by_the_hash() -> None:
    before = config_map("a")
    before["data"]["gone"] = "x"
    assert [step.key.name for step in plan([live(before)], [config_map("a")]).apply] == ["a"]


def test_what_is_being_deleted_is_neither_applied_nor_deleted_again() -> None:
    dying = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    steps = plan([live(config_map("a"), **dying), live(config_map("b"), **dying)], [config_map("a", "new")])
    assert steps.empty
    assert [key.name for key in steps.terminating] == ["a"]


def test_wanting_one_key_twice_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="ConfigMap ns/a is wanted twice"):
        plan([], [config_map("a"), config_map("a")])


def test_the_wanted_object_is_not_changed_by_stamping() -> None:
    obj = config_map("a", annotations={"x": "y"})
    assert set(stamped(obj)["metadata"]["annotations"]) == {"x", SPEC_HASH}
    assert set(obj["metadata"]["annotations"]) == {"x"}


_worlds = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("123"))


@given(_worlds, _worlds)
def test_carrying_a_plan_out_leaves_nothing_to_do(before: dict[str, str], after: dict[str, str]) -> None:
    current = {name: live(config_map(name, value)) for name, value in before.items()}
    wanted = [config_map(name, value) for name, value in after.items()]
    steps = plan(current.values(), wanted)
    for step in (*steps.create, *steps.apply):
        current[step.key.name] = live(step.wanted)
    for obj in steps.delete:
        del current[obj["metadata"]["name"]]
    assert {name: obj["data"]["k"] for name, obj in current.items()} == after
