"""The work queue between events and reconciles: deduplicating, serial per key, delayed and rate limited.

A key that is added while it waits is one piece of work; one that is added while it is being worked on is worked on once
more afterwards, so no event is lost and no two workers ever hold the same key. A failed key comes back after a backoff
of its own; an event does not shorten that wait, or a failing object in a storm of events would be tried without pause.

`Schedule` is the bookkeeping, without a clock; `WorkQueue` puts it on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass
class _Entry:
    due: float | None = None
    """When the key is wanted, in seconds of the caller's clock; None: not wanted."""
    not_before: float = 0.0
    failures: int = 0
    held: bool = False


class Schedule(Generic[K]):
    """Which key is due when. Times are seconds of one monotonic clock that the caller reads."""

    def __init__(self, base: float, cap: float) -> None:
        """`base` and `cap` bound the wait in seconds after a failure, doubled for each one in a row."""
        self._entries: dict[K, _Entry] = {}
        self._base = base
        self._cap = cap

    def __len__(self) -> int:
        """Keys that wait to be taken."""
        return sum(entry.due is not None for entry in self._entries.values())

    def due_now(self, now: float) -> int:
        """Keys that could be taken now: the queue's depth."""
        return sum(self._ready_at(entry) <= now for entry in self._entries.values())

    def add(self, key: K, due: float) -> None:
        """Want `key` at `due`; an earlier wish stays."""
        entry = self._entries.setdefault(key, _Entry())
        entry.due = due if entry.due is None else min(entry.due, due)

    def take(self, now: float) -> K | None:
        """The key that has been due longest, now held by the caller until `done` or `failed`."""
        ready = [(self._ready_at(entry), index) for index, entry in enumerate(self._entries.values())]
        if not ready:
            return None
        when, index = min(ready)
        if when > now:
            return None
        key = list(self._entries)[index]
        self._entries[key].due = None
        self._entries[key].held = True
        return key

    def done(self, key: K) -> None:
        """The work on a held key succeeded; its failures are forgotten."""
        entry = self._release(key)
        entry.failures = 0
        entry.not_before = 0.0
        if entry.due is None:
            del self._entries[key]

    def failed(self, key: K, now: float, at_least: float = 0.0) -> float:
        """The work on a held key failed: it comes back after the wait in seconds that is returned."""
        entry = self._release(key)
        wait = max(min(self._cap, self._base * 2.0**entry.failures), at_least)
        entry.failures = min(entry.failures + 1, 32)
        entry.not_before = now + wait
        entry.due = now + wait
        return wait

    def next_at(self) -> float:
        """When the next key can be taken; infinity when none waits."""
        return min((self._ready_at(entry) for entry in self._entries.values()), default=float("inf"))

    def _release(self, key: K) -> _Entry:
        entry = self._entries[key]
        if not entry.held:
            raise ValueError(f"not being worked on: {key}")
        entry.held = False
        return entry

    @staticmethod
    def _ready_at(entry: _Entry) -> float:
        if entry.held or entry.due is None:
            return float("inf")
        return max(entry.due, entry.not_before)


class WorkQueue(Generic[K]):
    """A Schedule on an event loop. All methods are to be called on that loop."""

    def __init__(
        self,
        *,
        settle: float = 0.05,
        base: float = 0.5,
        cap: float = 60.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`settle`: seconds for which the events of one change are gathered before their key is worked on."""
        self._schedule: Schedule[K] = Schedule(base, cap)
        self._settle = settle
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._changed = asyncio.Event()

    def add(self, key: K) -> None:
        """Something about `key` changed."""
        self._want(key, self._settle)

    def add_after(self, key: K, seconds: float) -> None:
        """Look at `key` again after a while, or sooner if something changes."""
        self._want(key, seconds)

    async def take(self) -> K:
        """Wait for the next key; the caller then holds it until `done` or `failed`."""
        while True:
            self._changed.clear()
            now = self._clock()
            key = self._schedule.take(now)
            if key is not None:
                return key
            wait = self._schedule.next_at() - now
            try:
                await asyncio.wait_for(self._changed.wait(), None if wait == float("inf") else max(0.0, wait))
            except TimeoutError:
                continue

    def done(self, key: K) -> None:
        """The work on `key` succeeded."""
        self._schedule.done(key)
        self._changed.set()

    def failed(self, key: K, at_least: float = 0.0) -> float:
        """The work on `key` failed; returns the seconds until it comes back."""
        wait = self._schedule.failed(key, self._clock(), at_least)
        self._changed.set()
        return wait

    def depth(self) -> int:
        """Keys that are due and not being worked on."""
        return self._schedule.due_now(self._clock())

    def _want(self, key: K, seconds: float) -> None:
        self._schedule.add(key, self._clock() + seconds)
        self._changed.set()
