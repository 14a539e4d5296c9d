"""The work queue: nothing lost, nothing doubled, no key worked on twice at once, failures spaced out."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.operator.queue import Schedule, WorkQueue


def schedule() -> Schedule[str]:
    return Schedule(base=1.0, cap=8.0)


def test_a_key_added_many_times_is_taken_once() -> None:
    keys = schedule()
    for moment in (1.0, 2.0, 3.0):
        keys.add("a", moment)
    assert keys.take(3.0) == "a"
    assert keys.take(3.0) is None


def test_the_earliest_wish_counts() -> None:
    keys = schedule()
    keys.add("a", 10.0)
    keys.add("a", 2.0)
    keys.add("a", 20.0)
    assert keys.take(1.9) is None
    assert keys.next_at() == 2.0
    assert keys.take(2.0) == "a"


def test_an_event_during_the_work_leads_to_more_work_afterwards() -> None:
    keys = schedule()
    keys.add("a", 0.0)
    assert keys.take(0.0) == "a"
    keys.add("a", 1.0)
    assert keys.take(1.0) is None, "the key is held"
    keys.done("a")
    assert keys.take(1.0) == "a"
    keys.done("a")
    assert keys.take(99.0) is None
    assert len(keys) == 0


def test_the_one_that_waits_longest_is_taken_first() -> None:
    keys = schedule()
    keys.add("late", 2.0)
    keys.add("early", 1.0)
    assert [keys.take(3.0), keys.take(3.0)] == ["early", "late"]


def test_failures_double_the_wait_up_to_the_cap_and_events_do_not_shorten_it() -> None:
    keys = schedule()
    now, waits = 0.0, []
    keys.add("a", now)
    for _ in range(5):
        assert keys.take(now) == "a"
        waits.append(keys.failed("a", now))
        keys.add("a", now)
        assert keys.take(now) is None
        now += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_success_forgets_the_failures() -> None:
    keys = schedule()
    keys.add("a", 0.0)
    keys.take(0.0)
    keys.failed("a", 0.0)
    assert keys.take(1.0) == "a"
    keys.done("a")
    keys.add("a", 1.0)
    assert keys.take(1.0) == "a"
    assert keys.failed("a", 1.0) == 1.0


def test_the_servers_own_wait_is_kept() -> None:
    keys = schedule()
    keys.add("a", 0.0)
    keys.take(0.0)
    assert keys.failed("a", 0.0, at_least=30.0) == 30.0
    assert keys.take(29.9) is None


def test_giving_back_a_key_that_was_not_taken_is_a_mistake() -> None:
    keys = schedule()
    keys.add("a", 0.0)
    with pytest.raises(ValueError, match="not being worked on"):
        keys.done("a")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "done", "failed"])), max_size=60))
def test_every_event_is_followed_by_a_take_that_starts_after_it(moves: list[tuple[str, str]]) -> None:
    keys = schedule()
    now = 0.0
    held: set[str] = set()
    pending: set[str] = set()
    for key, move in moves:
        now += 1.0
        if move == "add":
            keys.add(key, now)
            pending.add(key)
        elif move == "take":
            taken = keys.take(now)
            if taken is not None:
                assert taken not in held, "two workers hold one key"
                held.add(taken)
                pending.discard(taken)
        elif key in held:
            held.discard(key)
            if move == "done":
                keys.done(key)
            else:
                keys.failed(key, now)
                pending.add(key)
    for key in held:
        keys.done(key)
    seen = set()
    while (taken := keys.take(now + 100.0)) is not None:
        seen.add(taken)
    assert seen == pending


async def test_take_waits_for_an_event_and_is_woken_by_it() -> None:
    queue: WorkQueue[str] = WorkQueue(settle=0.0)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.add("a")
    assert await asyncio.wait_for(taking, 5) == "a"


async def test_a_delayed_key_does_not_hold_up_one_that_is_due() -> None:
    queue: WorkQueue[str] = WorkQueue(settle=0.0)
    queue.add_after("later", 3600.0)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("now")
    assert await asyncio.wait_for(taking, 5) == "now"
    assert queue.depth() == 0


async def test_a_key_comes_back_after_its_delay() -> None:
    queue: WorkQueue[str] = WorkQueue(settle=0.0, base=0.001)
    queue.add("a")
    assert await asyncio.wait_for(queue.take(), 5) == "a"
    queue.failed("a")
    assert await asyncio.wait_for(queue.take(), 5) == "a"
