"""The exact optimum of one PD pool with at most one link: every split (Np, Nd), every useful threshold.

For a fixed split, as the threshold t grows less work goes over the link and more stays:

    out(t)  = min(N / u_prfaas(t), B / u_line(t))   never falls
    home(t) = Np / u_prefill(t)                     never rises
    Lambda(t) = min(out(t), home(t), Nd / u_decode)

so the best integer t is where they cross: the first t with out(t) >= home(t), or the one before it (Eq. 7, made exact
for integers). The crossing moves only one way as Np grows, Nd / u_decode the other way, so the best Np is where those
cross, or the one before (Eq. 8, likewise). Both are found by bisection; nothing in between is left out.

`representative` alone can break the first premise: P * T(E[L | L > t]) may rise with t where T is steeply quadratic.
Whether it does is looked at on a grid, and where it does the best point of that grid is a candidate as well.

A tie between thresholds is a plateau: all of [first, last] serve the same. The threshold nearest to the present one is
taken, without one the crossing, where both prefills have equal room. A tie between splits goes to the present Np, then
to the one with more decode instances. Where the link adds nothing it is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from prfaas.planner.setting import Setting, Split
from prfaas.planner.throughput import Model
from prfaas.planner.topology import Link, PDPool

SAME = 1e-9
"""Rates that differ by less, relatively, are a tie."""
GRID = 256


@dataclass(frozen=True)
class Choice:
    """The best threshold of one split, and what it serves."""

    prefill: int
    threshold: int | None
    """None: the link is not used."""
    rate: float
    """Requests/s."""
    plateau: tuple[int, int] | None = None
    """First and last threshold that serve as much."""


class Pair:
    """One PD pool, one link at most, and all that is evaluated of them."""

    def __init__(self, model: Model, pd: PDPool, link: Link | None, instances: int | None = None) -> None:
        """`instances`: how many of the PrfaaS pool's may be used; None: all."""
        self.model = model
        self.pd = pd
        self.link = link
        self.pool = None if link is None else model.topology.pool(link.prfaas)
        self.instances = 0 if self.pool is None else self.pool.instances if instances is None else instances
        self.longest = math.ceil(model.workload.longest)
        self._seen: dict[int, tuple[float, float]] = {}
        self._rising: bool | None = None

    def setting(self, prefill: int, threshold: int | None) -> Setting:
        """The setting of a choice."""
        cuts = {} if threshold is None or self.link is None else {self.link.name: threshold}
        used = {} if self.pool is None else {self.pool.name: self.instances}
        return Setting({self.pd.name: Split(prefill, self.pd.instances - prefill)}, cuts, {self.pd.name: 1.0}, used)

    def out(self, t: int) -> float:
        """What the link's other end and the line can serve, as a rate of all requests."""
        return self._at(t)[0]

    def home(self, t: int) -> float:
        """What one local prefill instance can serve, as a rate of all requests."""
        return self._at(t)[1]

    def decode(self, prefill: int) -> float:
        """What the decode instances can serve."""
        count = self.pd.instances - prefill
        return count * self.model.decode_rate(self.pd) if count > 0 else 0.0

    def best(self, prefill: int, present: int | None = None) -> Choice:
        """The best threshold for Np = `prefill`."""
        limit = self.decode(prefill)
        unused = min(limit, prefill * self.home(self.longest)) if prefill > 0 else 0.0
        if self.link is None or (self.instances == 0 and self.link.max_threshold is None):
            return Choice(prefill, None, unused)
        least, most = self.link.min_threshold, self.longest
        if self.link.max_threshold is not None:
            most = self.link.max_threshold
        most = max(least, most)
        crossing = first(least, most, lambda t: self.out(t) >= self._home_of(t, prefill))
        values = {t: min(self.out(t), self._home_of(t, prefill)) for t in {max(least, crossing - 1), crossing}}
        if not self._out_rises():
            grid = {least + round((most - least) * (i / GRID) ** 2) for i in range(GRID + 1)}
            values |= {t: min(self.out(t), self._home_of(t, prefill)) for t in grid}
        top = max(values.values())
        rate = min(limit, top)
        if self.link.max_threshold is None and unused >= rate * (1 - SAME) and present is None:
            return Choice(prefill, None, unused)
        at = min((t for t, v in values.items() if v >= rate * (1 - SAME)), key=lambda t: (-values[t], t))
        low = first(least, at, lambda t: self.out(t) >= rate * (1 - SAME))
        high = first(at, most + 1, lambda t: t > most or self._home_of(t, prefill) < rate * (1 - SAME))
        plateau = (low, max(at, high - 1))
        if present is not None:
            at = min(max(present, plateau[0]), plateau[1])
        return Choice(prefill, at, rate, plateau)

    def choices(self, present: tuple[int, int | None] | None = None) -> list[Choice]:
        """The best split first, then the others that could be second best; all splits where there are few.

        `present`: Np and threshold in force.
        """
        splits = self.pd.splits()
        threshold = present[1] if present else None
        if len(splits) > 24:
            cross = splits.start + first(
                0, len(splits) - 1, lambda i: self.best(splits[i]).rate >= self.decode(splits[i]) * (1 - SAME)
            )
            near = {*range(cross - 3, cross + 4), splits.start, *([present[0]] if present else [])}
            splits_tried = sorted(near & set(splits))
        else:
            splits_tried = list(splits)
        found = [self.best(np, threshold) for np in splits_tried]
        top = max((choice.rate for choice in found), default=0.0)
        mine = present[0] if present else None

        def order(choice: Choice) -> tuple[bool, float, int]:
            tied = choice.rate >= top * (1 - SAME)
            return not tied, 0.0 if tied else -choice.rate, 0 if choice.prefill == mine else 1 + choice.prefill

        return sorted(found, key=order)

    def _home_of(self, t: int, prefill: int) -> float:
        home = self.home(t)
        return prefill * home if prefill > 0 else (math.inf if math.isinf(home) else 0.0)

    def _at(self, t: int) -> tuple[float, float]:
        found = self._seen.get(t)
        if found is None:
            model, name = self.model, self.pd.name
            one = Setting({name: Split(min(1, self.pd.instances), 0)}, self.setting(0, t).thresholds, {name: 1.0})
            loads = model.loads_of(model.parts(one), one)
            out = math.inf
            if self.link is not None and self.pool is not None:
                out = _over(self.instances, loads.need[f"prfaas/{self.pool.name}"])
                line = f"line/{self.link.line_name}"
                out = min(out, _over(loads.capacity[line], loads.need[line]))
            found = self._seen[t] = out, _over(1.0, loads.need[f"prefill/{name}"])
        return found

    def _out_rises(self) -> bool:
        if self._rising is None:
            if self.model.service_time == "mean":
                self._rising = True
            else:
                grid = [self.out(round(self.longest * (i / 32) ** 2)) for i in range(33)]
                self._rising = all(b >= a * (1 - SAME) for a, b in pairwise(grid))
        return self._rising


def first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first integer in [low, high] from which on `holds`; `high` if there is none before it."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _over(capacity: float, need: float) -> float:
    return capacity / need if need > 1e-15 else math.inf
