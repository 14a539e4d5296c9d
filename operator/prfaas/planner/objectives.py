"""The objectives besides throughput: the lowest latency at a rate, and the lowest cost for a rate.

Both look at settings that the throughput model can tell apart, and compare them by the latency approximation. For one
PD pool and one link every split is tried, and the threshold by a scan and a golden section around its best point. For
more pools the thresholds of the throughput plan are scaled together, and pools are thinned one after the other, dearest
first: good, but not proven best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from prfaas.planner.errors import PlanError
from prfaas.planner.latency import p90_under_load
from prfaas.planner.network import held, search
from prfaas.planner.setting import Objective, Setting
from prfaas.planner.single import Pair, first
from prfaas.planner.throughput import Model
from prfaas.planner.topology import PDPool, PrfaaSPool, Topology

SCAN = 10
NARROW = 10
ENOUGH = 12
"""Splits that are scanned at most, those of the highest throughput first."""


def fastest(model: Model, pair: Pair | None, best: Setting, objective: Objective) -> Setting:
    """The setting of lowest P90 of TTFT at the objective's rate. PlanError where nothing serves that rate."""
    rate = _rate(objective)
    if rate >= model.loads(best).lambda_max:
        raise PlanError("rate", f"{rate:g} requests/s cannot be served: at most {model.loads(best).lambda_max:.3f}")
    if pair is None:
        return _scaled(model, best, rate)
    found = _fastest_of_pair(pair, rate)
    return found[1] if found is not None else best


def cheapest(model: Model, pair: Pair | None, objective: Objective) -> Setting:
    """The setting of lowest price that serves the rate within the bound on TTFT. PlanError where there is none."""
    rate = _rate(objective)
    if pair is None:
        return _thinned(model, objective, rate)
    for small in _by_price(pair, rate):
        if objective.ttft_p90_seconds is None:
            choice = small.choices()[0]
            return small.setting(choice.prefill, choice.threshold)
        found = _fastest_of_pair(small, rate)
        if found is not None and found[0] <= objective.ttft_p90_seconds:
            return found[1]
    raise _nothing(objective, rate)


def _by_price(pair: Pair, rate: float) -> Iterator[Pair]:
    """The pair with fewer instances that still serves the rate, cheapest first; of equal prices fewer remote ones."""
    remote = pair.pool.profile.gpus * pair.pool.gpu_price if pair.pool is not None else 0.0
    local = pair.pd.profile.gpus * pair.pd.gpu_price
    least, most = pair.pd.min_prefill + pair.pd.min_decode, pair.pd.instances

    def enough(r: int, n: int) -> bool:
        if n > most:
            return True
        small = _smaller(pair, r, n)
        return small is not None and small.choices()[0].rate > rate

    numbers = []
    for r in range(pair.instances + 1):
        fewest = first(least, most + 1, partial(enough, r))
        numbers += [(r * remote + n * local, r, n) for n in range(fewest, most + 1)]
    for _, r, n in sorted(numbers):
        small = _smaller(pair, r, n)
        if small is not None:
            yield small


def _smaller(pair: Pair, remote: int, local: int) -> Pair | None:
    pd = replace(pair.pd, instances=local)
    if not pd.splits():
        return None
    topology = replace(pair.model.topology, pd=(pd,))
    model = Model(pair.model.workload, topology, pair.model.service_time)
    return Pair(model, pd, pair.link, remote)


def _fastest_of_pair(pair: Pair, rate: float) -> tuple[float, Setting] | None:
    found: list[tuple[float, int, Setting]] = []
    serving = [choice for choice in pair.choices() if choice.rate > rate][:ENOUGH]

    def p90(setting: Setting) -> float:
        return p90_under_load(pair.model, setting, rate)

    def local_is_full(np: int, t: int) -> bool:
        return np * pair.home(t) <= rate

    def p90_at(np: int, t: int) -> float:
        return p90(pair.setting(np, t))

    for choice in serving:
        local = pair.setting(choice.prefill, None)
        link = pair.link
        if link is None or link.max_threshold is None:
            found.append((p90(local), choice.prefill, local))
        if link is None or pair.instances == 0:
            continue
        most = pair.longest if link.max_threshold is None else max(link.min_threshold, link.max_threshold)
        low = first(link.min_threshold, max(link.min_threshold, most), lambda t: pair.out(t) > rate)
        high = first(low, max(low, most), partial(local_is_full, choice.prefill))
        t = _lowest(partial(p90_at, choice.prefill), low, high)
        setting = pair.setting(choice.prefill, t)
        found.append((p90(setting), choice.prefill, setting))
    best = min(found, key=lambda each: each[:2], default=None)
    return None if best is None or math.isinf(best[0]) else (best[0], best[2])


def _lowest(value: Callable[[int], float], low: int, high: int) -> int:
    """Where a function is lowest: a scan, then sections around the lowest point. Few evaluations: each is dear."""
    points = sorted({low + round((high - low) * i / SCAN) for i in range(SCAN + 1)})
    values = {t: value(t) for t in points}
    for _ in range(NARROW):
        at = min(values, key=lambda t: (values[t], t))
        known = sorted(values)
        place = known.index(at)
        below, above = known[max(0, place - 1)], known[min(len(known) - 1, place + 1)]
        middle = (at + above) // 2 if above - at >= at - below else (below + at) // 2
        if middle in values:
            break
        values[middle] = value(middle)
    return min(values, key=lambda t: (values[t], t))


def _scaled(model: Model, best: Setting, rate: float) -> Setting:
    found = []
    for factor in (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0):
        cuts = {name: held(model, name, t * factor) for name, t in best.thresholds.items()}
        setting = replace(best, thresholds=cuts)
        found.append((p90_under_load(model, setting, rate), abs(factor - 1), setting))
    return min(found, key=lambda each: each[:2])[2]


def _thinned(model: Model, objective: Objective, rate: float) -> Setting:
    topology = model.topology
    if _serves(model, objective, rate) is None:
        raise _nothing(objective, rate)
    pools: list[PrfaaSPool | PDPool] = [*topology.prfaas, *topology.pd]
    for pool in sorted(pools, key=lambda each: (-each.profile.gpus * each.gpu_price, each.name)):
        least = pool.min_prefill + pool.min_decode if isinstance(pool, PDPool) else 0

        thinner = partial(_with, model, topology, pool.name)
        fewest = first(min(least, pool.instances), pool.instances, partial(_enough, thinner, objective, rate))
        topology = thinner(fewest).topology
    setting = _serves(Model(model.workload, topology, model.service_time), objective, rate)
    if setting is None:
        raise _nothing(objective, rate)
    return replace(setting, prfaas={pool.name: pool.instances for pool in topology.prfaas})


def _enough(thinner: Callable[[int], Model], objective: Objective, rate: float, count: int) -> bool:
    return _serves(thinner(count), objective, rate) is not None


def _with(model: Model, topology: Topology, name: str, count: int) -> Model:
    prfaas = tuple(replace(pool, instances=count) if pool.name == name else pool for pool in topology.prfaas)
    pd = tuple(replace(pool, instances=count) if pool.name == name else pool for pool in topology.pd)
    return Model(model.workload, replace(topology, prfaas=prfaas, pd=pd), model.service_time)


def _serves(model: Model, objective: Objective, rate: float) -> Setting | None:
    try:
        found = search(model)
    except PlanError:
        return None  # too few instances for any split
    if found.rate <= rate:
        return None
    if objective.ttft_p90_seconds is None:
        return found.setting
    setting = _scaled(model, found.setting, rate)
    return setting if p90_under_load(model, setting, rate) <= objective.ttft_p90_seconds else None


def _rate(objective: Objective) -> float:
    if objective.rate is None:
        raise PlanError("rate", f"is needed for the objective {objective.goal}")
    return objective.rate


def _nothing(objective: Objective, rate: float) -> PlanError:
    bound = objective.ttft_p90_seconds
    within = "" if bound is None else f" with a P90 of the time to first token of at most {bound:g} s"
    return PlanError("rate", f"{rate:g} requests/s cannot be served{within} by what there is")
