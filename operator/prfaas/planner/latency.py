"""The time to first token: exactly with no load, and approximately with queues.

With no load TTFT = T(L | x) + S(L) / transfer rate, L distributed as the workload says: that is how the paper's Table 6
was computed (no queue, the transfer not hidden behind the prefill).

At a rate lambda three waits come on top, taken as independent:

    prefill     M/G/k, k instances. Mean wait: Erlang's M/M/k, corrected for the variation c^2 of T by Kimura's
                interpolation between M/D/k (Cosmetatos) and M/M/k for c^2 <= 1, by Lee and Longton's factor
                (1 + c^2) / 2 above that
    decode      M/G/k again, k = Nd * BS_max slots; a slot is held from the prefill's start to the last token
    line        processor sharing: a transfer gets min(flow limit, rate * (1 - utilisation))

A wait is 0 with probability 1 - P(wait), else exponential, as it is in heavy traffic. Routing that moves work between
pools (spill, steal) waits less: this is the plain threshold. docs/model.md states the error against the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.planner.curve import Curve
from prfaas.planner.setting import Latency, Setting
from prfaas.planner.throughput import Model, Part
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, kv_curve, seconds_curve
from prfaas.planner.workload import Request

ZERO_LOAD_POINTS = 4000
POINTS = 400
"""Lengths at which the distribution of TTFT is evaluated, over all parts."""


@dataclass(frozen=True)
class Wait:
    """A waiting time: 0 with probability 1 - `chance`, else exponential of mean `mean_if`, seconds."""

    chance: float
    mean_if: float

    @property
    def mean(self) -> float:
        """Mean wait of all, seconds."""
        return self.chance * self.mean_if


NO_WAIT = Wait(0.0, 0.0)


def erlang_c(servers: int, load: float) -> float:
    """P(wait) of M/M/k with `load` = arrival rate * service time, below `servers`."""
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = load * blocked / (k + load * blocked)
    return blocked / (1 - (load / servers) * (1 - blocked))


def wait(servers: int, rate: float, mean: float, second: float) -> Wait | None:
    """The wait of M/G/k: arrivals/s, E[T] and E[T^2] of the service, s and s^2; None: the queue grows for ever."""
    load = rate * mean
    if load <= 0:
        return NO_WAIT
    if servers <= 0 or load >= servers:
        return None
    chance = erlang_c(servers, load)
    mmk = chance * mean / (servers - load)
    variation = max(0.0, second / (mean * mean) - 1)
    rho = load / servers
    if variation <= 1:
        correction = (1 - rho) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * rho * servers)
        mdk = min(mmk, 0.5 * mmk * (1 + correction))
        waiting = (1 + variation) / (2 * variation / mmk + (1 - variation) / mdk) if mmk > 0 else 0.0
    else:
        waiting = mmk * (1 + variation) / 2
    return Wait(chance, waiting / chance) if chance > 0 else NO_WAIT


def zero_load(model: Model, parts: Sequence[Part]) -> Latency:
    """TTFT with no load, seconds, of requests that are divided into `parts`."""
    mean = 0.0
    for part in parts:
        server, rate = _server(model, part)
        mean += part.share * model.work(server).over(part.lo, part.hi)
        mean += part.share * model.gbit(server).over(part.lo, part.hi) / rate
    points = max(200, ZERO_LOAD_POINTS // max(1, len(parts)))
    bases = sorted(each for part in parts for each in _bases(model, part, _server(model, part)[1], points))
    return Latency(mean, *(_quantile(bases, q) for q in (0.5, 0.9, 0.99)))


def under_load(model: Model, setting: Setting, rate: float) -> Latency | None:
    """TTFT at `rate` requests/s in all, seconds; None where a queue would grow for ever."""
    rows = _rows(model, setting, rate, POINTS)
    if not rows:
        return None
    total = sum(mass for _, mass, _, _ in rows)
    mean = sum(mass * (base + one.mean + two.mean) for base, mass, one, two in rows) / total
    return Latency(mean, *(_loaded_quantile(rows, total, q) for q in (0.5, 0.9, 0.99)))


def p90_under_load(model: Model, setting: Setting, rate: float) -> float:
    """The P90 alone, on a quarter of the lengths: for search. inf where a queue would grow for ever."""
    rows = _rows(model, setting, rate, POINTS // 4)
    if not rows:
        return math.inf
    return _loaded_quantile(rows, sum(mass for _, mass, _, _ in rows), 0.9, steps=17)


Timed = tuple[float, float, Wait, Wait]
"""Prefill and transfer time, share of all requests, and the two waits before it."""


def _rows(model: Model, setting: Setting, rate: float, points: int) -> list[Timed] | None:
    loads = model.loads(setting)
    parts = model.parts(setting)
    queues = _prefill_waits(model, parts, rate, loads.capacity)
    if queues is None:
        return None
    lines = {name: rate * need / loads.capacity[name] for name, need in loads.need.items() if name.startswith("line/")}
    if any(used >= 1 for used in lines.values()):
        return None
    links = {link.name: link for link in model.topology.links}
    rows: list[Timed] = []
    held: dict[str, float] = {}
    reached: dict[str, float] = {}
    drawn: list[tuple[Part, list[tuple[float, float]]]] = []
    for part in parts:
        speed = _server(model, part)[1]
        if part.link is not None:
            link = links[part.link]
            speed = min(speed, link.usable_gbps * (1 - lines[f"line/{link.line_name}"]))
        bases = _bases(model, part, speed, max(points // 8, points // len(parts)))
        drawn.append((part, bases))
        for base, mass in bases:
            held[part.pd] = held.get(part.pd, 0.0) + mass * base
            reached[part.pd] = reached.get(part.pd, 0.0) + mass
    slots: dict[str, Wait] = {}
    for pd in model.topology.pd:
        if reached.get(pd.name, 0.0) <= 0:
            continue
        before = held[pd.name] / reached[pd.name]
        found = _slot_wait(model, pd, setting.splits[pd.name].decode, rate * reached[pd.name], before)
        if found is None:
            return None
        slots[pd.name] = found
    for part, bases in drawn:
        rows += [(base, mass, queues[_queue(model, part)], slots[part.pd]) for base, mass in bases]
    return rows


def _prefill_waits(
    model: Model, parts: Sequence[Part], rate: float, capacity: Mapping[str, float]
) -> dict[str, Wait] | None:
    """The wait before each pool's prefill instances, by resource; None where one grows for ever."""
    sums: dict[str, list[float]] = {}
    for part in parts:
        server, _ = _server(model, part)
        found = sums.setdefault(_queue(model, part), [0.0, 0.0, 0.0])
        found[0] += part.share * model.count(part.lo, part.hi)
        found[1] += part.share * model.work(server).over(part.lo, part.hi)
        found[2] += part.share * model.work_squared(server).over(part.lo, part.hi)
    waits = {}
    for name, (share, first, second) in sums.items():
        if share <= 1e-12:
            waits[name] = NO_WAIT
            continue
        each = wait(int(capacity[name]), rate * share, first / share, second / share)
        if each is None:
            return None
        waits[name] = each
    return waits


def _slot_wait(model: Model, pd: PDPool, decoders: int, rate: float, before: float) -> Wait | None:
    """The wait for a decode slot of a pool that gets `rate` requests/s; `before`: mean seconds held before decode."""
    per_instance = model.decode_rate(pd)
    if math.isinf(per_instance):
        return NO_WAIT
    batch = pd.profile.decode.max_batch
    hold = batch / per_instance + before
    return wait(decoders * batch, rate, hold, hold * hold)


def _queue(model: Model, part: Part) -> str:
    if part.link is None:
        return f"prefill/{part.pd}"
    return f"prfaas/{next(link.prfaas for link in model.topology.links if link.name == part.link)}"


def _server(model: Model, part: Part) -> tuple[PrfaaSPool | PDPool, float]:
    """Who prefills a part, and the rate of a single transfer, Gbit/s."""
    if part.link is None:
        pd = model.topology.pd_pool(part.pd)
        return pd, pd.rdma_gbps
    link: Link = next(link for link in model.topology.links if link.name == part.link)
    return model.topology.pool(link.prfaas), link.transfer_gbps


def _bases(model: Model, part: Part, gbps: float, points: int) -> list[tuple[float, float]]:
    """(prefill and transfer time, share of all requests) at `points` quantiles of a part's lengths."""
    share = part.share * model.count(part.lo, part.hi)
    if share <= 1e-12:
        return []
    server, _ = _server(model, part)
    gbit = kv_curve(server.profile)
    curves: dict[float, Curve] = {}
    low, high = model.count(-1.0, part.lo), model.count(-1.0, part.hi)

    def base(request: Request) -> float:
        seconds = curves.get(request.cached)
        if seconds is None:
            seconds = curves[request.cached] = seconds_curve(server.profile, request.cached)
        return seconds(request.uncached) + gbit(request.uncached) / gbps

    at = (model.workload.at(low + (high - low) * (i + 0.5) / points) for i in range(points))
    return [(base(request), share / points) for request in at]


def _quantile(bases: Sequence[tuple[float, float]], q: float) -> float:
    """The q-quantile of sorted (value, mass), between neighbours by a straight line."""
    if not bases:
        return 0.0
    goal = q * sum(mass for _, mass in bases)
    below, last = 0.0, bases[0][0]
    for value, mass in bases:
        if below + mass / 2 >= goal:
            return last + (value - last) * min(1.0, max(0.0, (goal - (below - mass / 2)) / mass))
        below, last = below + mass, value
    return last


def _loaded_quantile(rows: Sequence[Timed], total: float, q: float, steps: int = 24) -> float:
    late = (1 - q) * total
    low, high = 0.0, max(base for base, *_ in rows) + 60.0

    def above(y: float) -> float:
        return sum(mass * _later(one, two, y - base) for base, mass, one, two in rows)

    while above(high) > late:
        low, high = high, high * 2
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) > late else (low, middle)
    return (low + high) / 2


def _later(one: Wait, two: Wait, x: float) -> float:
    """P(sum of the two waits > x)."""
    if x < 0:
        return 1.0
    if two.chance < 1e-9 or two.mean_if <= 0:
        return one.chance * math.exp(-x / one.mean_if) if one.mean_if > 0 else 0.0
    if one.chance < 1e-9 or one.mean_if <= 0:
        return two.chance * math.exp(-x / two.mean_if)
    a, b = one.mean_if, two.mean_if
    if abs(a - b) < 1e-6 * (a + b):
        b = a * (1 + 1e-5)
    first, second = math.exp(-x / a), math.exp(-x / b)
    both = (a * first - b * second) / (a - b)
    return (
        one.chance * (1 - two.chance) * first + two.chance * (1 - one.chance) * second + one.chance * two.chance * both
    )
