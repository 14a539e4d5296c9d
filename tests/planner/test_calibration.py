"""Calibration: what samples say of T(l), S(l) and a line, how surely, and what they do not say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.api.profile import PrefillCoefficients, PrefillProfile, Profile
from prfaas.api.profiles import shipped
from prfaas.planner.calibration import Calibration, Sample, calibrate
from prfaas.planner.errors import PlanError
from tests.planner.calibration_cases import samples

pytestmark = pytest.mark.slow

H200, H20 = shipped("H200x8"), shipped("H20x8")


def furthest(found: Calibration, truth: Profile) -> float:
    """Largest relative error of the fit and of the profile made of it, over the measured lengths."""
    made = found.prefill()
    lengths = range(found.shortest, found.longest, 499)
    return max(abs(of / truth.prefill.seconds(n) - 1) for n in lengths for of in (found.seconds(n), made.seconds(n)))


@pytest.mark.parametrize("truth", [H200, H20], ids=["H200x8", "H20x8"])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), noise=st.floats(0, 0.03), wrong=st.floats(0, 0.1))
def test_it_recovers_the_shipped_profiles_within_two_percent(
    truth: Profile, seed: int, noise: float, wrong: float
) -> None:
    found = calibrate(samples(truth, seed=seed, count=600, noise=noise, wrong=wrong))
    assert furthest(found, truth) < 0.02
    assert len(found.left_out) <= 0.2 * 600


def test_exact_samples_give_the_coefficients_back() -> None:
    found = calibrate(samples(H200, noise=0))
    assert found.fit.coefficients == pytest.approx((0.3647, 0.04379, 7.963e-5), rel=1e-6)
    assert found.fit.floor == pytest.approx(0.44)
    assert calibrate(samples(H20, noise=0)).fit.floor == 0


@pytest.mark.parametrize("seed", [117, 134, 197])
def test_wrong_samples_make_no_floor_where_there_is_none(seed: int) -> None:
    assert calibrate(samples(H20, seed=seed, wrong=0.1)).fit.floor == 0


def test_a_few_long_prompts_are_heard_among_many_short_ones() -> None:
    short = samples(H20, seed=1, count=1000, most=8_000)
    long = [Sample(n, 0, H20.prefill.seconds(n) * off) for n, off in ((60_000, 1.02), (90_000, 0.98), (120_000, 1.01))]
    found = calibrate([*short, *long])
    assert found.longest == 120_000
    assert furthest(found, H20) < 0.03


def test_wrong_samples_are_left_out_with_the_reason() -> None:
    good = samples(H20, noise=0.01)
    found = calibrate([*good, Sample(50_000, 0, 80.0, where="x.csv:9"), Sample(70_000, 0, 0.1, where="x.csv:10")])
    reasons = {each.sample.where: each.reason for each in found.left_out}
    assert reasons["x.csv:9"] == "10 times what the others say of its length"
    assert reasons["x.csv:10"].startswith("0.009")


def test_stale_and_crowded_samples_are_left_out() -> None:
    good = samples(H20)
    stale = [replace(s, seconds=2 * s.seconds, age_seconds=8 * 86_400) for s in good]
    crowded = [replace(s, seconds=3 * s.seconds, concurrency=2) for s in good]
    found = calibrate([*stale, *crowded, *good])
    assert found.fit.coefficients == calibrate(good).fit.coefficients
    reasons = [each.reason for each in found.left_out]
    assert reasons.count("older than 604,800 s") == reasons.count("others were prefilled beside it") == 400
    assert calibrate([*stale, *good[:20]], max_age=9 * 86_400).seconds(50_000) > 1.8 * H20.prefill.seconds(50_000)


def test_samples_that_were_cut_off_do_not_make_long_prompts_look_fast() -> None:
    cut = [
        replace(s, seconds=15.0, censored=True) if s.seconds > 15 else s
        for s in samples(H20, seed=3, count=800, noise=0.1)
    ]
    assert any(s.censored for s in cut)
    kept = calibrate(cut)
    taken_at_their_word = calibrate([replace(s, censored=False) for s in cut])
    end = kept.longest
    assert kept.seconds(end) == pytest.approx(H20.prefill.seconds(end), rel=0.06)
    assert taken_at_their_word.seconds(end) < kept.seconds(end)
    assert end < 131_000, "a lower bound of a time is no measurement of it"


def test_nothing_is_claimed_beyond_what_was_measured() -> None:
    found = calibrate(samples(H20, most=40_000))
    assert 38_000 < found.longest <= 40_000
    assert found.prefill().measured_tokens == found.longest
    with pytest.raises(PlanError, match=r"50,000 with 0 cached: measured were at most 39,\d+ tokens"):
        found.seconds(50_000)
    with pytest.raises(PlanError, match=r"at least 242 uncached"):
        found.bound(100)
    with pytest.raises(PlanError, match="20,000 with 19,900 cached"):
        found.seconds(20_000, 19_900)


def test_the_bounds_hold_the_truth_nineteen_times_in_twenty() -> None:
    held = []
    for seed in range(16):
        found = calibrate(samples(H20, seed=seed, count=100))
        for tokens in (2_000, 20_000, 100_000):
            bound = found.bound(tokens)
            assert bound.low < bound.seconds < bound.high
            held.append(bound.low <= H20.prefill.seconds(tokens) <= bound.high)
    assert 0.85 <= sum(held) / len(held) <= 1.0


def test_more_samples_narrow_the_bounds() -> None:
    few, many = (calibrate(samples(H20, count=count)).bound(60_000) for count in (50, 800))
    assert many.high - many.low < (few.high - few.low) / 2


def test_drift_is_what_is_both_large_and_sure() -> None:
    slower = H20.model_copy(
        update={
            "prefill": PrefillProfile(coefficients=PrefillCoefficients(a=0.4534, b=0.15, c=2.776e-4)),
        }
    )
    same, other = calibrate(samples(H20)).drift(H20), calibrate(samples(slower)).drift(H20)
    assert not same.significant
    assert same.mean_ratio == pytest.approx(1, abs=0.02)
    assert other.significant
    assert other.ratio == pytest.approx(1.12, abs=0.02)
    assert not calibrate(samples(slower, count=13, noise=0.4)).drift(H20).significant, "large, but not sure"


def test_drift_is_not_looked_for_where_the_other_profile_was_not_measured() -> None:
    short = H20.model_copy(update={"prefill": calibrate(samples(H20, most=20_000)).prefill()})
    drift = calibrate(samples(H20)).drift(short)
    assert drift.tokens <= 20_000
    assert not drift.significant
    long = [Sample(n, 0, H20.prefill.seconds(n)) for n in range(30_000, 120_000, 3_000)]
    with pytest.raises(PlanError, match=r"measured up to .* the samples begin at 30,000"):
        calibrate(long).drift(short)


def test_bytes_give_the_kv_profile_and_with_times_the_rate_of_the_line() -> None:
    sized = [
        replace(s, kv_bytes=float(H20.kv.bytes(s.tokens - s.cached)), transfer_seconds=0.5 * s.seconds)
        for s in samples(H20)
    ]
    found = calibrate(sized)
    assert found.kv == H20.kv
    sent = sum(s.kv_bytes or 0 for s in sized)
    assert found.link_gbps == pytest.approx(sent * 8e-9 / sum(0.5 * s.seconds for s in sized))
    without = calibrate(samples(H20))
    assert (without.kv, without.link_gbps) == (None, None)
    assert without.profile(H200).kv == H200.kv


def test_the_profile_keeps_what_samples_cannot_say() -> None:
    made = calibrate(samples(H20)).profile(H200)
    assert (made.accelerator, made.decode, made.startup_seconds) == ("H200", H200.decode, H200.startup_seconds)
    assert made.source == "measured"
    assert Profile.model_validate(made.model_dump(by_alias=True)) == made


def test_a_curve_of_another_form_is_told() -> None:
    good = samples(H20, noise=0.01)
    assert calibrate(good).worst_octave[1] == pytest.approx(1, abs=0.02)
    bent = [replace(s, seconds=s.seconds * (1.3 if 4_096 <= s.tokens - s.cached < 8_192 else 1)) for s in good]
    start, off = calibrate(bent).worst_octave
    assert start == 4_096
    assert off > 1.1


@pytest.mark.parametrize(
    ("given_samples", "said"),
    [
        ([], r"samples: 0 are usable, 12 are needed \(0 left out\)"),
        (samples(H20, count=11), "11 are usable"),
        ([replace(s, concurrency=4) for s in samples(H20)], "400 left out, most: others were prefilled beside it"),
        ([replace(s, censored=True) for s in samples(H20)], "0 are usable"),
        ([Sample(1000 + i, 0, 0.6) for i in range(50)], "all have 1,000 to 1,049 uncached tokens"),
    ],
)
def test_what_cannot_be_fitted_is_refused(given_samples: list[Sample], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        calibrate(given_samples)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.builds(
            Sample,
            tokens=st.integers(2, 10_000_000),
            cached=st.just(0) | st.just(1),
            seconds=st.floats(1e-6, 86_400),
            concurrency=st.just(1.0),
            censored=st.booleans(),
            kv_bytes=st.none() | st.floats(0, 2.0**50),
            transfer_seconds=st.none() | st.floats(1e-6, 86_400),
        ),
        max_size=40,
    )
)
def test_whatever_was_measured_time_never_falls_with_length(any_samples: list[Sample]) -> None:
    try:
        found = calibrate(any_samples)
    except PlanError:
        return
    made = found.profile(H20)
    points = [point.seconds for point in made.prefill.points or ()]
    assert points == sorted(points)
    assert found.seconds(found.shortest) <= found.seconds(found.longest)
    assert found.drift(H20).ratio > 0
