"""The simulator against what is known exactly, and against the planner's own formulas."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable

import pytest

from prfaas.api.profile import Profile
from prfaas.planner.latency import zero_load
from prfaas.planner.setting import Setting, Split
from prfaas.planner.simulator.arrivals import Arrival, generate
from prfaas.planner.throughput import Model
from prfaas.planner.topology import PDPool, Topology
from prfaas.planner.workload import Workload
from tests.planner import cases
from tests.planner.simulator.worlds import (
    PAPER,
    PAPER_SETTING,
    T,
    of_paper,
    profile,
    setting,
    simulate,
    times,
    topology,
)

pytestmark = pytest.mark.slow

HOMOGENEOUS = Topology((), (PDPool("h20", cases.H20, 12),))
ONE = topology(remote=0, local=2, of=profile(maxBatch=65_536))


def single_server_wait(arrivals: list[Arrival], seconds: Iterable[float]) -> float:
    """Mean wait of M/G/1, l E[S^2] / (2 (1 - l E[S])) (Pollaczek and Khinchine), of the very requests that came."""
    row = list(seconds)
    rate = (len(arrivals) - 1) / (arrivals[-1].at - arrivals[0].at)
    first, second = statistics.fmean(row), statistics.fmean(s * s for s in row)
    return rate * second / (2 * (1 - rate * first))


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_equal_prompts_wait_as_in_m_d_1(load: float) -> None:
    arrivals = list(generate(Workload.constant(uncached=1000, output=0), load, seed=1, count=50_000))
    waited = simulate(arrivals, ONE, setting(1, 1, None)).waiting.mean
    assert waited == pytest.approx(single_server_wait(arrivals, (1.0 for _ in arrivals)), rel=0.03)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_prompts_of_all_lengths_wait_as_in_m_g_1(load: float) -> None:
    lengths = Workload.log_normal(mu=6.4, sigma=0.8, lo=10, hi=5000, output=0)
    arrivals = list(generate(lengths, 1000 * load / lengths.mean(), seed=2, count=30_000))
    waited = simulate(arrivals, ONE, setting(1, 1, None)).waiting.mean
    assert waited == pytest.approx(single_server_wait(arrivals, (each.tokens / 1000 for each in arrivals)), rel=0.03)


def test_with_no_load_ttft_is_prefill_and_transfer_to_the_last_digit() -> None:
    lengths = [each.tokens for each in generate(cases.workload(), 1.0, seed=1, count=300)]
    arrivals = [Arrival(200.0 * i, tokens, 1024) for i, tokens in enumerate(lengths)]
    found = times(simulate(arrivals, PAPER, PAPER_SETTING, of_paper("plain")))
    local = [_alone(cases.H20, each, 800.0) for each in lengths if each <= T]
    remote = [_alone(cases.H200, each, 100.0) for each in lengths if each > T]
    assert found == pytest.approx([*local, *remote], rel=1e-6)


def _alone(profile: Profile, tokens: float, gbps: float) -> float:
    kilo = tokens / 1000
    f = profile.prefill.coefficients
    assert f is not None
    kv = 8e-9 * (profile.kv.fixed_bytes + profile.kv.bytes_per_token * tokens)
    return max(f.floor, f.a + f.b * kilo + f.c * kilo * kilo) + kv / gbps


def test_with_no_load_ttft_is_the_planners_and_the_papers() -> None:
    arrivals = (Arrival(200.0 * i, each.tokens, 1024) for i, each in enumerate(_evenly(4000)))
    found = simulate(arrivals, PAPER, PAPER_SETTING, of_paper("plain")).ttft
    model = Model(cases.workload(), PAPER)
    planned = zero_load(model, model.parts(PAPER_SETTING))
    assert (found.mean, found.p90) == pytest.approx((2.22, 3.51), rel=0.01)
    assert (found.mean, found.p50, found.p90, found.p99) == pytest.approx(
        (planned.mean, planned.p50, planned.p90, planned.p99), rel=0.002
    )


def _evenly(count: int) -> Iterable[Arrival]:
    """The lengths of the case study at even quantiles."""
    workload = cases.workload()
    return (Arrival(0.0, workload.at((i + 0.5) / count).uncached, 1024) for i in range(count))


@pytest.mark.parametrize(
    ("on", "at", "slots"),
    [
        (PAPER, PAPER_SETTING, "before"),
        (HOMOGENEOUS, Setting({"h20": Split(9, 3)}), "after"),
        (PAPER, Setting({"h20": Split(0, 8)}, {"east": 0}), "before"),
    ],
    ids=["PrfaaS-PD", "homogeneous", "naive"],
)
def test_what_is_served_at_saturation_is_the_planners_rate(on: Topology, at: Setting, slots: str) -> None:
    """Of more requests than can be served: within 2 % of Eq. 6 with mean service times."""
    options = {"warmup": 500.0, "slots": slots}
    limit = Model(cases.workload(), on).loads(at).lambda_max
    arrivals = generate(cases.workload(), 1.02 * limit, seed=3, count=12_000)
    result = simulate(arrivals, on, at, of_paper("plain", at.thresholds.get("east", T)), options=options)
    assert result.throughput == pytest.approx(limit, rel=0.02)


def test_a_slot_that_is_held_during_the_prefill_costs_where_decode_is_nearly_full() -> None:
    """Homogeneous 9/3 with 4.4 s of prefill: 60 slots turn over every 30 s, not every 25.6 s, and are rarely all held.

    The planner counts a slot from the first token on (Eq. 5): 2.03 requests/s; this is what reserving it before costs.
    """
    at = Setting({"h20": Split(9, 3)})
    limit = Model(cases.workload(), HOMOGENEOUS).loads(at).lambda_max
    arrivals = generate(cases.workload(), 1.1 * limit, seed=3, count=12_000)
    result = simulate(arrivals, HOMOGENEOUS, at, of_paper("plain"), options={"warmup": 500.0})
    assert 0.90 * limit < result.throughput < 60 / (25.6 + 4.4)


def test_the_same_requests_wait_less_the_better_the_discipline() -> None:
    """On 10,000 requests at 2.90 requests/s; by how much is in the long tests."""
    p90 = {}
    for name in ("plain", "spill", "steal", "triage"):
        arrivals = generate(cases.workload(), 2.90, seed=5, count=10_000)
        result = simulate(arrivals, PAPER, PAPER_SETTING, of_paper(name), options={"warmup": 500.0})
        p90[name] = result.ttft.p90
    assert all(p90[worse] > p90[better] for worse, better in itertools.pairwise(p90))
