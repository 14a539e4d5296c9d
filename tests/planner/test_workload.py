"""Workloads: closed forms against numerical integration, histograms that add up, integrals of curves."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prfaas.planner.curve import Curve, prefill_curve
from prfaas.planner.errors import PlanError
from prfaas.planner.workload import Bucket, Histogram, Integral, LogNormal, Request, Segment, Workload, integral_of
from tests.planner.cases import H20, H200, workload


def numerically(of: Workload, k: int, a: float, b: float, steps: int = 4_000) -> float:
    """E[L^k; a < L <= b] by the midpoints of quantiles."""
    values = (of.at((i + 0.5) / steps).uncached for i in range(steps))
    return sum(v**k for v in values if a < v <= b) / steps


def test_the_case_study_has_the_published_moments() -> None:
    of = workload()
    assert of.share(19_400) == pytest.approx(0.4957, abs=1e-4)
    assert of.mean() == pytest.approx(27_486, abs=1)
    assert of.mean(19_400) == pytest.approx(45_046, abs=1)
    assert of.mean(0, 19_400) == pytest.approx(10_224, abs=1)
    assert of.quantile(0.5) == pytest.approx(19_199, abs=1)
    assert of.quantile(0.9) == pytest.approx(62_410, abs=1)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_partial_moments_are_what_sampling_gives(k: int) -> None:
    of = workload()
    for a, b in ((-1.0, 1e9), (5_000.0, 40_000.0), (90_000.0, 1e9)):
        assert of.moment(k, a, b) == pytest.approx(numerically(of, k, a, b), rel=2e-2)


@given(
    mu=st.floats(-5, 12),
    sigma=st.floats(0.05, 4),
    lo=st.floats(1, 1e4),
    factor=st.floats(1.01, 1e4),
    cut=st.floats(0, 1),
)
def test_moments_add_up_and_never_fall(mu: float, sigma: float, lo: float, factor: float, cut: float) -> None:
    hi = min(1e8, lo * factor)
    assume(LogNormal(mu, sigma).power(0, lo, hi) >= 1e-9)
    of = Workload.log_normal(mu=mu, sigma=sigma, lo=lo, hi=hi, output=1)
    middle = lo + cut * (hi - lo)
    assert of.share() == pytest.approx(1)
    for k in range(5):
        whole, low, high = of.moment(k), of.moment(k, -1, middle), of.moment(k, middle)
        assert min(low, high) >= 0
        assert low + high == pytest.approx(whole, rel=1e-6)
    assert lo * (1 - 1e-9) <= of.mean() <= hi * (1 + 1e-9)
    assert lo <= of.quantile(cut) <= hi


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_quantile_is_the_length_below_which_that_share_lies(share: float, other: float) -> None:
    of = workload()
    assert of.share(-1, of.quantile(share)) == pytest.approx(share, abs=1e-6)
    if share <= other:
        assert of.quantile(share) <= of.quantile(other) + 1e-9


def sample(seed: int, count: int) -> list[Request]:
    """Requests with a prefix and an answer that depend on the length."""
    draw = random.Random(seed)
    lengths = (draw.lognormvariate(8, 1) for _ in range(count))
    return [Request(n, n / 2 if n > 3_000 else 0.0, 100 + n / 100) for n in lengths]


def test_a_histogram_keeps_sums_and_joint_means() -> None:
    requests = sample(1, 5_000)
    of = Histogram.of(requests).workload()
    assert of.share() == pytest.approx(1)
    assert of.output == pytest.approx(sum(r.output for r in requests) / 5_000)
    assert of.cached == pytest.approx(sum(r.cached for r in requests) / 5_000)
    assert of.mean() == pytest.approx(sum(r.uncached for r in requests) / 5_000, rel=5e-3)
    long = [r for r in requests if r.uncached > 10_000]
    assert of.share(10_000) == pytest.approx(len(long) / 5_000, abs=0.01)


def test_histograms_of_parts_are_the_histogram_of_all() -> None:
    requests = sample(2, 2_000)
    parts = Histogram.of(requests[:700]).merged(Histogram.of(requests[700:]))
    whole = Histogram.of(requests)
    assert [(b.lo, b.hi) for b in parts.buckets] == [(b.lo, b.hi) for b in whole.buckets]
    for one, other in zip(parts.buckets, whole.buckets, strict=True):
        assert (one.count, one.output_sum) == pytest.approx((other.count, other.output_sum))


edges = st.lists(st.integers(1, 10_000), min_size=2, max_size=8, unique=True).map(sorted)


@given(edges, edges, st.randoms(use_true_random=False))
def test_merging_keeps_counts_whatever_the_edges(one: list[int], other: list[int], draw: random.Random) -> None:
    def made(of: list[int]) -> Histogram:
        pairs = pairwise(of)
        return Histogram(tuple(Bucket(float(a), float(b), draw.randint(0, 9), draw.random(), 1.0) for a, b in pairs))

    a, b = made(one), made(other)
    both = a.merged(b)
    assert both.count == pytest.approx(a.count + b.count)
    assert sum(x.cached_sum for x in both.buckets) == pytest.approx(sum(x.cached_sum for x in (*a.buckets, *b.buckets)))
    turned = b.merged(a)
    assert [(x.lo, x.hi) for x in both.buckets] == [(x.lo, x.hi) for x in turned.buckets]
    assert [x.count for x in both.buckets] == pytest.approx([x.count for x in turned.buckets])


def test_weights_count() -> None:
    requests = [Request(100, 0, 1), Request(10_000, 0, 1)]
    of = Histogram.of(requests, [3.0, 1.0]).workload()
    assert of.share(1_000) == pytest.approx(0.25)
    faded = Histogram.of(requests, [3.0, 1.0]).scaled(0.1)
    assert faded.count == pytest.approx(0.4)
    assert faded.workload().share(1_000) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(()), "workload: has no requests"),
        (lambda: Histogram().workload(), r"workload\.histogram: counts no request"),
        (lambda: Workload((Segment(1, 2, 0.5),)), "weights must add up to 1, got 0.5"),
        (lambda: Workload((Segment(1, 5, 0.5), Segment(4, 6, 0.5))), r"segments\[1\]\.lo: 4 lies inside"),
        (lambda: Workload((Segment(1, 2, math.nan),)), r"segments\[0\]\.weight: must be a finite number above 0"),
        (lambda: Histogram((Bucket(5, 2, 1),)), r"histogram\[0\]\.maxTokens: must be a finite number at least 5"),
        (lambda: Workload.log_normal(mu=9, sigma=0, lo=1, hi=9, output=1), r"logNormal\.sigma: must be"),
        (lambda: Workload.log_normal(mu=9, sigma=1, lo=10, hi=9, output=1), r"logNormal\.maxTokens: must be"),
        (lambda: Workload.log_normal(mu=-20, sigma=0.1, lo=10, hi=90, output=1), "has no mass between 10 and 90"),
    ],
)
def test_what_is_no_workload_is_refused_with_its_path(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(PlanError, match=message):
        make()


def test_integrals_of_prefill_times_are_exact_across_the_floor() -> None:
    of = workload()
    curve = prefill_curve(H200.prefill)
    assert curve(1_000) == pytest.approx(0.44)
    found = integral_of(of, curve)
    steps = 20_000
    expected = sum(curve(of.at((i + 0.5) / steps).uncached) for i in range(steps)) / steps
    assert found.total == pytest.approx(expected, rel=1e-4)
    assert found.over(1_500, 1_900) + found(1_500) == pytest.approx(found(1_900))
    assert integral_of(of, curve.squared()).total == pytest.approx(
        sum(curve(of.at((i + 0.5) / steps).uncached) ** 2 for i in range(steps)) / steps, rel=1e-3
    )


@given(tokens=st.integers(0, 100_000), cached=st.integers(0, 200_000))
def test_new_tokens_on_cached_ones_cost_what_the_profile_says(tokens: int, cached: int) -> None:
    for profile in (H200, H20):
        expected = profile.prefill.remaining_seconds(tokens + cached, cached)
        assert prefill_curve(profile.prefill, cached)(tokens) == pytest.approx(expected)


def test_10k_tokens_on_100k_cached_cost_a_fifth_more() -> None:
    alone = H200.prefill.seconds(10_000)
    on_cached = prefill_curve(H200.prefill, 100_000)(10_000)
    assert alone == pytest.approx(0.81, abs=0.005)
    assert on_cached == pytest.approx(0.97, abs=0.005)


def test_each_bucket_has_its_own_cached_prefix() -> None:
    of = Workload((Segment(1_000, 1_000, 0.5, cached=0.0), Segment(2_000, 2_000, 0.5, cached=50_000.0)))
    found = Integral(of, lambda segment: prefill_curve(H20.prefill, segment.cached))
    expected = (H20.prefill.seconds(1_000) + H20.prefill.remaining_seconds(52_000, 50_000)) / 2
    assert found.total == pytest.approx(expected)
    assert of.with_mean_cached().segments[0].cached == pytest.approx(25_000)


@given(at=st.floats(200, 130_000), other=st.floats(200, 130_000))
def test_a_supporting_line_never_passes_the_curve(at: float, other: float) -> None:
    curve = prefill_curve(H200.prefill)
    below = curve.supporting_line(at, 128, 131_072)
    assert below(other) <= curve(other) * (1 + 1e-12)
    bent = Curve((0.0, 5_000.0, 20_000.0), ((0.1,), (-0.4, 1e-4), (1.2, 2e-5)))
    assert bent.supporting_line(at, 128, 131_072)(other) <= bent(other) + 1e-12


def test_one_length_is_a_workload() -> None:
    of = Workload.constant(uncached=1_000, output=10)
    assert (of.share(999), of.share(1_000), of.mean(), of.quantile(0.3)) == (1.0, 0.0, 1_000, 1_000)
    assert replace(of.segments[0], weight=1.0).moment(2, 0, 2_000) == 1e6
