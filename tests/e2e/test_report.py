"""The demo's table says what was measured, and shows what went wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.client import Outcome
from e2e.report import LineUse, Scales, quantile, size, table
from e2e.workload import Ask


def outcome(tokens: int, decision: str, ttft: float | None, error: str | None = None) -> Outcome:
    return Outcome(
        ask=Ask(0.0, tokens, 8, "x" * 4 * tokens),
        status=200 if error is None else 503,
        decision=decision,
        ttft=ttft,
        duration=1.0,
        error=error,
        verified=error is None,
    )


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_a_value_with_that_share_at_or_below_it(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= q * len(values) - 1e-9


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (48_123_456, "48.1 MB"), (2.5e9, "2.5 GB")]
)
def test_sizes_are_decimal(count: float, text: str) -> None:
    assert size(count) == text


def test_the_table_counts_decisions_errors_and_verified_answers() -> None:
    outcomes = [
        outcome(1000, "local; reason=Short", 0.25),
        outcome(3000, "local; reason=Short", 0.75),
        outcome(50_000, "remote; link=east; reason=Long", 1.5),
        outcome(40_000, "local; reason=RemoteUnavailable", 4.0),
        outcome(60_000, "", None, "HTTP 503: no prefill instance"),
    ]
    text = table(
        outcomes,
        12.3,
        19_400,
        LineUse(kv=1_010_000, kv_sent=1_000_000, other=70_000),
        Scales(time=5, kv_bytes=8e-4, line_gbps=0.4, capacity_gbps=100),
        {"east": {"prefill (H200)": 2}, "west": {"prefill (H20)": 1, "decode (H20)": 2}},
    )
    lines = {line.split("  ")[1]: " ".join(line.split()) for line in text.splitlines() if line.startswith("  ")}
    assert lines["short, prefilled in west"] == "short, prefilled in west 2 1,000 0.25 s 0.75 s"
    assert lines["long, prefilled in east"] == "long, prefilled in east 1 50,000 1.50 s 1.50 s"
    assert lines["long, prefilled in west"] == "long, prefilled in west 1 40,000 4.00 s 4.00 s"
    assert "short, prefilled in east" not in lines
    assert lines["errors"] == "errors 1"
    assert lines["output verified"] == "output verified 4 of 5"
    assert "1.01 MB by the kernel, 1 MB by the workers (1.0 % apart)" in text
    assert "time 1:5, KV bytes 1:1,250 (a line of 0.4 Gbit/s stands for 100 Gbit/s)" in text
    assert "1 prefill (H20), 2 decode (H20)" in text
    assert "error x1: HTTP 503: no prefill instance" in text


def test_no_bytes_counted_by_the_workers_is_never_called_close() -> None:
    assert LineUse(kv=10, kv_sent=0, other=0).apart_percent == float("inf")


@pytest.mark.parametrize(
    ("time", "kv_bytes", "says"),
    [(5, 0.0, "with --kv-byte-scale 0,"), (0, 8e-4, "time_scale must be"), (5, 4e-4, "only with 0.0008")],
)
def test_scales_that_do_not_make_the_line_stand_for_the_link_are_refused(
    time: float, kv_bytes: float, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Scales(time=time, kv_bytes=kv_bytes, line_gbps=0.4, capacity_gbps=100).check()
    Scales(time=5, kv_bytes=8e-4, line_gbps=0.4, capacity_gbps=100).check()
