"""What requests look like: uncached prompt length, and with it the cached prefix and the output length.

A workload is a row of segments in rising order of uncached length. Within a segment lengths follow a truncated
log-normal or are spread evenly, and the cached prefix and the output have one mean. So the paper's workload is one
segment, a histogram one per bucket, and every average that the planner needs, E[L^k; a < L <= b], is a closed form.

    truncated log-normal on [lo, hi], renormalised, z(x) = (ln x - mu) / sigma      (arXiv:2604.15039, section 4.1)
    P(a < L <= b)    = (Phi(z_b) - Phi(z_a)) / (Phi(z_hi) - Phi(z_lo))
    E[L^k; a < L <= b] = e^(k mu + k^2 sigma^2 / 2) (Phi(z_b - k sigma) - Phi(z_a - k sigma)) / (Phi(z_hi) - Phi(z_lo))

All lengths are tokens; a request's threshold is compared with its uncached length.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from prfaas.planner.curve import Curve, constant
from prfaas.planner.errors import PlanError, number

MAX_TOKENS = 1e8
GROWTH = 1.03
"""Ratio of neighbouring bucket edges of `Histogram.of`: a threshold is known to 3 %, T(l) far better."""


@dataclass(frozen=True)
class Request:
    """One request, in tokens."""

    uncached: float
    cached: float
    output: float


@dataclass(frozen=True)
class LogNormal:
    """A log-normal of mean `mu` and deviation `sigma` of ln(tokens)."""

    mu: float
    sigma: float

    def power(self, k: int, a: float, b: float) -> float:
        """E[L^k; a < L <= b] before truncation; 0 < a <= b."""
        shift = k * self.sigma
        scale = math.exp(k * self.mu + shift * shift / 2)
        return scale * _between(self._z(a) - shift, self._z(b) - shift)

    def _z(self, x: float) -> float:
        return (math.log(x) - self.mu) / self.sigma if x > 0 else -math.inf


@dataclass(frozen=True)
class Segment:
    """Requests of uncached length in (lo, hi], tokens; lo = hi is one length.

    `weight`: their share of all requests. `cached`, `output`: means, tokens. `shape`: None is an even spread.
    """

    lo: float
    hi: float
    weight: float
    cached: float = 0.0
    output: float = 0.0
    shape: LogNormal | None = None

    def moment(self, k: int, a: float, b: float) -> float:
        """E[L^k; a < L <= b] of this segment's share."""
        if self.lo == self.hi:
            return self.weight * self.lo**k if a < self.lo <= b else 0.0
        a, b = max(a, self.lo), min(b, self.hi)
        if a >= b:
            return 0.0
        if self.shape is not None:
            return self._scale * self.shape.power(k, a, b)
        return self.weight * _mean_power(k, a, b) * (b - a) / (self.hi - self.lo)

    @cached_property
    def _scale(self) -> float:
        assert self.shape is not None
        return self.weight / self.shape.power(0, self.lo, self.hi)

    def quantile(self, share: float) -> float:
        """The length below which `share` (0 to 1) of this segment lies, tokens."""
        if self.lo == self.hi or share >= 1:
            return self.hi
        if self.shape is None:
            return self.lo + share * (self.hi - self.lo)
        from statistics import NormalDist  # not at import: `prfaas plan` must start fast

        normal = NormalDist()
        low, high = (normal.cdf(self.shape._z(x)) for x in (self.lo, self.hi))
        inside = low + share * (high - low)
        if not 0 < inside < 1:
            return self.lo if inside <= 0 else self.hi
        return min(self.hi, max(self.lo, math.exp(self.shape.mu + self.shape.sigma * normal.inv_cdf(inside))))


@dataclass(frozen=True)
class Workload:
    """The requests of one kind of traffic; see the module. Weights add up to 1."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        """Raises PlanError where segments overlap, a number is out of range, or nothing is left."""
        if not self.segments:
            raise PlanError("workload", "has no requests")
        for index, each in enumerate(self.segments):
            path = f"workload.segments[{index}]"
            number(f"{path}.lo", each.lo, most=MAX_TOKENS)
            number(f"{path}.hi", each.hi, least=each.lo, most=MAX_TOKENS)
            number(f"{path}.weight", each.weight, above=True)
            number(f"{path}.cached", each.cached, most=MAX_TOKENS)
            number(f"{path}.output", each.output, most=MAX_TOKENS)
            if index and each.lo < self.segments[index - 1].hi:
                raise PlanError(f"{path}.lo", f"{each.lo:g} lies inside the segment before it")
        total = sum(each.weight for each in self.segments)
        if abs(total - 1) > 1e-6:
            raise PlanError("workload.segments", f"weights must add up to 1, got {total:g}")

    @classmethod
    def log_normal(
        cls, *, mu: float, sigma: float, lo: float, hi: float, output: float, cached: float = 0.0
    ) -> Workload:
        """Lengths log-normal on [lo, hi] tokens, renormalised; one output length and cached prefix for all."""
        number("workload.logNormal.mu", mu, least=-20, most=20)
        number("workload.logNormal.sigma", sigma, least=0.01, most=5)
        number("workload.logNormal.minTokens", lo, least=1, most=MAX_TOKENS)
        number("workload.logNormal.maxTokens", hi, least=lo, most=MAX_TOKENS, above=True)
        shape = LogNormal(mu, sigma)
        if shape.power(0, lo, hi) < 1e-9:
            raise PlanError("workload.logNormal", f"has no mass between {lo:g} and {hi:g} tokens")
        return cls((Segment(lo, hi, 1.0, cached, output, shape),))

    @classmethod
    def constant(cls, *, uncached: float, output: float, cached: float = 0.0) -> Workload:
        """Every request the same."""
        return cls((Segment(uncached, uncached, 1.0, cached, output),))

    @property
    def shortest(self) -> float:
        """Shortest uncached length, tokens."""
        return self.segments[0].lo

    @property
    def longest(self) -> float:
        """Longest uncached length, tokens."""
        return self.segments[-1].hi

    def moment(self, k: int, a: float = -1.0, b: float = math.inf) -> float:
        """E[L^k; a < L <= b], tokens^k; k = 0 is the share of requests of that length."""
        return sum(each.moment(k, a, b) for each in self.segments)

    def share(self, a: float = -1.0, b: float = math.inf) -> float:
        """P(a < L <= b)."""
        return self.moment(0, a, b)

    def mean(self, a: float = -1.0, b: float = math.inf) -> float:
        """E[L | a < L <= b], tokens; 0 where there is no such request."""
        share = self.moment(0, a, b)
        return self.moment(1, a, b) / share if share > 0 else 0.0

    @cached_property
    def output(self) -> float:
        """Mean output length, tokens."""
        return sum(each.weight * each.output for each in self.segments)

    @cached_property
    def cached(self) -> float:
        """Mean cached prefix, tokens."""
        return sum(each.weight * each.cached for each in self.segments)

    def quantile(self, share: float) -> float:
        """The uncached length below which `share` (0 to 1) of the requests lie, tokens."""
        return self.at(share).uncached

    def at(self, share: float) -> Request:
        """The request at a quantile of uncached length: with an even random number, a random request."""
        index = min(bisect_left(self._upto, share * self._upto[-1]), len(self.segments) - 1)
        each = self.segments[index]
        inside = (share * self._upto[-1] - (self._upto[index] - each.weight)) / each.weight
        return Request(each.quantile(min(1.0, max(0.0, inside))), each.cached, each.output)

    @cached_property
    def _upto(self) -> list[float]:
        total, found = 0.0, []
        for each in self.segments:
            total += each.weight
            found.append(total)
        return found

    def with_mean_cached(self) -> Workload:
        """The same with one cached prefix for all: what a representative length is evaluated at."""
        cached = self.cached
        if all(each.cached == cached for each in self.segments):
            return self
        return Workload(
            tuple(Segment(s.lo, s.hi, s.weight, cached, s.output, s.shape) for s in self.segments),
        )


class Integral:
    """x -> E[f(L); L <= x] of a workload, for an f given by segment: exact, a look-up and one piece to evaluate."""

    def __init__(self, workload: Workload, curve: Callable[[Segment], Curve]) -> None:
        """`curve` says f on a segment (it may depend on the segment's cached prefix)."""
        self._los: list[float] = []
        self._parts: list[tuple[Segment, float, tuple[float, ...]]] = []
        self._before: list[float] = []
        total = 0.0
        for segment in workload.segments:
            f = curve(segment)
            cuts = [segment.lo, *(start for start in f.starts if segment.lo < start < segment.hi)]
            for index, lo in enumerate(cuts):
                hi = cuts[index + 1] if index + 1 < len(cuts) else segment.hi
                piece = f.pieces[max(0, bisect_right(f.starts, lo) - 1)]
                below = lo if index else -1.0
                self._los.append(lo)
                self._parts.append((segment, below, piece))
                self._before.append(total)
                total += _integral(segment, below, hi, piece)
        self.total = total

    def __call__(self, x: float) -> float:
        """E[f(L); L <= x]."""
        index = bisect_right(self._los, x) - 1
        if index < 0:
            return 0.0
        if index + 1 == len(self._los) and x >= self._parts[index][0].hi:
            return self.total
        segment, below, piece = self._parts[index]
        return self._before[index] + _integral(segment, below, x, piece)

    def over(self, a: float, b: float) -> float:
        """E[f(L); a < L <= b]."""
        return self(b) - self(a) if b > a else 0.0


def integral_of(workload: Workload, curve: Curve) -> Integral:
    """The integral of one function of the length alone."""
    return Integral(workload, lambda _: curve)


ONE = constant(1.0)


@dataclass(frozen=True)
class Bucket:
    """Requests of uncached length in (lo, hi], tokens: how many, and the sums of their other lengths."""

    lo: float
    hi: float
    count: float
    cached_sum: float = 0.0
    output_sum: float = 0.0


@dataclass(frozen=True)
class Histogram:
    """Weighted counts of requests by uncached length; histograms add up, whatever their edges."""

    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        """Raises PlanError where buckets overlap or a number is out of range."""
        for index, each in enumerate(self.buckets):
            path = f"workload.histogram[{index}]"
            number(f"{path}.minTokens", each.lo, most=MAX_TOKENS)
            number(f"{path}.maxTokens", each.hi, least=each.lo, most=MAX_TOKENS)
            for name, value in (("count", each.count), ("cached", each.cached_sum), ("output", each.output_sum)):
                number(f"{path}.{name}", value)
            if index and each.lo < self.buckets[index - 1].hi:
                raise PlanError(f"{path}.minTokens", f"{each.lo:g} lies inside the bucket before it")

    @classmethod
    def of(cls, requests: Iterable[Request], weights: Iterable[float] | None = None) -> Histogram:
        """Counted into buckets whose edges are powers of GROWTH, the same for every histogram made this way."""
        sums: dict[int, list[float]] = {}
        step = math.log(GROWTH)
        for request, weight in zip(requests, _ones() if weights is None else weights, strict=False):
            number("request.uncached", request.uncached, most=MAX_TOKENS)
            index = math.ceil(math.log(max(1.0, request.uncached)) / step - 1e-9)
            found = sums.setdefault(index, [0.0, 0.0, 0.0])
            for place, value in enumerate((1.0, request.cached, request.output)):
                found[place] += weight * value
        return cls(tuple(Bucket(_edge(i - 1), _edge(i), *sums[i]) for i in sorted(sums)))

    @property
    def count(self) -> float:
        """Requests counted."""
        return sum(each.count for each in self.buckets)

    def merged(self, other: Histogram) -> Histogram:
        """Both together. Where edges differ, buckets are cut at all of them, evenly; sums are kept."""
        edges = sorted({edge for each in (*self.buckets, *other.buckets) for edge in (each.lo, each.hi)})
        pieces: dict[tuple[float, float], list[float]] = {}
        for each in (*self.buckets, *other.buckets):
            inside = [edge for edge in edges if each.lo <= edge <= each.hi] if each.hi > each.lo else [each.lo, each.hi]
            for lo, hi in pairwise(inside):
                part = (hi - lo) / (each.hi - each.lo) if each.hi > each.lo else 1.0
                found = pieces.setdefault((lo, hi), [0.0, 0.0, 0.0])
                for place, value in enumerate((each.count, each.cached_sum, each.output_sum)):
                    found[place] += part * value
        return Histogram(tuple(Bucket(lo, hi, *pieces[lo, hi]) for lo, hi in sorted(pieces)))

    def scaled(self, factor: float) -> Histogram:
        """Every count times `factor`: how an old histogram fades against a new one."""
        number("factor", factor)
        return Histogram(
            tuple(
                Bucket(b.lo, b.hi, b.count * factor, b.cached_sum * factor, b.output_sum * factor) for b in self.buckets
            )
        )

    def workload(self) -> Workload:
        """The workload that this is a sample of. Raises PlanError for an empty histogram."""
        total = self.count
        filled = [each for each in self.buckets if each.count > 0]
        if not filled or total <= 0:
            raise PlanError("workload.histogram", "counts no request")
        return Workload(
            tuple(Segment(b.lo, b.hi, b.count / total, b.cached_sum / b.count, b.output_sum / b.count) for b in filled)
        )


def _edge(index: int) -> float:
    return GROWTH**index if index >= 0 else 0.0


def _ones() -> Iterable[float]:
    while True:
        yield 1.0


def _integral(segment: Segment, a: float, b: float, piece: Sequence[float]) -> float:
    return sum(c * segment.moment(k, a, b) for k, c in enumerate(piece) if c)


def _mean_power(k: int, a: float, b: float) -> float:
    """Mean of x^k over (a, b): the sum form of (b^(k+1) - a^(k+1)) / ((k+1) (b - a)), which does not cancel."""
    return math.fsum(a**i * b ** (k - i) for i in range(k + 1)) / (k + 1)


def _between(low: float, high: float) -> float:
    """Phi(high) - Phi(low), in the tail where it does not cancel."""
    root = math.sqrt(2)
    if low > 0:
        return 0.5 * (math.erfc(low / root) - math.erfc(high / root))
    return 0.5 * (math.erfc(-high / root) - math.erfc(-low / root))
