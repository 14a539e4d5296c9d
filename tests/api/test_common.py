"""Durations, quantities and bandwidths: the value of what a person wrote."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.common import bits_per_second, duration_seconds, quantity_value


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("2h3m4s", 7384), ("1h4s", 3604)]
)
def test_duration(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


@given(st.integers(0, 9999), st.integers(0, 99999), st.integers(0, 999999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    assert duration_seconds(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize("text", ["", "s", "10", "1.5h", "-1s", "1s1m", "1d", "5 m", "1s\n"])
def test_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration_seconds(text)


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (2, "2"),
        ("2", "2"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("64Gi", str(64 * 1024**3)),
        ("1k", "1000"),
        ("1Ki", "1024"),
        ("3M", "3000000"),
        ("7u", "0.000007"),
        ("2E", str(2 * 10**18)),
        ("2Ei", str(2 * 1024**6)),
    ],
)
def test_quantity(quantity: int | str, value: str) -> None:
    assert quantity_value(quantity) == Decimal(value)


@pytest.mark.parametrize("text", ["", "Gi", "-1", "1e3", "1 Gi", "1KI", "1K", "0x1", "1\n"])
def test_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity_value(text)


@pytest.mark.parametrize(
    ("bandwidth", "bits"),
    [("400M", 400_000_000), ("100G", 10**11), ("1.5G", 1_500_000_000), (64000, 64000), ("9k", 9000)],
)
def test_bandwidth(bandwidth: int | str, bits: int) -> None:
    assert bits_per_second(bandwidth) == bits


@pytest.mark.parametrize("text", ["100Gi", "400Mbit", "500m", "", "-1G"])
def test_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match="not a bandwidth"):
        bits_per_second(text)
