"""How long to wait before trying again: exponential, capped, jittered, so that many clients do not return at once."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Successive waits in seconds: `base`, doubled each time up to `cap`, each shortened by up to a half at random."""

    def __init__(self, base: float = 0.5, cap: float = 30.0, jitter: Callable[[], float] = random.random) -> None:
        if not 0 < base <= cap:
            raise ValueError("backoff needs 0 < base <= cap")
        self.base = base
        self._cap = cap
        self._jitter = jitter
        self._next = base

    def next(self, at_least: float | None = None) -> float:
        """The next wait; never shorter than `at_least` (a server's Retry-After)."""
        wait = self._next * (1.0 - 0.5 * self._jitter())
        self._next = min(self._cap, self._next * 2.0)
        return max(wait, at_least or 0.0)

    def reset(self) -> None:
        """Start again from `base`: something worked."""
        self._next = self.base
