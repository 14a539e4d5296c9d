"""Recorded requests: what is read, and what is said of lines that cannot be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.planner.simulator.arrivals import Arrival
from prfaas.planner.simulator.traces import TraceError, observe, read
from prfaas.routing.prefixes import PrefixCache

GOOD = '{"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 3]}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:17:03.9799600,4808,10"


def test_mooncake_the_first_request_is_at_0() -> None:
    later = GOOD.replace("1000", "3500").replace("[1, 2, 3]", "[1, 2]")
    assert list(read([GOOD, "\n", later], "t")) == [
        Arrival(0.0, 1030, 5, 0.0, (1, 2, 3)),
        Arrival(2.5, 1030, 5, 0.0, (1, 2)),
    ]


def test_mooncake_without_block_names() -> None:
    assert list(read(['{"timestamp": 0, "input_length": 9, "output_length": 0}'], "t")) == [Arrival(0.0, 9, 0)]


def test_azure() -> None:
    rows = [HEADER, ROW, "2023-11-16 18:17:04.2299600,3180,8"]
    assert [(round(each.at, 6), each.tokens, each.output) for each in read(rows, "t")] == [
        (0.0, 4808, 10),
        (0.25, 3180, 8),
    ]


def test_it_is_read_line_by_line() -> None:
    def lines() -> object:
        yield GOOD
        yield GOOD
        raise AssertionError("read further than was asked for")

    assert next(read(lines(), "t")).tokens == 1030  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "t: is empty"),
        (["hello"], "t:1: neither a JSON object per line"),
        ([HEADER], "t: has no requests"),
        ([GOOD, "{"], "t:2: is no JSON"),
        ([GOOD, "[1]"], "t:2: is no JSON object"),
        ([GOOD, "", GOOD.replace("1000", "-1")], "t:3: timestamp: must be milliseconds"),
        ([GOOD.replace("1000", "NaN")], "t:1: timestamp"),
        ([GOOD.replace("1030", '"long"')], "t:1: input_length: must be a whole number from 1"),
        ([GOOD.replace("1030", "0")], "t:1: input_length"),
        ([GOOD.replace('"output_length": 5', '"output_length": -5')], "t:1: output_length"),
        ([GOOD.replace("[1, 2, 3]", '["a"]')], "t:1: hash_ids: must be a list"),
        ([GOOD.replace("[1, 2, 3]", "[1]")], "t:1: hash_ids: 1 for 1030 tokens"),
        ([GOOD, GOOD.replace("1000", "999")], "t:2: goes back in time by 0.001 s"),
        ([HEADER, "2023-11-16 18:17:03,1"], "t:2: has 2 values"),
        ([HEADER, ROW, "yesterday,1,2"], "t:3: TIMESTAMP: 'yesterday' is no time"),
        ([HEADER, "2023-11-16 18:17:03.9,many,2"], "t:2: ContextTokens: must be a whole number"),
        ([HEADER, "2023-11-16 18:17:03.9,1,-2"], "t:2: GeneratedTokens"),
    ],
)
def test_whatever_is_wrong_is_said_with_its_line(lines: list[str], said: str) -> None:
    with pytest.raises(TraceError) as error:
        list(read(lines, "t"))
    assert str(error.value).startswith(said)


@given(st.lists(st.one_of(st.text(max_size=40), st.just(GOOD), st.just(HEADER), st.just(ROW)), max_size=6))
def test_no_text_raises_anything_else(lines: list[str]) -> None:
    try:
        for each in read(lines, "t"):
            assert each.tokens >= 1
    except TraceError:
        pass


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda each: st.lists(each), max_leaves=4))
def test_no_value_of_any_field_raises_anything_else(value: object) -> None:
    for field in ("timestamp", "input_length", "output_length", "hash_ids"):
        row = {**json.loads(GOOD), field: value}
        try:
            list(read([json.dumps(row)], "t"))
        except TraceError as error:
            assert str(error).startswith("t:1: ")  # noqa: PT017  # anything else goes through


def test_what_a_planner_sees_of_it_is_uncached_lengths() -> None:
    rows = [Arrival(0.0, 1024, 10, 0.0, (1, 2)), Arrival(10.0, 1536, 30, 0.0, (1, 2, 3))]
    seen = observe(rows, PrefixCache("full", 512))
    assert (seen.requests, seen.seconds, seen.rate) == (2, 10.0, 0.2)
    assert (seen.histogram.count, seen.busiest) == (2, 0.2)
    assert seen.histogram.workload().cached == pytest.approx(512)
    assert seen.histogram.workload().output == pytest.approx(20)
    assert observe(rows, None).histogram.workload().cached == 0


def test_the_busiest_minute() -> None:
    rows = [Arrival(each, 10, 1) for each in (0.0, 59.0, 60.0, 61.0, 62.0, 300.0)]
    assert observe(rows, None).busiest == pytest.approx(3 / 60)
