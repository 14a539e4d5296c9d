"""`--kv-cache-metrics`: how long blocks stay in the cache, of a sample of them, as vLLM measures it.

A block that is in the sample when it is taken is followed until it is taken again: its life, how long nobody had used
it by then, and the gaps between its last uses, of which four are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from prfaas.worker.blocks import Blocks

USES_KEPT = 4

Observe = Callable[[float], None]


@dataclass
class _Life:
    born: float
    last: float
    uses: list[float] = field(default_factory=list)


class Residency:
    """A watcher of a block pool (blocks.Watcher). `observers`: of life, idle time and gap, in seconds."""

    def __init__(
        self, now: Callable[[], float], random: Random, sample: float, observers: tuple[Observe, Observe, Observe]
    ) -> None:
        self._now, self._random, self._sample = now, random, sample
        self._life, self._idle, self._gap = observers
        self._followed: dict[int, _Life] = {}

    def taken(self, blocks: Blocks) -> None:
        """See Watcher."""
        now = self._now()
        for block in blocks:
            life = self._followed.pop(block, None)
            if life is not None:
                self._life(now - life.born)
                self._idle(now - life.last)
                for earlier, later in pairwise(life.uses):
                    self._gap(later - earlier)
            if self._random.random() < self._sample:
                self._followed[block] = _Life(now, now)

    def shared(self, blocks: Blocks) -> None:
        """See Watcher."""
        now = self._now()
        for block in blocks:
            life = self._followed.get(block)
            if life is not None:
                life.last = now
                life.uses = [*life.uses, now][-USES_KEPT:]

    def forgotten(self) -> None:
        """See Watcher."""
        self._followed.clear()
