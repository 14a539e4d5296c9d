"""What profiles say to the planner: which are estimates; precision, context, speculation, promised speed."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from prfaas.api.kv_throughput import KVThroughput
from prfaas.api.profile import DecodeProfile, DecodeStep, KVProfile
from prfaas.api.profiles import shipped, shipped_names
from prfaas.planner.plan import plan
from prfaas.planner.setting import Objective, Split
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from tests.planner.cases import H20, topology, with_pd, workload


def test_estimates_are_marked() -> None:
    sources = {name: shipped(name).source for name in shipped_names()}
    assert sources == {"H200x8": "fitted", "H20x8": "fitted", "LPUx256": "assumed", "RubinCPXx8": "assumed"}


def test_parts_for_one_phase_can_be_planned_with() -> None:
    on = Topology(
        (PrfaaSPool("cpx", shipped("RubinCPXx8"), 2),),
        (PDPool("lpu", shipped("LPUx256"), 1, min_prefill=0),),
        (Link("east", "cpx", "lpu", 100.0),),
    )
    found = plan(workload(), on, Objective())
    assert found.setting.splits["lpu"] == Split(0, 1)
    assert found.expected.offload_share == pytest.approx(1)
    assert found.expected.lambda_max == pytest.approx(2 / shipped("RubinCPXx8").prefill.seconds(27_486), rel=0.1)


def test_half_the_precision_is_half_the_bytes() -> None:
    halved = KVProfile(fixed_bytes=1_000, bytes_per_token=10, scale=0.5)
    assert (halved.bytes(0), halved.bytes(100)) == (500, 1_000)
    on = topology(gbps=5.0)
    thin = on.prfaas[0].profile.model_copy(update={"kv": on.prfaas[0].profile.kv.model_copy(update={"scale": 0.5})})
    half = Topology((PrfaaSPool("h200", thin, 4),), on.pd, on.links)
    assert plan(workload(), half, Objective()).setting == plan(workload(), topology(gbps=10.0), Objective()).setting


def test_context_slows_decode() -> None:
    decode = DecodeProfile(
        steps=(DecodeStep(batch=1, seconds=0.02),), max_batch=32, seconds_per_context_token=1e-8, tokens_per_step=2.0
    )
    assert decode.step_seconds(10, 50_000) == pytest.approx(0.02 + 10 * 50_000 * 1e-8)
    assert decode.batch_within(80, 50_000) == 10, "2 tokens in 25 ms"
    assert decode.batch_within(80) == 32
    assert decode.batch_within(101, 50_000) == 0
    slow = H20.model_copy(update={"decode": H20.decode.model_copy(update={"seconds_per_context_token": 2e-8})})
    before, after = (
        plan(workload(), topology(), Objective()),
        plan(workload(), with_pd(topology(), profile=slow), Objective()),
    )
    assert after.expected.theta.decode / after.setting.splits["h20"].decode == pytest.approx(
        before.expected.theta.decode / 5 * 0.025 / (0.025 + 20 * (27_486 + 512) * 2e-8), rel=1e-3
    )


def test_two_tokens_a_step_are_twice_the_decode_rate() -> None:
    fast = H20.model_copy(update={"decode": H20.decode.model_copy(update={"tokens_per_step": 2.0})})
    assert PDPool("x", fast, 2).decode_rate(1024, 0) == pytest.approx(2 * 0.78125)


def test_kv_throughput_needs_rising_points() -> None:
    with pytest.raises(ValidationError, match=r"points\[1\]: 5 must be above the point before it"):
        KVThroughput(model="m", gpus=8, points=((5, 1.0), (5, 2.0)))
