"""Any number of pools: against a MILP on a grid of lengths, solved by HiGHS, and against the planner's own bound."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from prfaas.api.profiles import shipped
from prfaas.planner.curve import line
from prfaas.planner.network import search
from prfaas.planner.plan import plan
from prfaas.planner.relaxation import envelope
from prfaas.planner.setting import Objective
from prfaas.planner.simplex import LinearProgram
from prfaas.planner.throughput import Model
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology, kv_curve, seconds_curve
from prfaas.planner.workload import Workload
from tests.planner.cases import H20, H200, best, topology, workload

pytestmark = pytest.mark.slow

CPX = shipped("RubinCPXx8")


def milp_rate(of: Workload, on: Topology, cells: int = 400) -> float:
    """The best rate by a MILP: shares of cells of equal probability, whole Np; the cells' means stand for them.

    Nothing of the planner's optimiser is used: other variables, another solver, numerical instead of closed forms.
    """
    places: list[tuple[int, Link | None]] = [(j, None) for j in range(len(on.pd))]
    places += [([p.name for p in on.pd].index(link.pd), link) for link in on.links]
    fine = [of.at((i + 0.5) / (cells * 4)).uncached for i in range(cells * 4)]
    rows: list[np.ndarray[Any, Any]] = []
    upper: list[float] = []
    n_x, n_pd = len(places) * cells, len(on.pd)
    size = n_x + 2 * n_pd  # x[place, cell] requests/s, Np[j], rate[j]

    def row() -> np.ndarray[Any, Any]:
        rows.append(np.zeros(size))
        return rows[-1]

    def seconds(profile: Any) -> np.ndarray[Any, Any]:
        values = np.array([profile(length) for length in fine])
        means: np.ndarray[Any, Any] = values.reshape(cells, 4).mean(axis=1)
        return means

    for pool in on.prfaas:
        each = row()
        for k, (_, link) in enumerate(places):
            if link is not None and link.prfaas == pool.name:
                each[k * cells : (k + 1) * cells] = seconds(seconds_curve(pool.profile))
        upper.append(pool.instances)
    for name, gbps in on.lines.items():
        each = row()
        for k, (_, link) in enumerate(places):
            if link is not None and link.line_name == name:
                each[k * cells : (k + 1) * cells] = seconds(kv_curve(on.pool(link.prfaas).profile))
        upper.append(gbps)
    lower_bounds, upper_bounds = np.zeros(size), np.full(size, np.inf)
    for j, pd in enumerate(on.pd):
        each = row()
        each[j * cells : (j + 1) * cells] = seconds(seconds_curve(pd.profile))
        each[n_x + j] = -1
        upper.append(0.0)
        each = row()
        each[n_x + n_pd + j] = 1 / pd.decode_rate(of.output, 0)
        each[n_x + j] = 1
        upper.append(pd.instances)
        lower_bounds[n_x + j], upper_bounds[n_x + j] = pd.splits()[0], pd.splits()[-1]
    equal, right = [], []
    for j in range(n_pd):
        for cell in range(cells):
            each = np.zeros(size)
            for k, (pool_index, _) in enumerate(places):
                if pool_index == j:
                    each[k * cells + cell] = cells
            each[n_x + n_pd + j] = -1
            equal.append(each)
            right.append(0.0)
    demand = [pd.demand for pd in on.pd]
    if demand[0] is not None:
        total = sum(d for d in demand if d is not None)
        for j in range(1, n_pd):
            each = np.zeros(size)
            each[n_x + n_pd + j], each[n_x + n_pd] = (demand[0] or 0) / total, -(demand[j] or 0) / total
            equal.append(each)
            right.append(0.0)
    goal = np.zeros(size)
    goal[n_x + n_pd :] = -1
    whole = np.zeros(size)
    whole[n_x : n_x + n_pd] = 1
    found = milp(
        goal,
        integrality=whole,
        bounds=Bounds(lower_bounds, upper_bounds),
        constraints=[
            LinearConstraint(np.array(rows), -np.inf, np.array(upper)),
            LinearConstraint(np.array(equal), np.array(right), np.array(right)),
        ],
        options={"mip_rel_gap": 1e-5},
    )
    assert found.success, found.message
    return float(-found.fun)


def several(seed: int, remote: int, local: int, *, instances: int, gbps: float, demand: bool = False) -> Topology:
    """Pools of different sizes and kinds, joined by links of different rates, some over one line."""
    draw = random.Random(seed)
    prfaas = tuple(
        PrfaaSPool(f"r{i}", CPX if draw.random() < 0.25 else H200, draw.randint(1, instances)) for i in range(remote)
    )
    pd = tuple(
        PDPool(f"p{j}", H20, draw.randint(3, 2 * instances), demand=draw.randint(1, 4) if demand else None)
        for j in range(local)
    )
    links = []
    for i in range(remote):
        rate = gbps * draw.uniform(0.05, 1)
        shared = f"line{i}" if draw.random() < 0.5 else None
        links += [Link(f"l{i}{j}", f"r{i}", f"p{j}", rate, shared) for j in range(local)]
    return Topology(prfaas, pd, tuple(links))


@pytest.mark.parametrize(
    ("seed", "remote", "local", "instances", "gbps", "demand"),
    [
        (1, 1, 1, 6, 40, False),
        (2, 2, 1, 4, 20, False),
        (3, 1, 2, 5, 30, False),
        (4, 2, 2, 4, 15, False),
        (5, 2, 2, 4, 30, True),
        (6, 3, 2, 5, 60, False),
    ],
)
def test_within_half_a_per_cent_of_a_milp(
    seed: int, remote: int, local: int, instances: int, gbps: float, demand: bool
) -> None:
    on = several(seed, remote, local, instances=instances, gbps=gbps, demand=demand)
    of = workload()
    expected = milp_rate(of, on, cells=60)
    found = search(Model(of, on, "mean"))
    assert found.rate >= expected * (1 - 0.005), "the plan is near the best there is"
    assert found.bound >= expected * (1 - 1e-3), "the bound is one (the MILP's cells are a little coarse)"
    assert found.rate <= found.bound
    assert 1 - found.rate / found.bound <= 0.005


@pytest.mark.parametrize("seed", range(8))
def test_the_stated_gap_is_small(seed: int) -> None:
    draw = random.Random(seed)
    on = several(seed, draw.randint(1, 4), draw.randint(1, 4), instances=12, gbps=80, demand=seed % 2 == 0)
    found = search(Model(workload(), on, "mean"))
    assert 0 <= 1 - found.rate / found.bound <= 0.005


def ten_thousand() -> Topology:
    """4 PrfaaS pools and 4 PD pools, 16 links: 10,176 GPUs."""
    draw = random.Random(1)
    prfaas = tuple(PrfaaSPool(f"r{i}", H200, 156 + i) for i in range(4))
    pd = tuple(PDPool(f"p{j}", H20, 156 + 3 * j) for j in range(4))
    links = tuple(Link(f"l{i}{j}", f"r{i}", f"p{j}", 1_000 * draw.uniform(0.02, 1)) for i in range(4) for j in range(4))
    return Topology(prfaas, pd, links)


def test_ten_thousand_gpus_in_a_second_of_one_core() -> None:
    on = ten_thousand()
    assert on.gpus >= 10_000
    before = time.process_time()
    found = plan(workload(), on, Objective())
    used = time.process_time() - before
    assert found.gap <= 0.005
    assert found.expected.lambda_max == pytest.approx(410.67, rel=2e-3)
    assert used < 1.0, f"{used:.2f} s"


@pytest.mark.parametrize("service_time", ["mean", "representative"])
def test_one_of_each_is_the_exact_optimum(service_time: Any) -> None:
    for gbps in (100.0, 10.0, 2.5):
        on = topology(gbps=gbps)
        exact = best(workload(), on, service_time)
        found = search(Model(workload(), on, service_time), gap=1e-5)
        assert found.rate == pytest.approx(exact.rate, rel=1e-4)
        assert found.bound >= exact.rate * (1 - 1e-9)


def test_pools_that_are_alike_are_one_pool() -> None:
    whole = topology(8, 16, 40.0)
    halves = Topology(
        tuple(replace(whole.prfaas[0], name=f"r{i}", instances=4) for i in range(2)),
        tuple(replace(whole.pd[0], name=f"p{j}", instances=8) for j in range(2)),
        tuple(Link(f"l{i}{j}", f"r{i}", f"p{j}", 20.0, f"line{i}") for i in range(2) for j in range(2)),
    )
    one, two = (search(Model(workload(), on, "mean")) for on in (whole, halves))
    assert two.rate == pytest.approx(one.rate, rel=0.005)


def test_who_may_not_leave_stays() -> None:
    on = topology(allowance=0.4)
    found = plan(workload(), on, Objective())
    assert found.expected.offload_share <= 0.4
    assert found.expected.lambda_max < plan(workload(), topology(), Objective()).expected.lambda_max
    both = replace(
        on,
        prfaas=(*on.prfaas, PrfaaSPool("more", H200, 2)),
        links=(*on.links, Link("more", "more", "h20", 50.0, allowance=0.1)),
    )
    found = plan(workload(), both, Objective())
    assert found.gap <= 0.005
    assert found.expected.offload_share <= 0.4


@given(
    st.lists(st.tuples(st.floats(0.1, 9), st.floats(0, 1e-4), st.floats(0, 1e-9)), min_size=2, max_size=5),
    st.lists(st.floats(0.0, 1e5), min_size=1, max_size=20),
)
def test_an_envelope_is_the_lowest_everywhere(polynomials: list[tuple[float, float, float]], at: list[float]) -> None:
    curves = [replace(line(0, 0), pieces=(p,)) for p in polynomials]
    pieces = envelope(curves, 0.0, 1e5)
    assert pieces[0][0] == 0.0
    assert pieces[-1][1] == 1e5
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    for x in at:
        index = next(i for lo, hi, i in pieces if lo <= x <= hi)
        assert curves[index](x) == pytest.approx(min(curve(x) for curve in curves), rel=1e-9)


@run(max_examples=60)
@given(st.integers(0, 10_000))
def test_the_simplex_agrees_with_highs(seed: int) -> None:
    draw = random.Random(seed)
    rows, columns = draw.randint(1, 6), draw.randint(1, 7)
    matrix = [[draw.choice((0.0, draw.uniform(-1, 3))) for _ in range(columns)] for _ in range(rows)]
    matrix.append([1.0] * columns)  # bounds it
    bounds = [draw.choice((0.0, draw.uniform(0, 5))) for _ in range(rows)] + [10.0]
    gains = [draw.uniform(-1, 2) for _ in range(columns)]
    program = LinearProgram(bounds)
    half = columns // 2
    for j in range(columns):
        if j == half:
            program.solve()  # columns that come later must make no difference
        program.add(gains[j], {i: row[j] for i, row in enumerate(matrix) if row[j]})
    value = program.solve()
    expected = linprog([-g for g in gains], A_ub=matrix, b_ub=bounds, method="highs")
    assert value == pytest.approx(-expected.fun, abs=1e-7)
    assert sum(g * v for g, v in zip(gains, program.values, strict=True)) == pytest.approx(value, abs=1e-7)
    assert sum(p * b for p, b in zip(program.prices, bounds, strict=True)) == pytest.approx(value, abs=1e-7)


def test_a_program_without_end_says_so() -> None:
    program = LinearProgram([1.0])
    program.add(1.0, {0: -1.0})
    with pytest.raises(ValueError, match="has no bound"):
        program.solve()
    with pytest.raises(ValueError, match="must not be negative"):
        LinearProgram([-1.0])
