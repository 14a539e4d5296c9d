"""The event loop: functions and the times to call them at. Equal times are called in the order they were given."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Loop:
    """Simulated time, seconds."""

    def __init__(self) -> None:
        """Nothing is to happen; it is 0."""
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._given = 0

    def at(self, time: float, call: Callable[..., object], *args: object) -> None:
        """Call `call(*args)` at `time`, or now if that is past."""
        self._given += 1
        heapq.heappush(self._events, (max(time, self.now), self._given, call, args))

    @property
    def pending(self) -> int:
        """Events to come."""
        return len(self._events)

    def step(self) -> bool:
        """The next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, call, args = heapq.heappop(self._events)
        call(*args)
        return True
