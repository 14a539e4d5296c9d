"""Two-promise triage, step by step."""

from __future__ import annotations

import pytest

from prfaas.routing.triage import Promises, Triage
from prfaas.routing.waiting import Job, Servers
from tests.routing.test_queueing import T, World, job, started

FIXED = Promises(first=6.0, ratio=3.0, gain=0.0)


def triage(promises: Promises = FIXED) -> Triage:
    return Triage(T, promises)


class TestCut:
    def test_an_empty_system_cuts_at_the_threshold(self) -> None:
        world, queue = World(), triage()
        queue.add(job(1, 1200), world.at(0.0))
        queue.next(world.at(0.0))
        assert queue.cut == T

    def test_it_stays_while_both_have_about_as_much_to_do(self) -> None:
        world, queue = World(), triage()
        world.busy(world.remote, 1.4)
        queue.add(job(1, 100), world.at(0.0))
        queue.next(world.at(0.0))
        assert queue.cut == T

    def test_with_too_much_to_do_there_more_stays_here(self) -> None:
        world, queue = World(), triage()
        world.busy(world.remote, 4.0)
        queue.add(job(1, 1500), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 0)]
        assert T < queue.cut <= T / 0.6 + 1e-6

    def test_with_too_much_to_do_here_more_leaves(self) -> None:
        world, queue = World(), triage()
        world.busy(world.local, 4.0, 4.0)
        queue.add(job(1, 700), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 1)]
        assert 0.6 * T - 1e-6 <= queue.cut < T

    def test_the_line_counts_as_work_there(self) -> None:
        world, queue = World(gbit=50.0, transfers=1), triage()
        queue.add(job(1, 1500), world.at(0.0))
        assert started(queue, world.at(0.0)) == [(1, 0)]

    def test_never_beyond_its_bounds(self) -> None:
        world, queue = World(), triage()
        world.busy(world.remote, 1e4)
        queue.add(job(1, 1700), world.at(0.0))
        queue.next(world.at(0.0))
        assert queue.cut == pytest.approx(T / 0.6, rel=0.01)


class TestPromises:
    def test_the_longest_gives_way_when_not_all_can_be_kept(self) -> None:
        """One local instance; 4 s, 3 s and 1 s of work for promises of 6 s: without the longest, two are kept."""
        world, queue = World(local=Servers(0, {1: 0.5}), remote=Servers(0)), triage()
        long, middle, short = (Job(i, 0.0, w, (w, w), (0.0, 0.0)) for i, w in ((1, 4.0), (2, 3.0), (3, 1.0)))
        for each in (long, middle, short):
            queue.add(each, world.at(0.0))
        world.local = Servers(1)
        assert started(queue, world.at(0.5)) == [(2, 0)]
        assert [each.deferred for each in (long, middle, short)] == [True, False, False]
        assert queue.deferred == 1

    def test_one_that_is_on_time_is_dropped_only_for_being_the_longest(self) -> None:
        world, queue = World(local=Servers(0, {1: 0.0}), remote=Servers(0)), triage()
        short, long = Job(1, 0.0, 2.0, (2.0, 9.0), (0.0, 0.0)), Job(2, 0.1, 5.0, (5.0, 9.0), (0.0, 0.0))
        queue.add(short, world.at(0.0))
        queue.add(long, world.at(0.1))
        world.local = Servers(1)
        assert started(queue, world.at(0.1)) == [(1, 0)]
        assert long.deferred
        assert not short.deferred

    def test_a_deferred_one_runs_when_nobody_with_a_live_promise_waits(self) -> None:
        world, queue = World(remote=Servers(0)), triage()
        queue.add(Job(1, 0.0, 7.0, (7.0, 9.0), (0.0, 0.0)), world.at(0.0))  # 7 s for a promise of 6 s
        assert started(queue, world.at(0.0)) == [(1, 0)]

    def test_once_its_second_promise_is_at_stake_it_goes_first(self) -> None:
        def first_of_two(now: float) -> int:
            world, queue = World(local=Servers(1), remote=Servers(0)), triage()
            queue.add(Job(1, 0.0, 7.0, (7.0, 9.0), (0.0, 0.0)), world.at(0.0))
            queue.add(Job(2, now - 0.1, 1.0, (1.0, 9.0), (0.0, 0.0)), world.at(now))
            start = queue.next(world.at(now))
            assert start is not None
            return start.job.key

        assert first_of_two(10.9) == 2
        assert first_of_two(11.1) == 1  # 11.1 + 7 s is above 18 s

    def test_it_crosses_where_nobody_becomes_late_by_it(self) -> None:
        """Local would be late; remote has room and is as fast."""
        world, queue = World(), triage()
        world.busy(world.local, 5.5, 5.5)
        world.busy(world.remote, 3.9)  # within the dead band of the cut
        crossing = Job(1, 0.0, 900.0, (1.8, 0.9), (0.0, 0.0))
        queue.add(crossing, world.at(0.0))
        world.local.ends = {1: 5.5, 2: 5.5}
        world.remote = Servers(1)
        assert started(queue, world.at(0.0)) == [(1, 1)]
        assert not crossing.deferred


class TestTuning:
    def test_a_miss_raises_the_promise_and_a_hit_lowers_it_a_hundredth_of_that(self) -> None:
        queue = triage(Promises.self_tuned(6.0 / 1.7))
        assert queue.first == pytest.approx(6.0)
        queue.first_token(7.0)
        assert queue.first == pytest.approx(6.0 + 0.2 * 0.99)
        queue.first_token(1.0)
        assert queue.first == pytest.approx(6.0 + 0.2 * 0.98)
        assert queue.second == pytest.approx(3 * queue.first)

    def test_it_stays_within_its_bounds(self) -> None:
        queue = triage(Promises.self_tuned(6.0 / 1.7))
        queue.first_token(1.0)
        assert queue.first == pytest.approx(6.0)
        for _ in range(1000):
            queue.first_token(1e6)
        assert queue.first == pytest.approx(30.0)

    def test_a_fixed_promise_stays(self) -> None:
        queue = triage()
        queue.first_token(100.0)
        assert queue.first == 6.0

    def test_p90_first_allows_more_to_be_late(self) -> None:
        promises = Promises.p90_first(3.5)
        assert (promises.late_share, promises.ratio) == (0.06, 2.5)


def test_it_knows_one_link_only() -> None:
    world, queue = World(), triage()
    state = world.at(0.0)
    state.places = [*state.places, state.places[1]]
    with pytest.raises(ValueError, match="2 links"):
        queue.add(job(1, 10), state)
