"""Functions of a prompt's length that are polynomials by pieces, so that averages over a workload are exact.

T(l), T(l | x cached), its square, and S(l) all have this form whether the profile holds coefficients or measured
points; a workload knows the moments E[L^k] of any interval, so E[T; a < L <= b] needs no numerical integration.
Lengths are tokens, prefill times seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prfaas.api.profile import PrefillProfile

Polynomial = tuple[float, ...]
"""Coefficients of l^0, l^1, ..., with l in tokens."""


@dataclass(frozen=True)
class Curve:
    """A function on [0, inf): `pieces[i]` holds from `starts[i]` on; `starts[0]` is 0."""

    starts: tuple[float, ...]
    pieces: tuple[Polynomial, ...]

    def __call__(self, tokens: float) -> float:
        """The value at a length in tokens."""
        return evaluate(self.pieces[max(0, bisect_right(self.starts, tokens) - 1)], tokens)

    def slope(self, tokens: float) -> float:
        """The derivative at a length; at a kink that of the piece to its right."""
        piece = self.pieces[max(0, bisect_right(self.starts, tokens) - 1)]
        return sum(k * c * tokens ** (k - 1) for k, c in enumerate(piece) if k)

    def squared(self) -> Curve:
        """The square of the function."""
        return Curve(self.starts, tuple(_product(piece, piece) for piece in self.pieces))

    def times(self, factor: float) -> Curve:
        """The function times a number."""
        return Curve(self.starts, tuple(tuple(factor * c for c in piece) for piece in self.pieces))

    def plus(self, other: Curve) -> Curve:
        """The sum of two functions."""
        starts = tuple(sorted({*self.starts, *other.starts}))
        return Curve(starts, tuple(_sum(self._at(start), other._at(start)) for start in starts))

    def after(self, cached: float) -> Curve:
        """n -> T(n + x) - T(x) + T(0)."""
        if cached <= 0:
            return self
        saved = self(0) - self(cached)
        starts = (0.0, *(start - cached for start in self.starts if start > cached))
        return Curve(starts, tuple(_sum(_shifted(self._at(s + cached), cached), (saved,)) for s in starts))

    def supporting_line(self, at: float, lo: float, hi: float) -> Curve:
        """The line with the slope at `at` that touches the function on [lo, hi] from below; the tangent, if convex."""
        slope = self.slope(at)
        points = [lo, hi, at, *(start for start in self.starts if lo < start < hi)]
        for start, piece in zip(self.starts, self.pieces, strict=True):
            if len(piece) > 2 and piece[2] > 0:
                lowest = (slope - piece[1]) / (2 * piece[2])
                if lo < lowest < hi and lowest >= start:
                    points.append(lowest)
        return Curve((0.0,), ((min(self(p) - slope * p for p in points if lo <= p <= hi), slope),))

    def _at(self, tokens: float) -> Polynomial:
        return self.pieces[max(0, bisect_right(self.starts, tokens) - 1)]


def constant(value: float) -> Curve:
    """The same at every length."""
    return Curve((0.0,), ((value,),))


def line(intercept: float, slope: float) -> Curve:
    """intercept + slope * l, l in tokens."""
    return Curve((0.0,), ((intercept, slope),))


def prefill_curve(profile: PrefillProfile, cached: float = 0.0) -> Curve:
    """n -> T(n | x), seconds: what n new tokens cost on x cached ones (`PrefillProfile.remaining_seconds`)."""
    if profile.coefficients is not None:
        f = profile.coefficients
        quadratic = (f.a, f.b / 1e3 + 2 * cached * f.c / 1e6, f.c / 1e6)
        kink = _reaches(quadratic, f.floor)
        if kink <= 0:
            return Curve((0.0,), (quadratic,))
        if math.isinf(kink):
            return constant(f.floor)
        return Curve((0.0, kink), ((f.floor,), quadratic))
    assert profile.points is not None
    points = [(float(p.tokens), p.seconds) for p in profile.points]
    starts = [0.0]
    lines: list[Polynomial] = [(points[0][1],)]
    for (x0, y0), (x1, y1) in pairwise(points):
        slope = (y1 - y0) / (x1 - x0)
        starts.append(x0)
        lines.append((y0 - slope * x0, slope))
    return Curve(tuple(starts), tuple(lines)).after(cached)


def evaluate(polynomial: Sequence[float], x: float) -> float:
    """The polynomial's value at x."""
    value = 0.0
    for coefficient in reversed(polynomial):
        value = value * x + coefficient
    return value


def roots(polynomial: Sequence[float]) -> tuple[float, ...]:
    """Real roots of a polynomial of degree two at most, rising; none for a constant."""
    c0, c1, c2 = (*polynomial, 0.0, 0.0, 0.0)[:3]
    if c2 == 0:
        return () if c1 == 0 else (-c0 / c1,)
    inside = c1 * c1 - 4 * c2 * c0
    if inside < 0:
        return ()
    half = -0.5 * (c1 + math.copysign(math.sqrt(inside), c1))
    found = {half / c2} | ({c0 / half} if half else set())
    return tuple(sorted(found))


def _reaches(quadratic: Polynomial, value: float) -> float:
    """From which length on a rising quadratic is at least `value`; inf if never."""
    c0, c1, c2 = quadratic
    if c0 >= value:
        return 0.0
    return max((root for root in roots((c0 - value, c1, c2)) if root > 0), default=math.inf)


def _sum(one: Polynomial, other: Polynomial) -> Polynomial:
    size = max(len(one), len(other))
    first, second = ((*p, *([0.0] * (size - len(p)))) for p in (one, other))
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    out = [0.0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            out[i + j] += a * b
    return tuple(out)


def _shifted(polynomial: Polynomial, by: float) -> Polynomial:
    """x -> p(x + by), for degree two at most."""
    c0, c1, c2 = (*polynomial, 0.0, 0.0)[:3]
    return (c0 + c1 * by + c2 * by * by, c1 + 2 * c2 * by, c2)
