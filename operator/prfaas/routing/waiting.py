"""What a router's queue is told and asks: who waits, which instances are busy until when, what is on the wire.

A router holds requests until an instance is free. Whoever drives a queue, the router or the simulator, tells it of an
arrival (`add`), asks at every event that may let one start (`next`, until it says None), and tells it of first tokens.
The queue sees what a router sees: predicted prefill times, busy instances, bits on the lines. Place 0 is the pool's own
prefill, the others are links. Pure: the caller's clock, no I/O. The disciplines are in `queueing` and `triage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

LOCAL = 0
"""Index of the place that is the pool's own prefill."""
OVERDUE_SECONDS = 0.05
"""What is still expected of a prefill that should have ended by now."""


@dataclass(slots=True, eq=False)
class Job:
    """One request that waits for its prefill. Compared by identity; `key` names it."""

    key: int
    arrived: float
    """Seconds on the caller's clock."""
    tokens: float
    """Uncached length: what a threshold is compared with."""
    seconds: Sequence[float]
    """Predicted prefill time by place, seconds; inf where it may not go (residency)."""
    gbit: Sequence[float]
    """KV to move after it, by place, Gbit."""
    deferred: bool = False
    """Its first promise will not be kept (see `triage.py`)."""


@dataclass(slots=True)
class Servers:
    """Prefill instances of one place."""

    idle: int = 0
    ends: dict[int, float] = field(default_factory=dict)
    """By busy instance: when its prefill is expected to end, seconds on the caller's clock."""

    @property
    def count(self) -> int:
        """Instances in all."""
        return self.idle + len(self.ends)

    def left(self, now: float) -> list[float]:
        """Seconds until each instance is free, as a heap."""
        busy = (end - now if end > now else OVERDUE_SECONDS for end in self.ends.values())
        return sorted([*[0.0] * self.idle, *busy])


class Wire(Protocol):
    """What carries KV from a place to the decode instances."""

    @property
    def gbps(self) -> float:
        """Rate now, Gbit/s; 0: it is cut."""

    @property
    def transfers(self) -> int:
        """Transfers under way that share the rate; 0 where they do not share."""

    @property
    def gbit(self) -> float:
        """What of them is still to be moved, Gbit."""


@dataclass(frozen=True, slots=True)
class Private:
    """A wire on which transfers do not get in each other's way: RDMA within a pool."""

    gbps: float
    transfers: int = 0
    gbit: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests can be prefilled: its instances, and the wire from there."""

    servers: Servers
    wire: Wire
    flow_gbps: float = math.inf
    """What one transfer gets at most, Gbit/s."""

    @property
    def open(self) -> bool:
        """There is an instance, and a way back from it."""
        return self.servers.count > 0 and self.wire.gbps > 0

    def seconds_per_gbit(self) -> float:
        """How long moving one Gbit more would take, sharing the wire with what is on it now."""
        wire = self.wire
        gbps = min(self.flow_gbps, wire.gbps / (wire.transfers + 1))
        return 1 / gbps if gbps > 0 else math.inf

    def transfer_seconds(self, gbit: float) -> float:
        """How long moving `gbit` would take."""
        return gbit * self.seconds_per_gbit() if gbit else 0.0


@dataclass(slots=True)
class State:
    """What a queue is asked with."""

    now: float
    """Seconds on the caller's clock."""
    slots: int
    """Requests that the decode instances could take: a slot is reserved before the prefill starts."""
    places: Sequence[Place]

    def can_start(self) -> bool:
        """There is a slot and an idle instance."""
        return self.slots > 0 and any(place.servers.idle for place in self.places)


@dataclass(frozen=True, slots=True)
class Start:
    """Prefill this request there now."""

    job: Job
    place: int


class Home(Protocol):
    """Where requests belong."""

    @property
    def threshold(self) -> float:
        """The lowest length that goes over a link, tokens; NaN: none does, or length does not decide."""

    def __call__(self, job: Job, state: State) -> int:
        """A place that is open and that it may use, if there is one, else LOCAL."""


class Queue(Protocol):
    """A discipline."""

    def add(self, job: Job, state: State) -> None:
        """A request has come, or is back because its instance failed."""

    def next(self, state: State) -> Start | None:
        """The next to start; it leaves the queue. None: nothing can or should start now."""

    def remove(self, job: Job) -> None:
        """Its client has gone. Raises ValueError for a job that does not wait."""

    def first_token(self, seconds: float) -> None:
        """A request's first token came after `seconds`."""

    def set_thresholds(self, thresholds: Sequence[float | None]) -> None:
        """A new policy: thresholds by place, tokens, as for `ByThreshold`. Who waits stays where he is."""

    @property
    def threshold_in_force(self) -> float:
        """The lowest length that goes over a link now, tokens; NaN: none does, or length does not decide."""

    def __len__(self) -> int:
        """Requests that wait."""


def usable(job: Job, place: Place, index: int) -> bool:
    """The place is open, and the request may go there."""
    return place.open and job.seconds[index] < math.inf
