"""The grammar of faults: what can be asked for, and what is said where it cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.worker.faults import NONE, FaultBox, FaultError, Faults, parse

DURATIONS = st.integers(0, 3_600_000).map(lambda count: count / 1000)


@given(
    latency=st.none() | DURATIONS,
    hang=st.booleans(),
    error=st.none() | st.integers(400, 599),
    cut=st.none() | st.sampled_from(["request", "headers"]) | st.integers(1, 100),
    stall=st.none() | st.integers(0, 100),
    wrong=st.none() | st.sampled_from(["token", "model"]),
    no_kv=st.booleans(),
    kv=st.none() | st.sampled_from(["stall", "cut", "corrupt", "wrong"]),
)
def test_what_is_written_is_read_again(**asked: object) -> None:
    faults = Faults(**asked)  # type: ignore[arg-type]  # each strategy is of its field's type
    assert parse(str(faults), of_a_request=True) == faults


@given(body=st.binary(max_size=40))
def test_a_body_may_hold_anything(body: bytes) -> None:
    faults = Faults(error=500, body=body)
    assert parse(str(faults)) == faults


def test_all_items() -> None:
    text = "latency=250ms; error=503; body=too%20busy; times=2; health=hang; blocks=7; exit=3; after=1.5s; stale-kv"
    assert parse(text) == Faults(
        latency=0.25,
        error=503,
        body=b"too busy",
        times=2,
        health="hang",
        blocks=7,
        exit=3,
        after=1.5,
        stale_kv=True,
    )
    assert parse("slow-start=1m", at_start=True) == Faults(slow_start=60)
    assert parse("exit=1;requests=5;") == Faults(exit=1, requests=5)
    assert parse("  ") == NONE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("explode", "explode: no such fault; there are after, blocks, body, cut, error, exit"),
        ("no_kv", "no_kv: no such fault"),
        ("latency=3", "latency=3: latency must be a duration of at most an hour, such as 250ms, 2s or 1m"),
        ("latency=2h", "must be a duration"),
        ("latency=61m", "must be a duration"),
        ("latency", "latency: latency must be a duration"),
        ("hang=1", "hang must be alone, without a value"),
        ("error=200", "error must be a status from 400 to 599"),
        ("cut=0", "cut must be request, headers, or a number of parts above 0"),
        ("cut=tail", "cut must be request, headers"),
        ("wrong=everything", "wrong must be token or model"),
        ("kv=slow", "kv must be stall, cut, corrupt or wrong"),
        ("error=500; error=503", "error: given twice"),
        ("body=x", "body: only together with error=..."),
        ("after=2s", "after: only together with exit=..."),
        ("exit=1; after=2s; requests=3", "after, requests: only one of them"),
        ("times=3", "times: only together with a fault of requests"),
        ("slow-start=2s", "slow-start: only at the start, by --faults slow-start="),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["health=hang", "exit=1", "blocks=0", "stale-kv", "error=500; times=2"])
def test_a_request_asks_for_its_own_faults_only(text: str) -> None:
    with pytest.raises(FaultError, match="not a fault of one request; set it by PUT /prfaas/faults"):
        parse(text, of_a_request=True)


def test_so_many_times_and_no_more() -> None:
    box = FaultBox(parse("error=503; times=2; health=500"))
    assert [box.of_request(None).error for _ in range(3)] == [503, 503, None]
    assert box.current.health == 500, "what concerns the process stays"
    box.set(parse("error=429"))
    assert [box.of_request(None).error for _ in range(3)] == [429, 429, 429]
    assert box.of_request("latency=1s") == Faults(latency=1), "a request's own stand for themselves"
    assert box.of_request("") == NONE, "and may be none"
