"""The router's book: slots, skips and memory between attempts."""

from __future__ import annotations

import pytest

from prfaas.router.ledger import Ledger, Past


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(now=clock)


def test_a_decode_slot_is_held_until_the_stream_ends(ledger: Ledger) -> None:
    entry = ledger.begin(("a", 1), "/v1/completions")
    ledger.hold(entry, "d:1")
    ledger.hold(ledger.begin(("b", 1), "/v1/completions"), "d:1")
    assert ledger.load().in_flight["d:1"] == 2
    assert ledger.end(("a", 1)) is entry
    assert ledger.load().in_flight["d:1"] == 1
    assert ledger.end(("a", 1)) is None
    assert ledger.load().in_flight["d:1"] == 1


def test_an_entry_holds_one_slot(ledger: Ledger) -> None:
    entry = ledger.begin(("a", 1), "/")
    ledger.hold(entry, "d:1")
    ledger.hold(entry, "d:2")
    assert dict(ledger.in_flight) == {"d:2": 1}


def test_a_stream_that_ended_during_its_decision_takes_no_slot(ledger: Ledger) -> None:
    entry = ledger.begin(("a", 1), "/")
    ledger.end(("a", 1))
    ledger.hold(entry, "d:1")
    assert not ledger.in_flight


def test_attempts_are_told_apart(ledger: Ledger) -> None:
    ledger.hold(ledger.begin(("a", 1), "/"), "d:1")
    ledger.hold(ledger.begin(("a", 2), "/"), "d:2")
    ledger.end(("a", 1))
    assert dict(ledger.in_flight) == {"d:2": 1}


def test_what_a_killed_envoy_held_is_given_back(ledger: Ledger, clock: Clock) -> None:
    ledger.hold(ledger.begin(("old", 1), "/"), "d:1")
    clock.time += 1
    ledger.hold(ledger.begin(("new", 1), "/"), "d:2")
    ledger.forget_before(clock.time - 0.5)
    assert dict(ledger.in_flight) == {"d:2": 1}
    assert set(ledger.entries) == {("new", 1)}


def test_a_prefill_leg_counts_only_while_it_runs(ledger: Ledger) -> None:
    with ledger.leg("p:1"):
        assert ledger.in_flight["p:1"] == 1
    with pytest.raises(RuntimeError), ledger.leg("p:1"):
        raise RuntimeError
    assert not ledger.in_flight


def test_who_refuses_is_left_alone_for_longer_each_time(ledger: Ledger, clock: Clock) -> None:
    lengths = []
    for _ in range(6):
        ledger.refused(["p:1"])
        ledger.refused(["p:1"])  # the second of two requests that failed together adds nothing
        began = clock.time
        while "p:1" in ledger.load().skipped:
            clock.time += 0.25
        lengths.append(clock.time - began)
    assert lengths == [1, 2, 4, 8, 15, 15]


def test_an_answer_ends_the_skip(ledger: Ledger, clock: Clock) -> None:
    ledger.refused(["p:1"])
    ledger.answered("p:1")
    assert not ledger.load().skipped
    ledger.refused(["p:1"])
    clock.time += 1
    assert not ledger.load().skipped


def test_skips_of_unlisted_endpoints_are_forgotten(ledger: Ledger) -> None:
    ledger.refused(["p:1", "p:2"])
    ledger.retain(["p:2"])
    assert ledger.load().skipped == {"p:2"}


def test_the_past_is_kept_for_the_newest_requests() -> None:
    ledger = Ledger(now=lambda: 0.0, remembered=2)
    for name in ("a", "b", "c"):
        ledger.remember(name, Past(prefill=name))
    assert [ledger.past(name).prefill for name in ("a", "b", "c")] == [None, "b", "c"]
