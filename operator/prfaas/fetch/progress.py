"""How far a fetch is: counted where bytes are written, told as one line every few seconds.

A line has `done`, `total` (bytes), `rate` (bytes a second since the last line) and `file`; `prfaas status` reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.fetch.remote import Sleep

log = logging.getLogger("prfaas.fetch")

PERIOD_SECONDS = 5.0


@dataclass
class Progress:
    """Counts of one fetch. `clock`: seconds, monotonic."""

    clock: Callable[[], float]
    total: int = 0
    done: int = 0
    """Bytes that are there, of this start and earlier ones."""
    fetched: int = 0
    """Bytes that came over the wire in this start."""
    file: str = ""
    """The file that bytes came for last."""
    _told: tuple[float, int] = field(default=(0.0, 0))

    def start(self, total: int, have: int) -> None:
        """The model's size, and what is there already."""
        self.total, self.done = total, have
        self._told = (self.clock(), self.fetched)

    def came(self, count: int, path: str) -> None:
        """Bytes arrived and were written."""
        self.done += count
        self.fetched += count
        self.file = path

    def lost(self, count: int) -> None:
        """Bytes that were counted are of no use."""
        self.done -= count

    def line(self) -> dict[str, int | str]:
        """What to tell now; the rate is that since the last call."""
        now = self.clock()
        before, count = self._told
        self._told = (now, self.fetched)
        rate = (self.fetched - count) / (now - before) if now > before else 0.0
        return {"done": self.done, "total": self.total, "rate": round(rate), "file": self.file}


async def tell(progress: Progress, sleep: Sleep, period: float = PERIOD_SECONDS) -> None:
    """One line each `period` seconds, until cancelled."""
    while True:
        await sleep(period)
        log.info("fetching", extra=progress.line())
