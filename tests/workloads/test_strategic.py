"""Merging a pod template override: what is kept, what is replaced, and what is refused with a path."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.workloads.strategic import MergeError, merge

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "tolerations": [{"key": "gpu"}],
        "containers": [
            {
                "name": "engine",
                "args": ["--port", "8000"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
    },
}


def merged(override: dict[str, Any]) -> dict[str, Any]:
    return merge(BASE, override, "spec.podTemplate")


def engine(override: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = merged({"spec": {"containers": [{"name": "engine", **override}]}})["spec"]["containers"][0]
    return result


def test_members_merge() -> None:
    assert merged({"metadata": {"labels": {"b": "2"}}})["metadata"]["labels"] == {"a": "1", "b": "2"}


def test_null_removes_a_member() -> None:
    assert merged({"metadata": {"labels": {"a": None}}})["metadata"]["labels"] == {}


def test_list_items_merge_by_name_in_place() -> None:
    env = engine({"env": [{"name": "C", "value": "3"}, {"name": "A", "value": "9"}]})["env"]
    assert env == [{"name": "A", "value": "9"}, {"name": "B", "value": "2"}, {"name": "C", "value": "3"}]


def test_mounts_merge_by_path() -> None:
    mounts = engine({"volumeMounts": [{"mountPath": "/models", "name": "models"}]})["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == ["/dev/shm", "/models"]


def test_a_list_without_key_is_replaced() -> None:
    assert engine({"args": ["--x"]})["args"] == ["--x"]
    assert merged({"spec": {"tolerations": []}})["spec"]["tolerations"] == []


def test_a_sidecar_is_added() -> None:
    names = [item["name"] for item in merged({"spec": {"containers": [{"name": "sidecar"}]}})["spec"]["containers"]]
    assert names == ["engine", "sidecar"]


def test_an_item_is_removed() -> None:
    assert engine({"env": [{"name": "A", "$patch": "delete"}]})["env"] == [{"name": "B", "value": "2"}]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            {"spec": {"containers": [{"args": []}]}},
            r"spec\.podTemplate\.spec\.containers\[0\]: needs 'name', by which items of this list are merged",
        ),
        ({"spec": {"containers": ["engine"]}}, r"containers\[0\]: must be an object with 'name'"),
        ({"spec": {"containers": {"name": "engine"}}}, r"spec\.containers: is an object, but this field is a list"),
        ({"spec": []}, r"spec\.podTemplate\.spec: is a list, but this field is an object"),
        ({"metadata": "x"}, r"metadata: is a string, but this field is an object"),
        ({"spec": {"$patch": "delete"}}, r"spec\.\$patch: only an item of a list"),
    ],
)
def test_what_cannot_be_merged_says_where_and_why(override: dict[str, Any], text: str) -> None:
    with pytest.raises(MergeError, match=text):
        merged(override)


trees = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.dictionaries(st.sampled_from(["x", "y", "z", "items"]), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(["x", "y", "z"]), trees, max_size=3)


@given(objects)
def test_merging_over_nothing_gives_the_override_and_merging_nothing_changes_nothing(tree: dict[str, Any]) -> None:
    assert merge({}, tree, "p") == tree
    assert merge(tree, {}, "p") == tree
    assert merge(tree, tree, "p") == tree


@given(objects, objects)
def test_inputs_are_never_changed(base: dict[str, Any], override: dict[str, Any]) -> None:
    before = copy.deepcopy((base, override))
    with contextlib.suppress(MergeError):
        merge(base, override, "p")
    assert (base, override) == before
