"""The queues of a router, event by event: who starts next, and where."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.queueing import Blind, ByThreshold, Homed, Stealing, finish_times
from prfaas.routing.triage import Promises, Triage
from prfaas.routing.waiting import Job, Place, Private, Queue, Servers, Start, State

T = 1000.0


@dataclass
class World:
    """Two local and one remote instance, a shared line of 10 Gbit/s; time and what runs are set by hand."""

    local: Servers = field(default_factory=lambda: Servers(2))
    remote: Servers = field(default_factory=lambda: Servers(1))
    gbps: float = 10.0
    transfers: int = 0
    gbit: float = 0.0
    slots: int = 100

    def at(self, now: float) -> State:
        line = Private(self.gbps, self.transfers, self.gbit)
        return State(now, self.slots, [Place(self.local, Private(800.0)), Place(self.remote, line)])

    def busy(self, servers: Servers, *ends: float) -> None:
        """All instances are busy until these times."""
        servers.idle, servers.ends = 0, dict(enumerate(ends))


def job(key: int, tokens: float, arrived: float = 0.0, *, gbit: float = 1.0) -> Job:
    """2 s per 1,000 tokens locally, 1 s remotely."""
    return Job(key, arrived, tokens, (2 * tokens / 1000, tokens / 1000), (0.0, gbit))


def started(queue: Queue, state: State) -> list[tuple[int, int]]:
    """(request, place) of everything that starts now; instances are taken as it goes."""
    found = []
    while (start := queue.next(state)) is not None:
        servers = state.places[start.place].servers
        assert servers.idle > 0
        servers.idle -= 1
        servers.ends[1000 + start.job.key] = state.now + start.job.seconds[start.place]
        state.slots -= 1
        found.append((start.job.key, start.place))
    return found


QUEUES: dict[str, Callable[[], Queue]] = {
    "plain": lambda: Homed(ByThreshold([None, T])),
    "spill": lambda: Homed(ByThreshold([None, T]), 1.0),
    "steal": lambda: Stealing(ByThreshold([None, T])),
    "triage": lambda: Triage(T, Promises(first=6.0)),
}


@pytest.mark.parametrize("name", QUEUES)
class TestEveryQueue:
    def test_above_the_threshold_is_remote_and_at_it_local(self, name: str) -> None:
        world, queue = World(), QUEUES[name]()
        for each in (job(1, T), job(2, T + 1)):
            queue.add(each, world.at(0.0))
        assert sorted(started(queue, world.at(0.0))) == [(1, 0), (2, 1)]

    def test_nothing_starts_without_a_decode_slot(self, name: str) -> None:
        world, queue = World(slots=0), QUEUES[name]()
        queue.add(job(1, 500), world.at(0.0))
        assert queue.next(world.at(0.0)) is None
        world.slots = 1
        assert started(queue, world.at(0.1)) == [(1, 0)]

    def test_the_oldest_of_a_place_is_first(self, name: str) -> None:
        world, queue = World(), QUEUES[name]()
        world.busy(world.local, 5.0, 5.0)
        world.busy(world.remote, 50.0)
        for each in (job(1, 900, 0.0), job(2, 100, 0.1)):
            queue.add(each, world.at(0.1))
        assert queue.next(world.at(0.2)) is None
        world.local.idle, world.local.ends = 1, {1: 5.0}
        assert started(queue, world.at(0.2)) == [(1, 0)]

    def test_one_that_is_back_after_a_failure_has_its_turn(self, name: str) -> None:
        world, queue = World(), QUEUES[name]()
        world.busy(world.local, 5.0, 5.0)
        world.busy(world.remote, 50.0)
        queue.add(job(2, 500, 1.0), world.at(1.0))
        queue.add(job(1, 500, 0.5), world.at(1.1))
        world.local.idle, world.local.ends = 1, {1: 5.0}
        assert started(queue, world.at(1.2)) == [(1, 0)]

    def test_a_cut_line_is_not_used_and_one_that_comes_back_is(self, name: str) -> None:
        world, queue = World(gbps=0.0), QUEUES[name]()
        queue.add(job(1, 5000), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 0)]
        world.gbps = 10.0
        queue.add(job(2, 5000, 1.0), world.at(1.0))
        assert started(queue, world.at(1.0)) == [(2, 1)]

    def test_who_waits_for_a_line_that_is_cut_goes_elsewhere(self, name: str) -> None:
        world, queue = World(), QUEUES[name]()
        world.busy(world.local, 5.0, 5.0)
        world.busy(world.remote, 1.0)
        queue.add(job(1, 5000), world.at(0.0))
        world.gbps = 0.0
        world.local = Servers(1)
        assert started(queue, world.at(0.5)) == [(1, 0)]

    def test_without_local_instances_short_prompts_go_over_the_link(self, name: str) -> None:
        world, queue = World(local=Servers(0)), QUEUES[name]()
        queue.add(job(1, 10), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 1)]

    def test_one_that_may_not_leave_stays(self, name: str) -> None:
        world, queue = World(), QUEUES[name]()
        queue.add(Job(1, 0.0, 5000, (10.0, math.inf), (0.0, 1.0)), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 0)]

    def test_a_client_that_has_gone_is_forgotten(self, name: str) -> None:
        world, queue = World(), QUEUES[name]()
        world.busy(world.local, 5.0, 5.0)
        gone = job(1, 500)
        queue.add(gone, world.at(0.0))
        queue.remove(gone)
        assert len(queue) == 0
        with pytest.raises(ValueError, match=r"wait|list"):
            queue.remove(gone)

    def test_a_new_threshold_counts_for_who_comes_after_it(self, name: str) -> None:
        world, queue = World(), QUEUES[name]()
        assert queue.threshold_in_force == T
        queue.set_thresholds([None, 3000.0])
        assert queue.threshold_in_force == 3000.0
        queue.add(job(1, 2000), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 0)]
        queue.set_thresholds([None, None])
        assert math.isnan(queue.threshold_in_force)
        queue.add(job(2, 1e5), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(2, 0)]

    @given(data=st.data())
    def test_everybody_starts_exactly_once_however_it_goes(self, name: str, data: st.DataObject) -> None:
        world, queue = World(), QUEUES[name]()
        jobs = data.draw(st.lists(st.floats(1, 20_000), min_size=1, max_size=25))
        found: list[int] = []
        now = 0.0
        for key, tokens in enumerate(jobs):
            now += data.draw(st.floats(0, 3))
            for servers in (world.local, world.remote):
                for number in [n for n, end in servers.ends.items() if end <= now]:
                    del servers.ends[number]
                    servers.idle += 1
            world.slots = 100
            queue.add(job(key, tokens, now), world.at(now))
            found += [key for key, _ in started(queue, world.at(now))]
        while len(queue):
            before = len(found)
            now = min(end for servers in (world.local, world.remote) for end in servers.ends.values())
            for servers in (world.local, world.remote):
                for number in [n for n, end in servers.ends.items() if end <= now]:
                    del servers.ends[number]
                    servers.idle += 1
            world.slots = 100
            found += [key for key, _ in started(queue, world.at(now))]
            assert len(found) > before or world.local.ends or world.remote.ends
        assert sorted(found) == list(range(len(jobs)))


def test_of_several_links_the_highest_threshold_below_the_length_is_taken() -> None:
    places = [Place(Servers(1), Private(800.0)) for _ in range(3)]
    home = ByThreshold([None, 1000.0, 5000.0])
    for tokens, place in ((1000, 0), (1001, 1), (5000, 1), (5001, 2)):
        assert home(Job(1, 0.0, tokens, (1, 1, 1), (0, 0, 0)), State(0.0, 1, places)) == place
    assert home.threshold == 1000


def test_blind_gives_each_place_its_share() -> None:
    draws = iter([0.0, 0.69, 0.71, 0.99])
    home = Blind([0.7, 0.3], lambda: next(draws))
    state = World().at(0.0)
    assert [home(job(i, 10), state) for i in range(4)] == [0, 0, 1, 1]


class TestSpill:
    def test_it_stays_while_its_own_place_lets_it_wait_a_second_at_most(self) -> None:
        world, queue = World(), QUEUES["spill"]()
        world.busy(world.local, 1.0, 9.0)
        queue.add(job(1, 800), world.at(0.0))
        assert started(queue, world.at(0.0)) == []

    def test_it_goes_where_it_is_done_sooner(self) -> None:
        world, queue = World(), QUEUES["spill"]()
        world.busy(world.local, 1.1, 9.0)
        queue.add(job(1, 800), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 1)]

    def test_bytes_in_flight_count(self) -> None:
        world, queue = World(transfers=40), QUEUES["spill"]()
        world.busy(world.local, 1.1, 9.0)
        queue.add(job(1, 800, gbit=1.0), world.at(0.0))  # 0.8 s there, but 4.1 s on the line
        assert started(queue, world.at(0.0)) == []


class TestSteal:
    def test_an_idle_place_takes_what_it_is_comparatively_best_at(self) -> None:
        world, queue = World(), QUEUES["steal"]()
        world.busy(world.local, 9.0, 9.0)
        even, better = job(1, 500), Job(2, 0.1, 400, (2.0, 0.5), (0.0, 1.0))
        queue.add(even, world.at(0.1))
        queue.add(better, world.at(0.1))
        assert queue.next(world.at(0.1)) == Start(better, 1)

    def test_not_where_home_is_nearly_as_soon(self) -> None:
        world, queue = World(), QUEUES["steal"]()
        world.busy(world.local, 0.0, 9.0)
        queue.add(job(1, 900, gbit=0.0), world.at(-1.0))
        assert started(queue, world.at(-1.0)) == [(1, 1)]  # 0.9 s there, 1 + 1.8 s here
        world = World()
        queue.add(Job(2, 0.0, 900, (1.0, 0.95), (0.0, 0.0)), world.at(0.0))
        world.busy(world.local, 0.02, 9.0)
        assert started(queue, world.at(0.0)) == []  # 0.95 s is more than nine tenths of 1.02 s

    def test_its_own_come_first(self) -> None:
        world, queue = World(), QUEUES["steal"]()
        world.busy(world.local, 9.0, 9.0)
        queue.add(job(1, 500, 0.0), world.at(0.0))
        queue.add(job(2, 5000, 0.1), world.at(0.1))
        assert queue.next(world.at(0.1)) is not None
        assert len(queue) == 1


def test_finish_times_are_of_one_line_before_several_instances() -> None:
    world = World()
    world.busy(world.local, 3.0, 1.0)
    row = [job(1, 1000), job(2, 1000), job(3, 500)]
    assert finish_times(row, 0, world.at(0.0)) == pytest.approx([3.0, 5.0, 4.0])
    assert finish_times(row, 0, World(local=Servers(0)).at(0.0)) == [math.inf] * 3


def test_what_should_have_ended_is_expected_in_a_moment() -> None:
    servers = Servers(0, {1: 2.0, 2: 7.0})
    assert servers.left(5.0) == [0.05, 2.0]
