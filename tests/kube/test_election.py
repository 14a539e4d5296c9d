"""The elector in virtual time, against a Lease store that refuses, loses answers and hangs."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.kube.election import ElectionTimes, Elector, LeadershipLost, observe
from prfaas.kube.errors import AlreadyExists, Conflict, NotFound, Unreachable
from prfaas.kube.resources import Object, Resource
from tests.kube.virtual_time import run_virtually

TIMES = ElectionTimes()


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Store:
    """The API server's side of one Lease: compare-and-swap on resourceVersion."""

    lease: Object | None = None
    version: int = 0

    def put(self, obj: Object) -> Object:
        self.version += 1
        self.lease = copy.deepcopy(obj)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)


@dataclass
class Line:
    """One process's way to the store. `fault(now)` names what happens to a request sent now; "" is nothing."""

    store: Store
    fault: Callable[[float], str] = lambda _: ""

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        await self._before()
        if self.store.lease is None:
            raise NotFound("no such lease")
        answer = copy.deepcopy(self.store.lease)
        await self._after()
        return answer

    async def create(self, obj: Object) -> Object:
        await self._before()
        if self.store.lease is not None:
            raise AlreadyExists("there is one")
        answer = self.store.put(obj)
        await self._after()
        return answer

    async def replace(self, obj: Object) -> Object:
        await self._before()
        if self.store.lease is None:
            raise NotFound("no such lease")
        if obj["metadata"].get("resourceVersion") != self.store.lease["metadata"]["resourceVersion"]:
            raise Conflict("changed meanwhile")
        answer = self.store.put(obj)
        await self._after()
        return answer

    async def _before(self) -> None:
        await asyncio.sleep(0.01)
        match self.fault(now()):
            case "refuse":
                raise Unreachable("connection refused")
            case "hang":
                await asyncio.Event().wait()
            case "bug":
                raise TypeError("the client's own mistake")

    async def _after(self) -> None:
        await asyncio.sleep(0.01)
        match self.fault(now()):
            case "lose answer":
                raise Unreachable("connection reset")
            case "hang after":
                await asyncio.Event().wait()


@dataclass
class Terms:
    """Who led from when to when."""

    spans: list[tuple[str, int, float, float]] = field(default_factory=list)

    def lead(self, who: str, seconds: float = float("inf"), linger: float = 0.0) -> Callable[[int], Any]:
        async def work(epoch: int) -> None:
            began = now()
            try:
                await asyncio.sleep(min(seconds, 1e6))
            finally:
                if linger:
                    await asyncio.sleep(linger)
                self.spans.append((who, epoch, began, now()))

        return work

    def overlaps(self) -> list[tuple[Any, Any]]:
        ordered = sorted(self.spans, key=lambda span: span[2])
        return [(a, b) for a, b in itertools.pairwise(ordered) if a[3] > b[2]]


def elector(line: Line, who: str) -> Elector:
    return Elector(line, namespace="ns", name="op", identity=who, times=TIMES, jitter=lambda: 0.5)


async def replica(line: Line, who: str, terms: Terms) -> None:
    """A process that is restarted whenever it ends, under a new identity, as kubelet does."""
    for start in range(10_000):
        try:
            await elector(line, f"{who}-{start}").run(terms.lead(who))
        except (LeadershipLost, TypeError):  # TypeError: a crash by the "bug" fault before it led
            await asyncio.sleep(1)


def between(start: float, end: float, what: str) -> Callable[[float], str]:
    return lambda moment: what if start <= moment < end else ""


def test_the_first_one_leads_at_once_with_epoch_one() -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        await elector(Line(store), "a").run(terms.lead("a", seconds=60))
        assert terms.spans[0][1] == 1
        assert terms.spans[0][2] < 1000 + 1

    run_virtually(main())


def test_a_server_that_is_away_is_said_once_and_again_after_it_was_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        store, terms = Store(), Terms()
        leader = asyncio.create_task(elector(Line(store), "a").run(terms.lead("a", seconds=100)))
        await asyncio.sleep(1)

        def away(moment: float) -> str:
            return "refuse" if 1010 <= moment < 1030 or 1050 <= moment < 1070 else ""

        await elector(Line(store, away), "b").run(terms.lead("b", seconds=1))
        await leader

    run_virtually(main())
    said = [record.getMessage() for record in caplog.records if "not acquired" in record.getMessage()]
    assert said == ["lease ns/op: not acquired: Unreachable: connection refused"] * 2


def test_a_graceful_end_gives_the_lease_up_and_the_next_epoch_follows_within_one_retry() -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        second = asyncio.create_task(elector(Line(store), "b").run(terms.lead("b", seconds=1)))
        await asyncio.sleep(30)
        await second
        second = asyncio.create_task(elector(Line(store), "c").run(terms.lead("c", seconds=40)))
        await asyncio.sleep(5)
        third = asyncio.create_task(elector(Line(store), "d").run(terms.lead("d", seconds=1)))
        await second
        ended = now()
        await third
        assert [span[:2] for span in terms.spans] == [("b", 1), ("c", 2), ("d", 3)]
        assert terms.spans[2][2] - ended < TIMES.retry_period * 1.2 + 0.1
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == ""

    run_virtually(main())


def test_cancelling_ends_the_work_before_the_lease_is_given_up() -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        running = asyncio.create_task(elector(Line(store), "a").run(terms.lead("a", linger=3)))
        await asyncio.sleep(5)
        running.cancel()
        await asyncio.sleep(2)
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == "a"  # the work still lingers
        with pytest.raises(asyncio.CancelledError):
            await running
        assert store.lease["spec"]["holderIdentity"] == ""

    run_virtually(main())


def test_the_lease_is_given_up_though_the_last_renewal_was_cut_off_after_it_was_stored() -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        line = Line(store, between(1010, 1013, "hang after"))
        running = asyncio.create_task(elector(line, "a").run(terms.lead("a")))
        await asyncio.sleep(13.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == ""

    run_virtually(main())


def test_a_killed_leader_is_followed_when_its_lease_has_run_out() -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        fault = between(1020, 1e9, "hang")
        first = asyncio.create_task(elector(Line(store, fault), "a").run(terms.lead("a")))
        await asyncio.sleep(5)
        follower = asyncio.create_task(elector(Line(store), "b").run(terms.lead("b", seconds=5)))
        await follower
        with pytest.raises(LeadershipLost):
            await first
        assert not terms.overlaps()
        begin = next(span[2] for span in terms.spans if span[0] == "b")
        assert begin <= 1020 + TIMES.lease_duration + 2 * TIMES.retry_period

    run_virtually(main())


@pytest.mark.parametrize("what", ["refuse", "hang", "bug", "lose answer", "hang after"])
def test_whatever_keeps_the_renewal_from_succeeding_ends_the_term_at_the_deadline(what: str) -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        candidate = elector(Line(store, between(1010, 1e9, what)), "a")
        with pytest.raises(LeadershipLost):
            await candidate.run(terms.lead("a"))
        (_, _, _, ended) = terms.spans[0]
        assert 1010 < ended <= 1010 + TIMES.renew_deadline + 0.1
        assert not candidate.leading

    run_virtually(main())


@pytest.mark.parametrize("what", ["refuse", "hang", "lose answer", "hang after"])
def test_a_fault_shorter_than_the_deadline_loses_nothing(what: str) -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        await elector(Line(store, between(1010, 1014, what)), "a").run(terms.lead("a", seconds=100))
        (_, epoch, began, ended) = terms.spans[0]
        assert (epoch, ended - began) == (1, 100)

    run_virtually(main())


def test_a_lease_taken_by_another_ends_the_term_at_the_next_renewal() -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        running = asyncio.create_task(elector(Line(store), "a").run(terms.lead("a")))
        await asyncio.sleep(5)
        assert store.lease is not None
        store.put({**store.lease, "spec": {**store.lease["spec"], "holderIdentity": "thief", "leaseTransitions": 2}})
        with pytest.raises(LeadershipLost):
            await running
        assert terms.spans[0][3] - 1005 < TIMES.retry_period + 0.1

    run_virtually(main())


def test_a_lease_deleted_by_hand_is_put_back_with_its_epoch() -> None:
    async def main() -> None:
        store, terms = Store(), Terms()
        running = asyncio.create_task(elector(Line(store), "a").run(terms.lead("a", seconds=40)))
        follower = asyncio.create_task(elector(Line(store), "b").run(terms.lead("b", seconds=1)))
        await asyncio.sleep(9)
        store.lease = None
        await running
        await follower
        assert [span[:2] for span in terms.spans] == [("a", 1), ("b", 2)]
        assert not terms.overlaps()

    run_virtually(main())


def test_what_the_work_raises_comes_out_and_the_lease_is_given_up() -> None:
    async def main() -> None:
        store = Store()

        async def broken(epoch: int) -> None:
            await asyncio.sleep(1)
            raise ValueError("a bug")

        with pytest.raises(ValueError, match="a bug"):
            await elector(Line(store), "a").run(broken)
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == ""

    run_virtually(main())


def test_the_write_gate_closes_for_a_process_that_was_frozen_through_its_term() -> None:
    async def main() -> None:
        clock = {"ahead": 0.0}
        candidate = Elector(
            Line(Store()), namespace="ns", name="op", identity="a", clock=lambda: now() + clock["ahead"]
        )
        with pytest.raises(LeadershipLost):
            candidate.require()

        async def work(epoch: int) -> None:
            candidate.require()
            clock["ahead"] = 11.0  # the process was stopped for eleven seconds; no task has run since
            candidate.require()

        with pytest.raises(LeadershipLost):
            await candidate.run(work)

    run_virtually(main())


def test_an_unchanged_lease_keeps_the_time_of_its_first_sight() -> None:
    lease = {"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": "x", "leaseDurationSeconds": 15}}
    first = observe(lease, 100.0, None)
    assert observe(lease, 109.0, first).since == 100.0
    changed = {**lease, "metadata": {"resourceVersion": "8"}}
    assert observe(changed, 109.0, first).since == 109.0
    assert first.free_at("me", 15.0) == 115.0
    assert first.free_at("me", 30.0) == 130.0
    assert first.free_at("x", 15.0) == 100.0


@pytest.mark.parametrize("times", [(15, 10, 10), (10, 10, 2), (15, 10, 0)])
def test_times_that_cannot_be_safe_are_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="0 < retry_period < renew_deadline < lease_duration"):
        ElectionTimes(*times)


def test_one_hanging_renewal_leaves_time_for_another() -> None:
    assert 2 * TIMES.request_timeout <= TIMES.renew_deadline


def test_a_lease_written_with_a_longer_duration_is_respected() -> None:
    lease = {"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": "x", "leaseDurationSeconds": 60}}
    assert observe(lease, 100.0, None).free_at("me", 15.0) == 160.0
    assert observe({"metadata": {"resourceVersion": "7"}}, 100.0, None).free_at("me", 15.0) == 100.0


_faults = st.lists(
    st.tuples(
        st.floats(0, 120), st.floats(0.1, 40), st.sampled_from(["refuse", "hang", "lose answer", "hang after", "bug"])
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_faults, min_size=2, max_size=3))
def test_two_never_lead_at_once_and_epochs_only_grow(schedules: list[list[tuple[float, float, str]]]) -> None:
    async def main() -> None:
        store, terms = Store(), Terms()

        def line(schedule: list[tuple[float, float, str]]) -> Line:
            def fault(moment: float) -> str:
                return next((w for start, for_, w in schedule if start <= moment - 1000 < start + for_), "")

            return Line(store, fault)

        tasks = [
            asyncio.create_task(replica(line(schedule), f"r{index}", terms)) for index, schedule in enumerate(schedules)
        ]
        await asyncio.sleep(200)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert terms.spans
        assert not terms.overlaps()
        epochs = [epoch for _, epoch, _, _ in sorted(terms.spans, key=lambda span: span[2])]
        assert epochs == sorted(set(epochs))

    run_virtually(main())
