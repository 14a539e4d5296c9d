"""Least squares that a few wrong measurements do not move, with coefficients that are never negative.

The model is max(floor, row . coefficients); errors are relative, since a prefill that takes ten times longer is also
timed ten times less exactly. Three steps, each for what the one before cannot do:

1. Start: of many curves through three measurements each, the one with the least median error, the median of every
   octave of lengths counting the same. Nearly half of each octave may be wrong, and the few long prompts are heard.
2. Huber's weights from there: precise where the errors are small, and bounded in what one measurement can do.
3. What is then further off than `REJECT` spreads is left out, and step 2 repeated.

Two or three columns and an active set of at most seven cases need no linear algebra library.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from statistics import median

Row = tuple[float, ...]

HUBER = 1.345
"""Spreads up to which an error counts squared: 95 % efficient where nothing is wrong (Huber 1964)."""
REJECT = 4.5
"""Spreads beyond which a measurement is left out: 1 in 150,000 where nothing is wrong."""
LEAST_SPREAD = 1e-4
"""Relative spread below which measurements count as exact."""
STARTS = 100
PER_OCTAVE = 30
FLOOR_LEAST = 8
"""Measurements on either side of a floor's end, at least."""
FLOOR_GAIN = 12.0
"""What a floor must gain in log-likelihood to be believed."""


@dataclass(frozen=True)
class Measurement:
    """One row of the design, what was measured, and `length`, by which octaves are told apart."""

    row: Row
    target: float
    length: float
    censored: bool = False
    """The target is a lower bound: it counts only where the curve is below it."""


@dataclass(frozen=True)
class Fit:
    """The curve, how sure it is, and which measurements it rests on."""

    coefficients: Row
    covariance: tuple[Row, ...]
    floor: float
    floor_error: float
    """Standard errors of the coefficients (as a matrix) and of the floor; 0 where there is no floor."""
    spread: float
    """Relative standard deviation of one measurement, robust."""
    kept: tuple[bool, ...]

    def value(self, row: Row) -> float:
        """max(floor, row . coefficients)."""
        return max(self.floor, _dot(row, self.coefficients))

    def error(self, row: Row) -> float:
        """Standard error of `value` at a row; the spread of single measurements is not in it."""
        if self.floor > _dot(row, self.coefficients):
            return self.floor_error
        return math.sqrt(max(0.0, _dot(row, [_dot(line, row) for line in self.covariance])))


def robust(measurements: Sequence[Measurement], *, floor: bool = False) -> Fit | None:
    """Fit the rows, with a floor where `floor` allows one and the measurements show one; None if they fix no curve."""
    start = _start(measurements)
    if start is None:
        return None
    low, spread = 0.0, LEAST_SPREAD
    if floor:
        start, low = _with_floor(measurements, start)
    kept = list(measurements)
    normal: list[list[float]] = []
    for turn in range(3):
        start, low, spread, normal = _huber(kept, start, low)
        if turn < 2:
            kept = [m for m in measurements if _off(m, start, low) <= REJECT * spread]
    size = len(start)
    active = [i for i in range(size) if start[i] > 0]
    inverse = _inverse([[normal[i][j] for j in active] for i in active]) if active else []
    covariance = [[0.0] * size for _ in range(size)]
    for i, at in enumerate(active):
        for j, other in enumerate(active):
            covariance[at][other] = inverse[i][j] * spread * spread
    below = sum(_dot(m.row, start) < low for m in kept)
    return Fit(
        start,
        tuple(tuple(line) for line in covariance),
        low,
        1.2533 * spread * low / math.sqrt(below) if below else 0.0,
        spread,
        tuple(_off(m, start, low) <= REJECT * spread for m in measurements),
    )


def _start(measurements: Sequence[Measurement]) -> Row | None:
    """Least median of relative errors, averaged over octaves, among curves through a measurement of each of three."""
    octaves = [of[:: math.ceil(len(of) / PER_OCTAVE)] for of in _octaves(measurements)]
    few = [m for of in octaves for m in of]
    if not few:
        return None
    chance, size = random.Random(0), len(few[0].row)
    best, least = None, math.inf
    for _ in range(STARTS):
        if len(octaves) >= size:
            through = [chance.choice(of) for of in chance.sample(octaves, size)]
        else:
            through = chance.sample(few, min(size, len(few)))
        curve = _non_negative(*_normal(through, [1 / m.target**2 for m in through]))
        if curve is None:
            continue
        off = sum(median([abs(m.target / _positive(m.row, curve) - 1) for m in of]) for of in octaves)
        if off < least:
            best, least = curve, off
    return best


def _octaves(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Uncensored measurements by power of two of their length."""
    found: dict[int, list[Measurement]] = {}
    for m in measurements:
        if not m.censored:
            found.setdefault(math.frexp(m.length)[1], []).append(m)
    return [found[key] for key in sorted(found)]


def _with_floor(measurements: Sequence[Measurement], start: Row) -> tuple[Row, float]:
    """The best curve with a floor among several lengths where the floor may end, if clearly better than one without."""
    few = [m for of in _octaves(measurements) for m in of[:: math.ceil(len(of) / (4 * PER_OCTAVE))]]
    few.sort(key=lambda m: m.length)
    plain = _huber(few, start, 0.0)
    found = [(plain[0], 0.0, plain[2])]
    for part in range(1, 9):
        cut = len(few) * part // 16
        if min(cut, len(few) - cut) < FLOOR_LEAST:
            continue
        low = median([m.target for m in few[:cut]])
        curve = _huber(few[cut:], start, 0.0)[0]
        for _ in range(3):
            curve, low, spread, _ = _huber(few, curve, low)
        if sum(_dot(m.row, curve) < low for m in few) >= FLOOR_LEAST:
            found.append((curve, low, spread))
    scale = min(spread for _, _, spread in found)
    losses = [sum(_loss(_off(m, curve, low) / scale) for m in few) for curve, low, _ in found]
    best = losses.index(min(losses))
    if losses[0] - losses[best] < FLOOR_GAIN:
        best = 0
    return found[best][0], found[best][1]


def _huber(measurements: Sequence[Measurement], curve: Row, low: float) -> tuple[Row, float, float, list[list[float]]]:
    """Reweighted least squares from a curve: curve, floor, spread, and the last normal matrix, of relative errors."""
    spread, normal = LEAST_SPREAD, [[0.0] * len(curve) for _ in curve]
    for _ in range(12):
        values = [_positive(m.row, curve) for m in measurements]
        offs = [_relative(m, max(low, value)) for m, value in zip(measurements, values, strict=True)]
        exact = [off for m, off in zip(measurements, offs, strict=True) if not m.censored]
        spread = max(LEAST_SPREAD, 1.4826 * median(exact)) if exact else LEAST_SPREAD
        above, weights, below = [], [], []
        for m, value, off in zip(measurements, values, offs, strict=True):
            if value < low:
                if not m.censored:
                    below.append(m.target)
                continue
            idle = m.censored and off == 0
            above.append(m)
            weights.append(0.0 if idle else (min(1.0, HUBER * spread / off) if off else 1.0) / value**2)
        normal, right = _normal(above, weights) if above else (normal, [0.0] * len(curve))
        found = _non_negative(normal, right)
        moved = found is not None and any(abs(a - b) > 1e-10 * (a + b) for a, b in zip(found, curve, strict=True))
        curve = found if found is not None else curve
        low = median(below) if low and len(below) >= FLOOR_LEAST else low if below else 0.0
        if not moved:
            break
    return curve, low, spread, normal


def _off(m: Measurement, curve: Row, low: float) -> float:
    return _relative(m, max(low, _positive(m.row, curve)))


def _relative(m: Measurement, value: float) -> float:
    """Relative error, at least 0; of a lower bound only what it is above the curve."""
    off = m.target / value - 1
    return max(0.0, off) if m.censored else abs(off)


def _loss(spreads: float) -> float:
    """Huber's, capped: else the few wrong measurements would decide between curves, by how far off they are."""
    spreads = min(spreads, REJECT)
    return spreads * spreads / 2 if spreads <= HUBER else HUBER * (spreads - HUBER / 2)


def _normal(measurements: Sequence[Measurement], weights: Sequence[float]) -> tuple[list[list[float]], list[float]]:
    size = len(measurements[0].row)
    matrix, right = [[0.0] * size for _ in range(size)], [0.0] * size
    for m, weight in zip(measurements, weights, strict=True):
        for i in range(size):
            scaled = weight * m.row[i]
            right[i] += scaled * m.target
            for j in range(i + 1):
                matrix[i][j] += scaled * m.row[j]
    for i in range(size):
        for j in range(i):
            matrix[j][i] = matrix[i][j]
    return matrix, right


def _non_negative(matrix: list[list[float]], right: list[float]) -> Row | None:
    """Minimise x'Ax/2 - b'x over x >= 0: convex, so the best feasible stationary point of all active sets is it."""
    best, least, size = None, 0.0, len(right)
    for count in range(1, size + 1):
        for active in combinations(range(size), count):
            inverse = _inverse([[matrix[i][j] for j in active] for i in active])
            if not inverse:
                continue
            x = [_dot(line, [right[i] for i in active]) for line in inverse]
            if min(x) < 0:
                continue
            worth = -sum(value * right[i] for value, i in zip(x, active, strict=True)) / 2
            if worth < least:
                least = worth
                best = tuple(x[active.index(i)] if i in active else 0.0 for i in range(size))
    return best


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Inverse of a symmetric matrix by elimination after scaling its diagonal to 1; empty if it is singular."""
    size = len(matrix)
    if any(matrix[i][i] <= 0 for i in range(size)):
        return []
    scale = [1 / math.sqrt(matrix[i][i]) for i in range(size)]
    work = [
        [matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [float(i == j) for j in range(size)]
        for i in range(size)
    ]
    for i in range(size):
        if work[i][i] < 1e-10:
            return []
        pivot = work[i][i]
        work[i] = [value / pivot for value in work[i]]
        for k in range(size):
            if k != i:
                factor = work[k][i]
                work[k] = [a - factor * b for a, b in zip(work[k], work[i], strict=True)]
    return [[work[i][size + j] * scale[i] * scale[j] for j in range(size)] for i in range(size)]


def _positive(row: Row, curve: Row) -> float:
    return max(_dot(row, curve), 1e-12)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(map(mul, one, other)))
