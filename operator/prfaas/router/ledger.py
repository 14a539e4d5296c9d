"""What this router has in flight, what it remembers of a request between its attempts, and whom it leaves alone.

A stream is named by (stream id, attempt): Envoy gives every request an id that no client can choose. The decode slot
is taken when the decision is made and given back when Envoy's access log says that the stream ended, whichever way.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prfaas.router.answers import Reply
from prfaas.routing.decision import Decision, Refusal
from prfaas.routing.world import Load

Stream = tuple[str, int]
"""(Envoy's stream id, attempt)."""


@dataclass
class Entry:
    """One attempt of one request, from the decision to the end of its stream."""

    path: str
    began: float
    """The ledger's time."""
    outcome: Decision | Refusal | None = None
    """The last decision; None before it, and for what is not routed."""
    reason: str = ""
    """Overrides the decision's reason: why the picker answered by itself."""
    slot: str | None = None
    """Address of the decode instance whose slot is held."""
    repeated: bool = False
    """An attempt that was answered with the answer to the one before it."""
    closed: bool = False
    """The stream ended, maybe while its decision was still being made: it takes no slot any more."""


@dataclass(frozen=True)
class Past:
    """What an earlier attempt of a request left."""

    decode: frozenset[str] = frozenset()
    """Decode instances that were tried."""
    prefill: str | None = None
    """Prefill instance that computed the prompt."""
    reply: Reply | None = None
    """The picker's own final answer: Envoy repeats any 503 once, and this one need not be thought over again."""


@dataclass
class Ledger:
    """Single-threaded book; `now` is a monotonic clock in seconds."""

    now: Callable[[], float]
    first_skip_s: float = 1.0
    longest_skip_s: float = 15.0
    remembered: int = 20_000
    """Requests whose past is kept. A second attempt follows the first within milliseconds."""
    in_flight: Counter[str] = field(default_factory=Counter)
    entries: dict[Stream, Entry] = field(default_factory=dict)
    _past: OrderedDict[str, Past] = field(default_factory=OrderedDict)
    _skips: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Address -> (skipped until, seconds of the last skip)."""

    def load(self) -> Load:
        """The book as a decision reads it."""
        now = self.now()
        return Load(self.in_flight, frozenset(address for address, (until, _) in self._skips.items() if until > now))

    def begin(self, stream: Stream, path: str) -> Entry:
        """Open the entry of one attempt."""
        self.end(stream)
        entry = self.entries[stream] = Entry(path, self.now())
        return entry

    def hold(self, entry: Entry, decode: str) -> None:
        """Take a slot of a decode instance; an entry holds one at most."""
        self.release(entry)
        if not entry.closed:
            entry.slot = decode
            self.in_flight[decode] += 1

    def release(self, entry: Entry) -> None:
        """Give the decode slot back."""
        if entry.slot is not None:
            self._leave(entry.slot)
            entry.slot = None

    def end(self, stream: Stream) -> Entry | None:
        """The stream ended: close its entry. None if it is not in the book (the picker was restarted)."""
        entry = self.entries.pop(stream, None)
        if entry is not None:
            entry.closed = True
            self.release(entry)
        return entry

    def forget_before(self, moment: float) -> None:
        """Envoy started after this moment: what began before ended with the Envoy before it, and was not logged."""
        for stream in [stream for stream, entry in self.entries.items() if entry.began < moment]:
            self.end(stream)

    @contextmanager
    def leg(self, prefill: str) -> Iterator[None]:
        """Counts a prefill leg while it runs, and not during the decode that follows."""
        self.in_flight[prefill] += 1
        try:
            yield
        finally:
            self._leave(prefill)

    def _leave(self, address: str) -> None:
        self.in_flight[address] -= 1
        if self.in_flight[address] <= 0:
            del self.in_flight[address]

    def past(self, stream_id: str) -> Past:
        """What earlier attempts of this request left."""
        return self._past.get(stream_id, Past())

    def remember(self, stream_id: str, past: Past) -> None:
        """Keep this for the next attempt."""
        self._past[stream_id] = past
        self._past.move_to_end(stream_id)
        while len(self._past) > self.remembered:
            self._past.popitem(last=False)

    def refused(self, addresses: Iterable[str]) -> None:
        """These took no connection: leave them alone, for longer each time."""
        now = self.now()
        for address in addresses:
            until, last = self._skips.get(address, (-math.inf, 0.0))
            if until > now:
                continue  # a request that set out before the first one failed tells nothing new
            length = min(max(2 * last, self.first_skip_s), self.longest_skip_s)
            self._skips[address] = (now + length, length)

    def answered(self, address: str) -> None:
        """It took a connection and answered: whatever was, is over."""
        self._skips.pop(address, None)

    def retain(self, addresses: Iterable[str]) -> None:
        """Forget the skips of endpoints that are no longer listed."""
        listed = set(addresses)
        self._skips = {address: skip for address, skip in self._skips.items() if address in listed}
