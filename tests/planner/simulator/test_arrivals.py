"""Requests that are made: how many, when, and always the same."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.planner.errors import PlanError
from prfaas.planner.simulator.arrivals import Arrival, Rate, generate, scaled
from tests.planner import cases

PAPER = cases.workload()


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    one = list(generate(PAPER, 2.0, seed=1, count=50))
    assert one == list(generate(PAPER, 2.0, seed=1, count=50))
    assert one != list(generate(PAPER, 2.0, seed=2, count=50))


def test_another_rate_gives_the_same_requests_at_other_times() -> None:
    slow, fast = (list(generate(PAPER, rate, seed=1, count=50)) for rate in (1.0, 4.0))
    assert [each.tokens for each in slow] == [each.tokens for each in fast]
    assert [each.at for each in slow] == pytest.approx([4 * each.at for each in fast])


@pytest.mark.parametrize(("variation", "expected"), [(1.0, 1.0), (2.0, 2.0), (0.5, 0.5), (0.0, 0.0)])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(variation: float, expected: float) -> None:
    times = [each.at for each in generate(PAPER, 5.0, seed=3, count=20_000, variation=variation)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(gaps) / mean == pytest.approx(expected, rel=0.04, abs=1e-6)


def test_lengths_follow_the_workload() -> None:
    lengths = [each.tokens for each in generate(PAPER, 5.0, seed=4, count=40_000)]
    assert statistics.fmean(lengths) == pytest.approx(PAPER.mean(), rel=0.01)
    assert sum(each > 19_400 for each in lengths) / len(lengths) == pytest.approx(PAPER.share(19_400), abs=0.006)
    assert min(lengths) >= 128
    assert max(lengths) <= 131_072


def test_a_prompt_has_its_cached_prefix_as_well() -> None:
    first = next(generate(cases.workload(cached=500.0), 1.0, seed=1))
    assert first.cached == 500.0
    assert first.tokens > 628


def test_a_ramp_makes_as_many_as_its_area() -> None:
    ramp = Rate(((0.0, 0.0), (1000.0, 10.0), (2000.0, 10.0)))
    times = [each.at for each in generate(PAPER, ramp, seed=5, duration=2000.0)]
    assert sum(at <= 1000 for at in times) == pytest.approx(5000, rel=0.04)
    assert sum(at > 1000 for at in times) == pytest.approx(10_000, rel=0.04)
    assert sum(at <= 500 for at in times) == pytest.approx(1250, rel=0.1)


RATES = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 50)), min_size=1, max_size=6)


@given(RATES, st.floats(0.01, 20))
def test_times_rise_and_lie_where_the_area_is_reached(steps: list[tuple[float, float]], last: float) -> None:
    at, points = 0.0, []
    for gap, rate in steps:
        points.append((at, rate))
        at += gap
    points.append((at, last))
    counts = [0.5, 1.0, 2.5, 10.0, 1000.0]
    found = list(Rate(tuple(points)).times(iter(counts)))
    assert found == sorted(found)
    for count, time in zip(counts, found, strict=True):
        assert _area(points, time) == pytest.approx(count, rel=1e-6)


def _area(points: list[tuple[float, float]], until: float) -> float:
    area = 0.0
    for (t0, r0), (t1, r1) in itertools.pairwise([*points, (max(until, points[-1][0]), points[-1][1])]):
        end = min(t1, until)
        if end > t0 and t1 > t0:
            area += (end - t0) * (r0 + r0 + (r1 - r0) * (end - t0) / (t1 - t0)) / 2
    return area


def test_a_trace_faster_is_the_same_sooner() -> None:
    trace = [Arrival(0.0, 10, 1), Arrival(10.0, 20, 2), Arrival(30.0, 30, 3)]
    assert [(each.at, each.tokens) for each in scaled(iter(trace), 2.0, 10.0)] == [(0.0, 10), (5.0, 20)]


@pytest.mark.parametrize(
    ("points", "path"),
    [
        ((), "rate"),
        (((0.0, 1.0), (0.0, 2.0)), "rate[1].seconds"),
        (((0.0, -1.0),), "rate[0].requestsPerSecond"),
        (((0.0, 1.0), (5.0, 0.0)), "rate[1].requestsPerSecond"),
    ],
)
def test_a_rate_that_is_none_is_refused_with_its_place(points: tuple[tuple[float, float], ...], path: str) -> None:
    with pytest.raises(PlanError) as error:
        Rate(points)
    assert error.value.path == path
