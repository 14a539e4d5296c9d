"""Time to first token: exact with no load, and near the study's simulations with queues."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.planner.latency import erlang_c, under_load, wait, zero_load
from prfaas.planner.setting import Setting, Split
from prfaas.planner.throughput import Model
from tests.planner.cases import H200, PAPER, topology, workload

KEPT = Setting({"h20": Split(3, 5)}, {"east": 19_400})


def test_no_load_is_prefill_and_transfer() -> None:
    model = Model(workload(), topology())
    naive = Setting({"h20": Split(0, 8)}, {"east": 0})
    found = zero_load(model, model.parts(naive))
    at = model.workload.quantile(0.9)
    alone = H200.prefill.seconds(round(at)) + H200.kv.bytes(round(at)) * 8 / 1e9 / 100
    assert found.p90 == pytest.approx(alone, rel=1e-3)
    loaded = under_load(model, naive, 1e-6)
    assert loaded is not None
    assert loaded.mean == pytest.approx(found.mean, rel=1e-3)
    assert loaded.p90 == pytest.approx(found.p90, rel=0.02), "lengths are sampled coarser, as waits smooth them"


@pytest.mark.parametrize(("rate", "mean", "p90", "p99"), PAPER["plain_under_load"])
def test_near_the_simulated_plain_threshold(rate: float, mean: float | None, p90: float, p99: float) -> None:
    found = under_load(Model(workload(), topology()), KEPT, rate)
    assert found is not None
    if mean is not None:
        assert found.mean == pytest.approx(mean, rel=0.03)
    assert found.p90 == pytest.approx(p90, rel=0.05)
    assert found.p99 == pytest.approx(p99, rel=0.08)


def test_at_nine_tenths_of_the_papers_rate() -> None:
    found = under_load(Model(workload(), topology()), KEPT, 0.9 * 3.229)
    assert found is not None
    assert found.mean == pytest.approx(5.7, rel=0.10)
    assert found.p90 == pytest.approx(11.5, rel=0.10)


def test_what_cannot_be_served_has_no_latency() -> None:
    model = Model(workload(), topology())
    assert under_load(model, KEPT, model.loads(KEPT).lambda_max * 1.001) is None


def test_erlang_and_the_waits_that_are_known() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    mm1 = wait(1, 0.8, 1.0, 2.0)
    md1 = wait(1, 0.8, 1.0, 1.0)
    mg1 = wait(1, 0.8, 1.0, 5.0)
    assert mm1 is not None
    assert mm1.mean == pytest.approx(4.0)
    assert md1 is not None
    assert md1.mean == pytest.approx(2.0)
    assert mg1 is not None
    assert mg1.mean == pytest.approx(0.8 * 5 / (2 * 0.2)), "Pollaczek-Khinchine"
    assert wait(3, 3.0, 1.0, 1.0) is None
    assert wait(0, 0.1, 1.0, 1.0) is None
    idle = wait(3, 0.0, 1.0, 1.0)
    assert idle is not None
    assert idle.mean == 0


@given(servers=st.integers(1, 200), load=st.floats(0.01, 0.99), variation=st.floats(0, 4), more=st.floats(0.001, 0.5))
def test_waits_grow_with_load_and_variation(servers: int, load: float, variation: float, more: float) -> None:
    here = wait(servers, servers * load, 1.0, 1 + variation)
    assert here is not None
    assert math.isfinite(here.mean)
    assert 0 <= here.chance <= 1
    varied = wait(servers, servers * load, 1.0, 1 + variation + more)
    busier = wait(servers, servers * (load + (1 - load) * more), 1.0, 1 + variation)
    assert varied is not None
    assert varied.mean >= here.mean * (1 - 1e-9)
    assert busier is not None
    assert busier.mean >= here.mean * (1 - 1e-9)
