"""A small linear program, solved and then widened: maximise c x under A x <= b, x >= 0, where b >= 0.

With b >= 0 the slacks are a first solution, so there is no first phase; the slacks' columns of the tableau hold the
inverse of the basis, so a new column is priced in with one product per row and solving goes on where it stood. That is
all that column generation needs. Dense and in pure Python: a few dozen rows. Ties are broken by Bland's rule once
progress stalls, so it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TINY = 1e-10
STALL = 60
"""Pivots without progress after which Bland's rule takes over."""


class LinearProgram:
    """Rows `a x <= b` with b >= 0; columns are added at any time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: b by row; ValueError for one below 0."""
        if any(not b >= 0 for b in bounds):
            raise ValueError(f"bounds must not be negative, got {list(bounds)}")
        size = len(bounds)
        self._size = size
        self._rows = [[float(b), *(1.0 if i == j else 0.0 for j in range(size))] for i, b in enumerate(bounds)]
        self._goal = [0.0] * (size + 1)
        self._basis = list(range(1, size + 1))

    def add(self, gain: float, entries: Mapping[int, float]) -> int:
        """A new variable with `gain` in the goal and `entries` by row; its index."""
        for row in self._rows:
            row.append(sum(row[1 + k] * a for k, a in entries.items()))
        self._goal.append(sum(self._goal[1 + k] * a for k, a in entries.items()) - gain)
        return len(self._goal) - 2 - self._size

    @property
    def value(self) -> float:
        """The goal at the present solution."""
        return self._goal[0]

    def solve(self) -> float:
        """Go on to the optimum; its value. ValueError if there is no bound on it."""
        rows, stalled, last = self._rows, 0, self._goal[0]
        while True:
            goal = self._goal
            if stalled < STALL:
                column = min(range(1, len(goal)), key=goal.__getitem__)
                if goal[column] >= -TINY:
                    return goal[0]
            else:
                column = next((j for j in range(1, len(goal)) if goal[j] < -TINY), 0)
                if not column:
                    return goal[0]
            best, leaving = 0.0, -1
            for i, row in enumerate(rows):
                if row[column] > TINY:
                    ratio = row[0] / row[column]
                    if leaving < 0 or ratio < best or (ratio == best and self._basis[i] < self._basis[leaving]):
                        best, leaving = ratio, i
            if leaving < 0:
                raise ValueError("the linear program has no bound")
            self._pivot(leaving, column)
            stalled = stalled + 1 if self._goal[0] <= last + TINY else 0
            last = self._goal[0]

    def _pivot(self, leaving: int, column: int) -> None:
        pivot = self._rows[leaving]
        over = 1 / pivot[column]
        pivot = self._rows[leaving] = [x * over for x in pivot]
        pivot[column] = 1.0
        for i, row in enumerate(self._rows):
            factor = row[column]
            if i != leaving and factor:
                fresh = [x - factor * p for x, p in zip(row, pivot, strict=True)]
                fresh[0] = max(0.0, fresh[0])
                fresh[column] = 0.0
                self._rows[i] = fresh
        factor = self._goal[column]
        self._goal = [x - factor * p for x, p in zip(self._goal, pivot, strict=True)]
        self._basis[leaving] = column

    @property
    def prices(self) -> list[float]:
        """The dual value of each row: what one more of its bound adds to the goal."""
        return [max(0.0, price) for price in self._goal[1 : 1 + self._size]]

    @property
    def values(self) -> list[float]:
        """The value of each added variable, in the order they were added."""
        found = [0.0] * (len(self._goal) - 1 - self._size)
        for row, column in zip(self._rows, self._basis, strict=True):
            if column > self._size:
                found[column - 1 - self._size] = row[0]
        return found
