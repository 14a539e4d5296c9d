"""Whatever is described, a plan keeps to every bound, or PlanError says why there is none: nothing else is raised."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from prfaas.api.profile import KVProfile, PrefillCoefficients, PrefillPoint, PrefillProfile, Profile
from prfaas.api.profiles import shipped
from prfaas.planner.errors import PlanError
from prfaas.planner.plan import plan
from prfaas.planner.setting import Goal, Objective, ServiceTime
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.planner.workload import Bucket, Histogram, Workload

PROFILES = [shipped(name) for name in ("H200x8", "H20x8", "RubinCPXx8")]
GOALS: list[Goal] = ["throughput", "latency", "cost"]
TIMES: list[ServiceTime] = ["mean", "representative"]


def drawn_profile(draw: random.Random) -> Profile:
    """A shipped profile, or one with points, without a quadratic, with a high floor, with a KV cache of nothing."""
    profile = draw.choice(PROFILES)
    kind = draw.random()
    if kind < 0.2:
        tokens = [*sorted(draw.sample(range(1, 400_000), 4)), 400_001]
        seconds = sorted(draw.uniform(0.01, 50) for _ in tokens)
        points = tuple(PrefillPoint(tokens=x, seconds=y) for x, y in zip(tokens, seconds, strict=True))
        profile = profile.model_copy(update={"prefill": PrefillProfile(points=points)})
    elif kind < 0.4:
        a, b, c = draw.choice((0.001, 0.4, 5.0)), draw.choice((0.0, 0.1, 1.0)), draw.choice((0.0, 1e-4, 1e-2))
        coefficients = PrefillCoefficients(a=a, b=b, c=c, floor=draw.choice((0.0, 0.5, 10.0)))
        profile = profile.model_copy(update={"prefill": PrefillProfile(coefficients=coefficients)})
    if draw.random() < 0.2:
        kv = KVProfile(fixed_bytes=draw.choice((0, 10**9)), bytes_per_token=draw.choice((0, 250_000)))
        profile = profile.model_copy(update={"kv": kv})
    return profile


def drawn_topology(draw: random.Random, pools: int) -> Topology:
    """Pools of no or many instances, bounds of all kinds, shared and slow lines. Raises PlanError where they clash."""
    prfaas = tuple(
        PrfaaSPool(f"r{i}", drawn_profile(draw), draw.randint(0, 4), draw.choice((0.0, 1.0, 2.5)))
        for i in range(draw.randint(0, pools))
    )
    given = draw.random() < 0.4
    pd = tuple(
        PDPool(
            f"p{j}",
            drawn_profile(draw),
            draw.choice((0, 2, 3, 6, 40)),
            min_prefill=draw.choice((0, 1)),
            max_prefill=draw.choice((None, None, 2)),
            min_decode=draw.choice((0, 1)),
            max_decode=draw.choice((None, None, 5)),
            rdma_gbps=draw.choice((10.0, 800.0)),
            demand=draw.choice((0.0, 1.0, 3.0)) if given else None,
        )
        for j in range(draw.randint(1, pools))
    )
    links = tuple(
        Link(
            r.name + p.name,
            r.name,
            p.name,
            draw.choice((0.1, 1.0, 10.0, 100.0, 1_000.0)),
            line=draw.choice((None, "shared")),
            measured_gbps=draw.choice((None, 5.0)),
            flow_gbps=draw.choice((None, 2.0)),
            headroom=draw.choice((0.0, 0.3)),
            allowance=draw.choice((0.0, 0.2, 1.0, 1.0)),
            min_threshold=draw.choice((0, 0, 30_000)),
            max_threshold=draw.choice((None, None, 60_000)),
        )
        for r in prfaas
        for p in pd
        if draw.random() < 0.7
    )
    return Topology(prfaas, pd, links)


def drawn_workload(draw: random.Random) -> Workload:
    """Narrow and wide, one length only, with and without answers and prefixes."""
    kind = draw.random()
    if kind < 0.4:
        mu, sigma = draw.uniform(4, 11), draw.uniform(0.05, 2)
        output, cached = draw.choice((0.0, 1.0, 100.0, 4_000.0)), draw.choice((0.0, 50_000.0))
        return Workload.log_normal(mu=mu, sigma=sigma, lo=1, hi=200_000, output=output, cached=cached)
    if kind < 0.6:
        length = draw.choice((0.0, 1.0, 500.0, 99_999.0))
        return Workload.constant(uncached=length, output=draw.choice((0.0, 100.0)), cached=draw.choice((0.0, 1_000.0)))
    edges = sorted(draw.sample(range(150_000), draw.randint(2, 9)))
    counts = [draw.uniform(0.1, 1) for _ in edges[1:]]
    buckets = (
        Bucket(float(a), float(b), n, n * draw.choice((0, 1_000, 40_000)), n * draw.uniform(1, 4_000))
        for (a, b), n in zip(pairwise(edges), counts, strict=True)
    )
    return Histogram(tuple(buckets)).workload()


def check(seed: int, pools: int) -> None:
    """Plan one drawn case, whatever it is."""
    draw = random.Random(seed)
    try:
        on, of = drawn_topology(draw, pools), drawn_workload(draw)
        rate, bound = draw.choice((0.01, 0.3, 1.0, 5.0)), draw.choice((None, 5.0, 20.0))
        objective = Objective(draw.choice(GOALS), rate, bound, draw.choice(TIMES))
        found = plan(of, on, objective)
    except PlanError:
        return
    for pd in on.pd:
        split = found.setting.splits[pd.name]
        assert split.prefill + split.decode <= pd.instances
        if pd.instances and split.prefill + split.decode:
            assert pd.min_prefill <= split.prefill <= (pd.max_prefill if pd.max_prefill is not None else pd.instances)
            assert pd.min_decode <= split.decode <= (pd.max_decode if pd.max_decode is not None else pd.instances)
    for link in on.links:
        cut = found.setting.thresholds.get(link.name)
        highest = None if link.max_threshold is None else max(link.max_threshold, link.min_threshold)
        assert cut is None or (cut >= link.min_threshold and (highest is None or cut <= highest))
    assert max(found.expected.utilisation.values()) <= 1 + 1e-6
    assert 0 < found.expected.lambda_max <= found.bound * (1 + 1e-9)
    assert -1e-9 <= found.gap <= 1
    if pools < 3:  # a plan for each pool: the long run has enough of them
        assert min(found.sensitivities.per_instance.values()) >= 0


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 60, 10)], ids=lambda seeds: f"from {seeds[0]}")
def test_up_to_two_pools_of_each_kind(seeds: range) -> None:
    for seed in seeds:
        check(seed, 2)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 1_000, 50)], ids=lambda seeds: f"from {seeds[0]}")
def test_up_to_three_pools_of_each_kind(seeds: range) -> None:
    for seed in seeds:
        check(seed, 3)
