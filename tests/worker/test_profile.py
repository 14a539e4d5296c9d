"""A Profile's arithmetic and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prfaas.api.base import API_VERSION
from prfaas.api.profile import Profile, kv_byte_scale
from prfaas.api.profiles import parse_profile, shipped, shipped_names


def document(**changes: Any) -> dict[str, Any]:
    """A valid profile document, with top-level members replaced."""
    return shipped("H20x8").to_wire() | changes


def test_shipped_profiles_give_the_published_figures() -> None:
    assert {"H200x8", "H20x8"} <= set(shipped_names())
    h200, h20 = shipped("H200x8"), shipped("H20x8")
    # arXiv:2604.15039, Table 5 at the lengths that its labels stand for.
    assert h200.prefill.seconds(1_024) == pytest.approx(0.44)
    assert h200.prefill.seconds(8_192) == pytest.approx(0.72, abs=0.01)
    assert h200.prefill.seconds(32_000) == pytest.approx(1.84, abs=0.01)
    assert h200.prefill.seconds(130_000) == pytest.approx(7.40, abs=0.01)
    for tokens, mebibytes in ((1_024, 190.8), (8_192, 308.9), (32_000, 701.3), (130_000, 2_316.2)):
        assert h200.kv.bytes(tokens) / 2**20 == pytest.approx(mebibytes, abs=0.06)
    assert h20.prefill.seconds(19_400) == pytest.approx(3.10, abs=0.01)
    assert h20.decode.max_batch / h20.decode.step_seconds(20) / 1_024 == pytest.approx(0.78125)
    assert h20.kv == h200.kv, "KV is the model's: both ends of a transfer must agree on its size"


def test_unknown_shipped_profile_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="there are H200x8, H20x8"):
        shipped("H100")


def test_api_version_is_the_groups() -> None:
    assert Profile.model_validate(document()).api_version == API_VERSION


def test_wire_form_round_trips() -> None:
    profile = shipped("H200x8")
    assert Profile.model_validate(profile.to_wire()) == profile


COEFFICIENT = st.floats(min_value=0, max_value=10, allow_nan=False)


@given(
    a=COEFFICIENT, b=COEFFICIENT, c=COEFFICIENT, floor=COEFFICIENT, x=st.integers(0, 200_000), y=st.integers(0, 9_999)
)
def test_quadratic_prefill_never_falls_with_length(a: float, b: float, c: float, floor: float, x: int, y: int) -> None:
    prefill = Profile.model_validate(
        document(prefill={"coefficients": {"a": a, "b": b, "c": c, "floor": floor}})
    ).prefill
    assert floor <= prefill.seconds(x) <= prefill.seconds(x + y)
    assert prefill.seconds(1_000) == pytest.approx(max(floor, a + b + c))


POINTS = st.lists(
    st.tuples(st.integers(1, 5_000), st.floats(min_value=0, max_value=5, allow_nan=False)), min_size=2, max_size=8
).map(
    lambda steps: [
        {"tokens": sum(s[0] for s in steps[: i + 1]), "seconds": sum(s[1] for s in steps[: i + 1])}
        for i in range(len(steps))
    ]
)


@given(points=POINTS, x=st.integers(0, 60_000), y=st.integers(0, 5_000))
def test_measured_prefill_goes_through_its_points_and_never_falls(points: list[dict[str, Any]], x: int, y: int) -> None:
    prefill = Profile.model_validate(document(prefill={"points": points})).prefill
    for point in points:
        assert prefill.seconds(point["tokens"]) == pytest.approx(point["seconds"])
    assert prefill.seconds(x) <= prefill.seconds(x + y) + 1e-9


def test_measured_prefill_between_and_beyond_its_points() -> None:
    points = [{"tokens": 1_000, "seconds": 1.0}, {"tokens": 3_000, "seconds": 2.0}]
    prefill = Profile.model_validate(document(prefill={"points": points})).prefill
    assert [prefill.seconds(n) for n in (0, 1_000, 2_000, 3_000, 5_000)] == [1.0, 1.0, 1.5, 2.0, 3.0]


def test_decode_step_by_batch() -> None:
    steps = [{"batch": 1, "seconds": 0.01}, {"batch": 21, "seconds": 0.03}]
    decode = Profile.model_validate(document(decode={"steps": steps, "maxBatch": 40})).decode
    assert [decode.step_seconds(n) for n in (1, 11, 21, 41)] == pytest.approx([0.01, 0.02, 0.03, 0.05])


@given(tokens=st.integers(0, 1_000_000))
def test_kv_bytes_have_an_intercept(tokens: int) -> None:
    kv = shipped("H20x8").kv
    assert kv.bytes(tokens) == 182_353_920 + 17_280 * tokens


@pytest.mark.parametrize(
    ("changes", "path", "reason"),
    [
        ({"prefill": {"coefficients": {"a": math.nan, "b": 1, "c": 1}}}, "prefill.coefficients.a", "finite"),
        ({"prefill": {"coefficients": {"a": 1, "b": math.inf, "c": 1}}}, "prefill.coefficients.b", "finite"),
        ({"prefill": {"coefficients": {"a": 1, "b": 1, "c": -1}}}, "prefill.coefficients.c", "greater than or equal"),
        ({"prefill": {}}, "prefill", "exactly one of coefficients and points"),
        (
            {"prefill": {"points": [{"tokens": 9, "seconds": 1}, {"tokens": 9, "seconds": 2}]}},
            "prefill",
            r"points\[1\].tokens: 9 must be above 9",
        ),
        (
            {"decode": {"steps": [{"batch": 1, "seconds": 2}, {"batch": 2, "seconds": 1}], "maxBatch": 2}},
            "decode",
            r"steps\[1\].seconds: 1.0 must not be below 2.0",
        ),
        (
            {"decode": {"steps": [{"batch": 1, "seconds": 0}], "maxBatch": 2}},
            "decode.steps.0.seconds",
            "greater than 0",
        ),
        ({"decode": {"steps": [], "maxBatch": 2}}, "decode.steps", "at least 1"),
        ({"kv": {"fixedBytes": -1, "bytesPerToken": 1}}, "kv.fixedBytes", "greater than or equal"),
        ({"gpus": 0}, "gpus", "greater than or equal"),
        ({"startupSeconds": -1}, "startupSeconds", "greater than or equal"),
        ({"source": "guessed"}, "source", "'measured', 'fitted' or 'assumed'"),
        ({"colour": "red"}, "colour", "not permitted"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path(changes: dict[str, Any], path: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as refused:
        Profile.model_validate(document(**changes))
    assert path in {".".join(str(part) for part in error["loc"]) for error in refused.value.errors()}


def test_text_that_is_no_profile_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="not YAML"):
        parse_profile("a: [")
    with pytest.raises(ValueError, match="valid dictionary"):
        parse_profile("just words")


def test_kv_byte_scale_keeps_bytes_over_capacity() -> None:
    scale = kv_byte_scale(line_gbps=0.4, capacity_gbps=100, time_scale=10)
    kv_bits = shipped("H20x8").kv.bytes(32_000) * 8
    wall_seconds = kv_bits * scale / 0.4e9
    assert wall_seconds * 10 == pytest.approx(kv_bits / 100e9)


@given(st.floats(max_value=0, allow_nan=False) | st.sampled_from([math.nan, math.inf]), st.integers(0, 2))
def test_kv_byte_scale_refuses_what_would_move_no_bytes(bad: float, where: int) -> None:
    arguments = [1.0, 1.0, 1.0]
    arguments[where] = bad
    with pytest.raises(ValueError, match=("line_gbps", "capacity_gbps", "time_scale")[where]):
        kv_byte_scale(*arguments)


def test_kv_byte_scale_refuses_a_quotient_of_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        kv_byte_scale(1e-300, 1e300, 1e10)


def test_lengths_and_batches_below_their_bounds_are_refused() -> None:
    profile = shipped("H20x8")
    with pytest.raises(ValueError, match="tokens"):
        profile.prefill.seconds(-1)
    with pytest.raises(ValueError, match="tokens"):
        profile.kv.bytes(-1)
    with pytest.raises(ValueError, match="batch"):
        profile.decode.step_seconds(0)
