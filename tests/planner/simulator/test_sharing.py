"""A line that is shared, and a batch: who is done when."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.planner.simulator.loop import Loop
from prfaas.planner.simulator.sharing import Batch, Lane, Line


class Wires:
    """A line with lanes of some caps; what is done is written down with the time."""

    def __init__(self, gbps: float, *caps: float) -> None:
        self.loop = Loop()
        self.lanes: list[Lane[str]] = [Lane(cap) for cap in caps or (math.inf,)]
        self.done: dict[str, float] = {}
        self.line: Line[str] = Line(self.loop, gbps, self.lanes, lambda item: self.done.update({item: self.loop.now}))

    def send(self, at: float, gbit: float, name: str, lane: int = 0) -> None:
        self.loop.at(at, lambda: self.line.join(self.lanes[lane], gbit, name))

    def run(self) -> dict[str, float]:
        while self.loop.step():
            pass
        return self.done


def test_one_transfer_gets_the_line() -> None:
    wires = Wires(10.0)
    wires.send(1.0, 5.0, "a")
    assert wires.run() == {"a": pytest.approx(1.5)}


def test_two_share_it_and_the_rest_is_faster_when_one_is_done() -> None:
    wires = Wires(10.0)
    wires.send(0.0, 10.0, "a")
    wires.send(0.0, 5.0, "b")
    assert wires.run() == {"b": pytest.approx(1.0), "a": pytest.approx(1.5)}


def test_a_capped_transfer_leaves_the_rest_to_the_others() -> None:
    wires = Wires(10.0, 2.0, math.inf)
    wires.send(0.0, 2.0, "capped", 0)
    wires.send(0.0, 8.0, "free", 1)
    assert wires.run() == {"capped": pytest.approx(1.0), "free": pytest.approx(1.0)}


def test_the_rate_changes_and_a_cut_line_keeps_its_transfers() -> None:
    wires = Wires(10.0)
    wires.send(0.0, 10.0, "a")
    wires.loop.at(0.5, wires.line.set_rate, 0.0)
    wires.loop.at(2.0, wires.line.set_rate, 5.0)
    assert wires.run() == {"a": pytest.approx(3.0)}


def test_one_that_leaves_makes_room() -> None:
    wires = Wires(10.0)
    wires.send(0.0, 10.0, "a")
    number = []
    wires.loop.at(0.0, lambda: number.append(wires.line.join(wires.lanes[0], 10.0, "b")))
    wires.loop.at(1.0, lambda: wires.line.leave(wires.lanes[0], number[0]))
    assert wires.run() == {"a": pytest.approx(1.5)}
    assert wires.line.served == pytest.approx(15.0)


def test_what_is_still_to_be_moved() -> None:
    wires = Wires(10.0)
    wires.send(0.0, 10.0, "a")
    wires.send(0.0, 10.0, "b")
    seen: list[float] = []
    wires.loop.at(0.5, lambda: seen.extend((wires.line.gbit, wires.line.transfers)))
    wires.run()
    assert seen == pytest.approx([15.0, 2])
    assert wires.line.gbit == 0.0


TRANSFERS = st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 40), st.integers(0, 2)), min_size=1, max_size=20)


@given(TRANSFERS)
def test_everything_arrives_no_sooner_than_alone_and_no_byte_is_lost(transfers: list[tuple[float, float, int]]) -> None:
    caps = (1.0, 4.0, math.inf)
    wires = Wires(10.0, *caps)
    for index, (at, gbit, lane) in enumerate(transfers):
        wires.send(at, gbit, str(index), lane)
    done = wires.run()
    total = sum(gbit for _, gbit, _ in transfers)
    assert wires.line.served == pytest.approx(total, rel=1e-6, abs=1e-5)
    for index, (at, gbit, lane) in enumerate(transfers):
        assert done[str(index)] >= at + gbit / min(10.0, caps[lane]) - 1e-6
    busy = max(at for at, _, _ in transfers) + total / 1.0  # the slowest lane alone would take that long
    assert max(done.values()) <= busy + 1e-3


def test_a_batch_slows_down_as_it_grows() -> None:
    """One alone gets 10 tokens/s, two get 5 tokens/s each."""
    loop, done = Loop(), {}
    batch: Batch[str] = Batch(loop, lambda n, _: 10.0 / n, lambda _: 0.0, lambda item: done.update({item: loop.now}))
    loop.at(0.0, lambda: batch.join(batch.lanes[0], 20, "a"))
    loop.at(1.0, lambda: batch.join(batch.lanes[0], 20, "b"))
    while loop.step():
        pass
    assert done == {"a": pytest.approx(3.0), "b": pytest.approx(4.0)}


def test_a_batch_knows_the_mean_context_of_those_in_it() -> None:
    loop, seen = Loop(), []
    contexts = {"a": 100.0, "b": 300.0}

    def speed(count: int, context: float) -> float:
        seen.append((count, context))
        return 1.0

    batch: Batch[str] = Batch(loop, speed, lambda item: contexts[item], lambda _: None)
    loop.at(0.0, lambda: batch.join(batch.lanes[0], 1, "a"))
    loop.at(0.5, lambda: batch.join(batch.lanes[0], 5, "b"))
    while loop.step():
        pass
    assert seen == [(1, 100.0), (2, 200.0), (1, 300.0)]
