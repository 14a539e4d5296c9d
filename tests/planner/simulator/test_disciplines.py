"""What the disciplines of the router's queue are worth on the case study, against an independent simulation of it.

Ratios are to the plain threshold on the same 200,000 requests; a single run spreads too much to compare seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.planner.simulator.arrivals import generate
from prfaas.planner.simulator.results import Quantiles
from tests.planner import cases
from tests.planner.simulator.worlds import PAPER, PAPER_SETTING, of_paper, simulate

pytestmark = pytest.mark.long

STUDY: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/queue_disciplines.json").read_text())
REQUESTS = 200_000
LOADS = {2.90: ("spill", "steal", "triage", "p90 first"), 3.02: ("steal", "triage")}
RATIOS = [row for row in STUDY["rows"] if row["discipline"] in LOADS.get(row["rate"], ())]
SPREAD = {2.90: 0.03, 3.02: 0.06}
"""How far a single run's ratio of means or P90 may be from the mean of many."""


@pytest.fixture(scope="module")
def ttft() -> dict[tuple[float, str], Quantiles]:
    """By load and discipline."""
    found = {}
    for load, names in LOADS.items():
        for name in ("plain", *names):
            arrivals = generate(cases.workload(), load, seed=11, count=REQUESTS)
            options = {"warmup": 5_000 / load, "keep_values": False}
            found[load, name] = simulate(arrivals, PAPER, PAPER_SETTING, of_paper(name), options=options).ttft
    return found


def test_the_plain_threshold_at_nine_tenths_of_what_can_be_served(ttft: dict[tuple[float, str], Quantiles]) -> None:
    plain = ttft[2.90, "plain"]
    assert plain.mean == pytest.approx(5.7, rel=0.10)
    assert plain.p90 == pytest.approx(11.5, rel=0.10)
    assert 16 < plain.p99 < 26


@pytest.mark.parametrize("gate", STUDY["gates"], ids=lambda gate: f"{gate['discipline']} at {gate['rate']}")
def test_triage_takes_no_more_than_this_part_of_it(
    ttft: dict[tuple[float, str], Quantiles], gate: dict[str, Any]
) -> None:
    found, plain = ttft[gate["rate"], gate["discipline"]], ttft[gate["rate"], "plain"]
    assert found.p90 / plain.p90 <= gate["p90"]
    assert found.p99 / plain.p99 <= gate["p99"]


@pytest.mark.parametrize("row", RATIOS, ids=lambda row: f"{row['discipline']} at {row['rate']}")
def test_the_ratios_of_mean_and_p90(ttft: dict[tuple[float, str], Quantiles], row: dict[str, Any]) -> None:
    found, plain = ttft[row["rate"], row["discipline"]], ttft[row["rate"], "plain"]
    for key in ("mean", "p90"):
        expected, half = row["ratios"][key]
        ratio = getattr(found, key) / getattr(plain, key)
        assert ratio == pytest.approx(expected, abs=SPREAD[row["rate"]] + half), key


@pytest.mark.parametrize("load", [2.90, 3.02])
def test_steal_is_better_than_plain_in_everything(ttft: dict[tuple[float, str], Quantiles], load: float) -> None:
    found, plain = ttft[load, "steal"], ttft[load, "plain"]
    for key in ("mean", "p50", "p90", "p99", "longest"):
        assert getattr(found, key) < getattr(plain, key), key
