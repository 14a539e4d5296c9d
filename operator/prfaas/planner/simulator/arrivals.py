"""Requests of a workload and when they come: Poisson, in bursts, at a rate that changes.

Arrivals are first made at rate 1, with gaps of mean 1 (exponential, or Gamma of a given coefficient of variation:
bursts), and then time is stretched so that each moment has the rate it should have. Gaps and lengths come from two
streams of random numbers, so the same seed gives the same requests whatever the rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from prfaas.planner.errors import PlanError, number
from prfaas.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float
    """Seconds from the start."""
    tokens: float
    """Prompt length, with what is cached."""
    output: float
    """Tokens to generate."""
    cached: float = 0.0
    """Cached prefix where no prefix cache is simulated, tokens."""
    blocks: tuple[int, ...] = ()
    """Names of the prompt's blocks for a prefix cache that is simulated; equal names are equal prefixes."""


@dataclass(frozen=True)
class Rate:
    """Requests/s over time: straight lines between points, constant before the first and after the last."""

    points: tuple[tuple[float, float], ...]
    """(seconds, requests/s), in rising order of seconds."""

    def __post_init__(self) -> None:
        """Raises PlanError for points out of order or out of range, and for a rate that ends at 0."""
        if not self.points:
            raise PlanError("rate", "has no points")
        for index, (at, rate) in enumerate(self.points):
            number(f"rate[{index}].seconds", at)
            number(f"rate[{index}].requestsPerSecond", rate, most=1e6)
            if index and at <= self.points[index - 1][0]:
                raise PlanError(f"rate[{index}].seconds", f"{at:g} must be above {self.points[index - 1][0]:g}")
        if self.points[-1][1] <= 0:
            raise PlanError(f"rate[{len(self.points) - 1}].requestsPerSecond", "the last one must be above 0")

    @classmethod
    def constant(cls, rate: float) -> Rate:
        """The same all the time."""
        return cls(((0.0, rate),))

    def times(self, counts: Iterator[float]) -> Iterator[float]:
        """When the number of expected arrivals reaches each of `counts` (rising), seconds."""
        (start, rate), *_ = self.points
        rows = [(0.0, start, rate, rate)] if start > 0 else []
        rows += [(t0, t1, r0, r1) for (t0, r0), (t1, r1) in pairwise(self.points)]
        last_time, last_rate = self.points[-1]
        rows.append((last_time, math.inf, last_rate, last_rate))
        index, before = 0, 0.0
        for count in counts:
            t0, t1, r0, r1 = rows[index]
            while t1 < math.inf and count > before + (t1 - t0) * (r0 + r1) / 2:
                before += (t1 - t0) * (r0 + r1) / 2
                index += 1
                t0, t1, r0, r1 = rows[index]
            slope = 0.0 if t1 == math.inf else (r1 - r0) / (t1 - t0)
            more = count - before  # of r0 x + slope x^2 / 2, in the form that does not cancel
            below = r0 + math.sqrt(max(0.0, r0 * r0 + 2 * slope * more))
            yield t0 + (2 * more / below if below > 0 else 0.0)


def generate(
    workload: Workload,
    rate: Rate | float,
    *,
    seed: int,
    duration: float = math.inf,
    count: float = math.inf,
    variation: float = 1.0,
) -> Iterator[Arrival]:
    """Requests until `duration` seconds or `count` requests, whichever is first.

    `variation`: of the gaps, standard deviation over mean; 1 is Poisson, 2 comes in bursts, 0 is a clock.
    """
    if not isinstance(rate, Rate):
        number("rate", rate, above=True, most=1e6)
        rate = Rate.constant(rate)
    number("variation", variation, most=100)
    lengths = random.Random(f"{seed}/lengths")
    for index, at in enumerate(rate.times(_counts(random.Random(f"{seed}/gaps"), variation))):
        if at > duration or index >= count:
            return
        request = workload.at(lengths.random())
        yield Arrival(at, request.uncached + request.cached, request.output, request.cached)


def scaled(arrivals: Iterator[Arrival], factor: float, duration: float = math.inf) -> Iterator[Arrival]:
    """A trace at `factor` times its rate, until `duration` seconds of the result."""
    number("scale-rate", factor, above=True)
    for each in arrivals:
        at = each.at / factor
        if at > duration:
            return
        yield Arrival(at, each.tokens, each.output, each.cached, each.blocks)


def _counts(source: random.Random, variation: float) -> Iterator[float]:
    total = 0.0
    shape = 1 / (variation * variation) if variation > 0 else math.inf
    while True:
        if variation == 1:
            total += source.expovariate(1.0)
        elif variation == 0:
            total += 1.0
        else:
            total += source.gammavariate(shape, 1 / shape)
        yield total
