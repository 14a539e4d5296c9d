"""The instance plan: exact steps by example, and what must hold for every pool by property."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.workloads.assignment import Observed, Step, Wanted, instance_index, instance_name, plan

REVISIONS = {"prefill": "p1", "decode": "d1"}


def child(
    index: int, role: str = "decode", *, revision: str | None = None, ready: bool = True, **more: Any
) -> Observed:
    return Observed(instance_name("west", index), index, role, revision or REVISIONS[role], ready, **more)


def wanted(prefill: int, decode: int) -> Wanted:
    return Wanted({"prefill": prefill, "decode": decode}, REVISIONS)


def step(observed: list[Observed], prefill: int, decode: int, max_unavailable: int = 1) -> Step:
    return plan("west", observed, wanted(prefill, decode), max_unavailable)


def test_an_empty_pool_gets_the_lowest_names() -> None:
    assert step([], 1, 2).create == {"west-0": "decode", "west-1": "decode", "west-2": "prefill"}


def test_a_settled_pool_gets_no_action() -> None:
    result = step([child(0), child(1, "prefill")], 1, 1)
    assert result.settled
    assert result.apply == {"west-0": "decode", "west-1": "prefill"}


def test_a_hole_in_the_names_is_filled() -> None:
    assert step([child(0), child(2)], 0, 3).create == {"west-1": "decode"}


def test_the_marked_instance_goes_although_another_is_not_ready() -> None:
    result = step([child(0), child(1, marked=True), child(2, ready=False)], 0, 2)
    assert result.delete == ("west-1",)
    assert set(result.keep) == {"west-0", "west-2"}


def test_without_a_mark_the_one_that_is_not_ready_goes() -> None:
    assert step([child(0), child(1, ready=False), child(2)], 0, 2).delete == ("west-1",)


def test_without_a_mark_the_highest_index_goes() -> None:
    assert step([child(0), child(1), child(2)], 0, 2).delete == ("west-2",)


def test_a_mark_alone_removes_nothing() -> None:
    assert step([child(0, marked=True), child(1)], 0, 2).settled


def test_a_marked_instance_of_the_other_role_goes_and_one_converts() -> None:
    result = step([child(0), child(1), child(2, "prefill", marked=True)], 1, 1)
    assert result.delete == ("west-2",)
    assert result.convert == {"west-1": "prefill"}


def test_a_role_that_lacks_one_converts_a_named_child_in_place() -> None:
    result = step([child(0), child(1), child(2, "prefill")], 2, 1)
    assert result.convert == {"west-1": "prefill"}
    assert not result.create
    assert not result.delete


def test_conversion_takes_the_child_that_is_not_ready() -> None:
    assert step([child(0, ready=False), child(1), child(2)], 1, 2).convert == {"west-0": "prefill"}


def test_conversion_waits_while_another_instance_is_unavailable() -> None:
    result = step([child(0), child(1), child(2, "prefill", ready=False)], 2, 1)
    assert not result.convert
    assert list(result.held) == ["west-1"]


def test_a_new_revision_rolls_one_at_a_time() -> None:
    old = [child(index, revision="d0") for index in range(3)]
    assert step(old, 0, 3).roll == {"west-0": "decode"}
    assert list(step(old, 0, 3).held) == ["west-1", "west-2"]


def test_a_roll_never_waits_for_the_instance_that_is_broken_itself() -> None:
    broken = [child(0), child(1, revision="d0", ready=False), child(2, revision="d0")]
    result = step(broken, 0, 3)
    assert result.roll == {"west-1": "decode"}
    assert list(result.held) == ["west-2"]


def test_a_child_that_is_going_keeps_its_name_but_does_not_count() -> None:
    result = step([child(0, going=True)], 0, 1)
    assert result.create == {"west-1": "decode"}
    assert not result.delete


def test_growing_does_not_wait_for_the_budget() -> None:
    assert step([child(0, ready=False)], 0, 3).create == {"west-1": "decode", "west-2": "decode"}


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("west-0", 0),
        ("west-12", 12),
        ("west-01", None),
        ("west-", None),
        ("west-x", None),
        ("east-1", None),
        ("west", None),
    ],
)
def test_index_of_a_name(name: str, index: int | None) -> None:
    assert instance_index("west", name) == index


def test_two_children_of_one_name_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="one name"):
        step([child(0), child(0)], 0, 1)


children = st.builds(
    lambda roles: [
        dataclasses.replace(child(index), role=role, revision=revision, ready=ready, marked=marked)
        for index, role, revision, ready, marked in roles
    ],
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.sampled_from(["prefill", "decode", ""]),
            st.sampled_from(["p1", "d1", "old"]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=8,
        unique_by=lambda row: row[0],
    ),
)


def act(observed: list[Observed], result: Step) -> list[Observed]:
    """The pool after the step, with everything that was started ready again."""
    kept = {one.name: one for one in observed if one.name not in result.delete}
    for name, role in result.apply.items():
        index = instance_index("west", name)
        assert index is not None
        kept[name] = child(index, role, marked=kept[name].marked if name in kept else False)
    return list(kept.values())


@given(children, st.integers(0, 4), st.integers(0, 4), st.integers(1, 3))
def test_every_pool_settles_and_no_step_takes_more_than_allowed(
    observed: list[Observed], prefill: int, decode: int, max_unavailable: int
) -> None:
    for _ in range(30):
        result = step(observed, prefill, decode, max_unavailable)
        ready = {one.name for one in observed if one.ready}
        stay = [one for one in observed if one.name not in result.delete]
        disturbed = ready & {*result.convert, *result.roll}
        assert not disturbed or len(disturbed) + sum(not one.ready for one in stay) <= max_unavailable
        named = [*result.delete, *result.create, *result.convert, *result.roll, *result.keep, *result.held]
        assert len(named) == len(set(named))
        if result.settled:
            break
        observed = act(observed, result)
    assert result.settled
    roles = [one.role for one in observed]
    assert (roles.count("prefill"), roles.count("decode")) == (prefill, decode)


@given(children, st.integers(0, 4), st.integers(0, 4))
def test_as_few_children_as_possible_are_touched(observed: list[Observed], prefill: int, decode: int) -> None:
    result = step(observed, prefill, decode, 20)
    assert len(result.delete) == max(0, len(observed) - prefill - decode)
    assert len(result.create) == max(0, prefill + decode - len(observed))
    assert not (result.create and result.delete)


@given(children, st.integers(0, 4), st.integers(0, 4))
def test_the_order_of_the_list_does_not_matter(observed: list[Observed], prefill: int, decode: int) -> None:
    assert step(observed, prefill, decode) == step(observed[::-1], prefill, decode)
