"""A run, request by request: small worlds in which every time can be told beforehand.

1 s of prefill and 1 Gbit of KV per 1,000 tokens, 2 Gbit of state, a line of 10 Gbit/s, 10 ms per output token.
"""

from __future__ import annotations

import pytest

from prfaas.planner.errors import PlanError
from prfaas.planner.setting import Setting, Split
from prfaas.planner.simulator.arrivals import Arrival, generate
from prfaas.planner.simulator.changes import (
    Change,
    Conversion,
    Failure,
    LineRate,
    NewThresholds,
    read_schedule,
)
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.routing.prefixes import PrefixCache, Semantics
from tests.planner import cases
from tests.planner.simulator.worlds import PAPER, PAPER_SETTING, of_paper, profile, setting, simulate, times, topology


def test_local_a_prefill_then_the_first_token_then_the_others() -> None:
    result = simulate([Arrival(0.0, 500, 100)])
    assert times(result) == pytest.approx([0.5], abs=1e-3)
    assert result.tpot.mean == pytest.approx(0.01)
    assert result.seconds == pytest.approx(1.5, abs=1e-3)
    assert (result.offload_share, result.requests, result.unfinished) == (0.0, 1, 0)


def test_remote_the_transfer_comes_after_the_prefill() -> None:
    result = simulate([Arrival(0.0, 2000, 100)])
    assert times(result) == pytest.approx([2.0 + 0.4])
    assert result.offload_share == 1.0


def test_a_prefill_instance_is_free_while_the_transfer_goes_on() -> None:
    result = simulate([Arrival(0.0, 2000, 0), Arrival(0.0, 2000, 0)])
    assert times(result) == pytest.approx([2.4, 4.4])
    assert result.waiting.longest == pytest.approx(2.0)


def test_transfers_share_the_line() -> None:
    result = simulate([Arrival(0.0, 2000, 0), Arrival(0.0, 2000, 0)], topology(remote=2))
    assert times(result) == pytest.approx([2.8, 2.8])


def test_one_flow_gets_no_more_than_its_limit() -> None:
    assert times(simulate([Arrival(0.0, 2000, 0)], topology(flow_gbps=4.0))) == pytest.approx([3.0])


def test_a_line_carries_what_was_measured_not_what_it_was_built_for() -> None:
    assert times(simulate([Arrival(0.0, 2000, 0)], topology(measured_gbps=5.0))) == pytest.approx([2.8])


def test_with_overlap_only_the_state_comes_after_the_prefill() -> None:
    assert times(simulate([Arrival(0.0, 2000, 0)], options={"overlap": True})) == pytest.approx([2.2])


def test_with_overlap_a_line_slower_than_the_prefill_is_what_counts() -> None:
    """2 Gbit of rows at 0.5 Gbit/s take 4 s of which 2 s pass during the prefill; state and rows share the line."""
    result = simulate([Arrival(0.0, 2000, 0)], topology(gbps=0.5), options={"overlap": True})
    assert times(result) == pytest.approx([2.0 + (1.0 + 2.0) / 0.5])


def test_a_slot_is_held_from_before_the_prefill_to_the_last_token() -> None:
    """Four slots: the fifth request waits for the first one's 2 s of decode, though a prefill instance is idle."""
    result = simulate([Arrival(0.0, 100, 200) for _ in range(5)], topology(local=6), setting(5, 1))
    assert sorted(times(result)) == pytest.approx([0.1] * 4 + [2.2], abs=1e-3)


def test_a_slot_can_be_taken_after_the_prefill() -> None:
    """The fifth request is prefilled at once, and waits 2 s of decode for its first token all the same."""
    arrivals = [Arrival(0.0, 100, 200) for _ in range(4)] + [Arrival(0.0, 150, 200)]
    result = simulate(arrivals, topology(local=6), setting(5, 1), options={"slots": "after"})
    assert sorted(times(result)) == pytest.approx([0.1] * 4 + [2.1], abs=1e-3)
    assert result.waiting.longest == 0


def test_steps_that_slow_down_with_the_batch() -> None:
    """One alone takes 10 ms a token, four 40 ms: 4 x 100 tokens that start together take 4 s."""
    slow = profile(steps=[{"batch": 1, "seconds": 0.01}, {"batch": 4, "seconds": 0.04}])
    on, at = topology(local=5, of=slow), setting(4, 1)
    assert simulate([Arrival(0.0, 100, 100)], on, at).tpot.mean == pytest.approx(0.01)
    assert simulate([Arrival(0.0, 100, 100) for _ in range(4)], on, at).tpot.mean == pytest.approx(0.04)


def test_steps_that_slow_down_with_the_context() -> None:
    far = profile(secondsPerContextToken=1e-5)
    result = simulate([Arrival(0.0, 950, 100)], topology(of=far))
    assert result.tpot.mean == pytest.approx(0.01 + 1000 * 1e-5)


def test_a_cached_prefix_saves_its_prefill_and_its_rows() -> None:
    assert times(simulate([Arrival(0.0, 4000, 0, cached=1500.0)])) == pytest.approx([2.501 + 0.45], abs=1e-6)


class TestPrefixCaches:
    BLOCKS = tuple(range(30))

    def run(self, arrivals: list[Arrival], semantics: Semantics = "full") -> list[float]:
        result = simulate(arrivals, cache_of=lambda pool: PrefixCache(semantics, 100))
        return times(result)

    def test_what_was_prefilled_here_need_not_be_again(self) -> None:
        found = self.run([Arrival(0.0, 800, 0, blocks=self.BLOCKS[:8]), Arrival(5.0, 900, 0, blocks=self.BLOCKS[:9])])
        assert found == pytest.approx([0.8, 0.101], abs=1e-3)

    def test_the_threshold_looks_at_what_is_uncached_here(self) -> None:
        """1,500 tokens are long, but with 800 in the cache short."""
        found = self.run([Arrival(0.0, 800, 0, blocks=self.BLOCKS[:8]), Arrival(5.0, 1500, 0, blocks=self.BLOCKS[:15])])
        assert found == pytest.approx([0.8, 0.701], abs=1e-3)

    def test_rows_that_are_here_do_not_cross_the_line_again(self) -> None:
        """The second remote request computes 1,000 tokens there and sends 1,000 tokens of rows, not 3,000."""
        found = self.run(
            [Arrival(0.0, 2000, 0, blocks=self.BLOCKS[:20]), Arrival(5.0, 3000, 0, blocks=self.BLOCKS)], "hybrid"
        )
        assert found == pytest.approx([2.4, 1.001 + 0.3], abs=1e-3)

    def test_a_hybrid_model_has_no_state_here_of_what_came_over_the_link(self) -> None:
        """The second is a turn of the same conversation: 200 new tokens, yet long here, for want of a state."""
        turns = [Arrival(0.0, 2000, 0, blocks=self.BLOCKS[:20]), Arrival(5.0, 2200, 0, blocks=self.BLOCKS[:22])]
        assert self.run(turns, "hybrid") == pytest.approx([2.4, 0.201 + 0.22], abs=1e-3)
        assert self.run(turns, "full") == pytest.approx([0.201, 2.4], abs=1e-3), "local, so listed first"


class TestChanges:
    def run(self, arrivals: list[Arrival], *changes: Change) -> list[float]:
        return times(simulate(arrivals, changes=changes))

    def test_a_cut_line_holds_its_transfers_and_new_requests_avoid_it(self) -> None:
        cut = LineRate(2.2, "link:wire", 0.0), LineRate(10.0, "link:wire", 10.0)
        found = self.run([Arrival(0.0, 2000, 0), Arrival(3.0, 2000, 0)], *cut)
        assert found == pytest.approx([2.0, 10.2], abs=1e-3)

    def test_a_line_that_never_comes_back_leaves_its_requests_unfinished(self) -> None:
        result = simulate([Arrival(0.0, 2000, 0)], changes=[LineRate(1.0, "link:wire", 0.0)])
        assert (result.requests, result.unfinished) == (0, 1)

    def test_a_prefill_that_is_lost_is_made_again(self) -> None:
        lost = Failure(1.0, "prfaas/far", 4.0)
        assert self.run([Arrival(0.0, 2000, 0)], lost) == pytest.approx([2.0 + 1.0], abs=1e-3), (
            "there is none there now"
        )

    def test_an_instance_that_works_for_nobody_any_more_can_fail_as_well(self) -> None:
        """The decode instance fails, then the prefill instance that still computes the first attempt."""
        changes = Failure(0.2, "decode/near", 0.1), Failure(0.4, "prefill/near", 5.0)
        result = simulate([Arrival(0.0, 900, 10)], topology(local=3), setting(2, 1), changes=changes)
        assert times(result) == pytest.approx([0.3 + 0.9], abs=1e-3)
        assert (result.requests, result.failed, result.unfinished) == (1, 0, 0)

    def test_one_that_waits_for_the_only_place_waits_until_it_is_back(self) -> None:
        lost = Failure(0.2, "prefill/near", 3.0)
        result = simulate([Arrival(0.0, 500, 0)], topology(remote=0), setting(threshold=None), changes=[lost])
        assert times(result) == pytest.approx([3.2 + 0.5], abs=1e-3)

    def test_who_had_tokens_already_has_failed_and_who_had_none_starts_anew(self) -> None:
        on = topology(local=4)
        arrivals = [Arrival(0.0, 100, 500), Arrival(0.0, 900, 100)]
        result = simulate(arrivals, on, setting(2, 1), changes=[Failure(0.5, "decode/near", 1.0)])
        assert (result.failed, result.unfinished) == (1, 0)
        assert max(times(result)) == pytest.approx(1.5 + 0.9, abs=1e-3)

    def test_a_prefill_instance_becomes_one_that_decodes_after_what_it_does_and_its_start(self) -> None:
        """Eight requests of 8 s of decode: without the conversion at 0.05 s the last four would wait 8 s."""
        on = topology(local=6)
        arrivals = [Arrival(0.0, 100, 800) for _ in range(8)]
        result = simulate(arrivals, on, setting(5, 1), changes=[Conversion(0.05, "near", "decode")])
        assert sorted(times(result))[4:] == pytest.approx([5.0 + 0.1 + 0.05] * 4, abs=1e-3)
        assert result.utilisation["prefill/near"] < 1

    def test_a_decode_instance_becomes_one_that_prefills_once_it_is_empty(self) -> None:
        on = topology(local=3)
        at = setting(1, 2)
        arrivals = [Arrival(0.0, 100, 100), *(Arrival(7.0, 500, 10) for _ in range(2))]
        result = simulate(arrivals, on, at, changes=[Conversion(0.5, "near", "prefill")])
        assert times(result) == pytest.approx([0.1, 0.5, 0.5], abs=1e-3)

    def test_new_thresholds_count_from_then_on(self) -> None:
        found = self.run(
            [Arrival(0.0, 2000, 0), Arrival(10.0, 2000, 0), Arrival(20.0, 9000, 0)],
            NewThresholds(5.0, {"wire": 3000}),
            NewThresholds(15.0, {}),
        )
        assert found == pytest.approx([2.0, 9.0, 2.4], abs=1e-3)

    @pytest.mark.parametrize(
        "change",
        [
            LineRate(0.0, "link:none", 1.0),
            Failure(0.0, "prefill/none", 1.0),
            Failure(0.0, "decode/none", 1.0),
            Conversion(0.0, "none", "decode"),
        ],
    )
    def test_what_is_not_there_cannot_change(self, change: Change) -> None:
        with pytest.raises(PlanError, match=r"changes\[0\]\.(line|resource|pd): there (is|are) no"):
            simulate([], changes=[change])


class TestSchedule:
    def test_of_one_link(self) -> None:
        lines = ["seconds,gbps", "# at noon", "", "0, 100", "60,0"]
        assert read_schedule(lines, "s", topology()) == [LineRate(0, "link:wire", 100), LineRate(60, "link:wire", 0)]

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ([], "s: has no rates"),
            (["seconds,gbps", "1"], "s:2: has 1 values"),
            (["1,fast"], "s:1: gbps: must be a number, at least 0; got 'fast'"),
            (["-1,5"], "s:1: seconds"),
            (["0,1", "1,inf"], "s:2: gbps"),
            (["1,2,other"], "s:1: link: there is no link 'other'"),
        ],
    )
    def test_what_cannot_be_read(self, lines: list[str], said: str) -> None:
        with pytest.raises(PlanError) as error:
            read_schedule(lines, "s", topology())
        assert str(error.value).startswith(said)


def test_residency_keeps_a_share_at_home() -> None:
    arrivals = [Arrival(10.0 * i, 2000, 0) for i in range(400)]
    share = simulate(arrivals, topology(allowance=0.3)).offload_share
    assert share == pytest.approx(0.3, abs=0.07)


def test_two_pools_share_one_that_prefills_for_both_and_its_line() -> None:
    one = profile()
    both = Topology(
        (PrfaaSPool("far", one, 2),),
        (PDPool("a", one, 2, rdma_gbps=1e6), PDPool("b", one, 2, rdma_gbps=1e6)),
        (Link("to-a", "far", "a", 10.0, line="wire"), Link("to-b", "far", "b", 10.0, line="wire")),
    )
    at = Setting({"a": Split(1, 1), "b": Split(1, 1)}, {"to-a": 1000, "to-b": 1000}, {"a": 0.5, "b": 0.5})
    arrivals = [Arrival(i / 100, 2000, 0) for i in range(20)]
    result = simulate(arrivals, both, at)
    assert (result.requests, result.unfinished) == (20, 0)
    assert result.seconds == pytest.approx(20 * 2.0 / 2 + 0.8, abs=0.3), "both instances were busy all the time"
    assert set(result.utilisation) == {"prfaas/far", "prefill/a", "prefill/b", "decode/a", "decode/b", "line/wire"}


def test_requests_before_the_warm_up_are_not_counted() -> None:
    result = simulate([Arrival(float(i), 100, 1) for i in range(10)], options={"warmup": 4.5})
    assert (result.requests, result.window) == (5, (4.5, 9.0))


def test_the_same_seed_gives_the_same_run_to_the_last_bit() -> None:
    runs = [
        simulate(
            generate(cases.workload(), 2.9, seed=7, count=400), PAPER, PAPER_SETTING, of_paper("triage"), seed=7
        ).to_json()
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_nothing_to_do_is_no_error() -> None:
    result = simulate([])
    assert (result.requests, result.seconds) == (0, 0.0)
    assert result.to_json()["ttft"]["mean"] is None


def test_it_can_be_stopped_and_asked() -> None:
    from prfaas.planner.simulator.engine import Simulation
    from tests.planner.simulator.worlds import plain

    run = Simulation(topology(), setting(), (Arrival(i * 10.0, 100, 1) for i in range(5000)), plain)

    def stop(requests: int, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(stop)
    assert 400 < run.result().requests < 600
    assert run.run().requests == 5000


def test_samples_over_time_are_few_and_say_how_it_went() -> None:
    result = simulate([Arrival(float(i), 2000, 0) for i in range(3000)], topology(remote=3))
    assert 200 < len(result.series) < 512
    assert all(each.threshold == 1000 for each in result.series)
    middle = [each.egress_gbps for each in result.series[20:-20]]
    assert sum(middle) / len(middle) == pytest.approx(4.0, rel=0.02)
