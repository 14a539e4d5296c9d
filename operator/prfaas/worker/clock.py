"""Time as a parameter: the monotonic clock of a worker, and how it waits.

Modelled durations are divided by the time scale before they get here: this clock counts real seconds.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and waiting on them."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    async def wait(self, event: asyncio.Event, deadline: float | None) -> bool:
        """Until the event is set (True) or the clock reaches the deadline (False); None: no deadline."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    async def wait(self, event: asyncio.Event, deadline: float | None) -> bool:
        """See Clock."""
        if event.is_set():
            return True
        if deadline is None:
            await event.wait()
            return True
        delay = deadline - time.monotonic()
        if delay <= 0:
            await asyncio.sleep(0)
            return event.is_set()
        try:
            async with asyncio.timeout(delay):
                await event.wait()
        except TimeoutError:
            return False
        return True
