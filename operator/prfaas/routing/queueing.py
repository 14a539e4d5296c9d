"""Which waiting request is prefilled next, and where: the disciplines of the router's queue.

A router holds requests until an instance is free. Whoever drives a queue, the router or the simulator, tells it of an
arrival (`add`), asks at every event that may let one start (`next`, until it says None), and tells it of first tokens.
The queue sees what a router sees: predicted prefill times, which instance is busy until when, bits on the lines.

    Homed      first come, first served, per place; where a request belongs is decided when it comes. With exact lengths
               this is the plain threshold router that gives each request to the instance with the least work left
    spill      the same, but a request whose own place would let it wait goes where it is done sooner
    Stealing   one list; an idle place without requests of its own takes one of another's (central FCFS + steal)

`triage.py` has the fourth. Place 0 is the pool's own prefill, the others are links. Pure: the caller's clock, no I/O.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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


class ByThreshold:
    """By length: of the links whose threshold is below it the one with the highest, else local.

    A link that is cut, or a place without instances, is passed over; without a local instance a short request takes the
    link with the lowest threshold.
    """

    def __init__(self, thresholds: Sequence[float | None]) -> None:
        """By place, tokens; None: not used (place 0's is not looked at)."""
        self._cuts = sorted((cut, place) for place, cut in enumerate(thresholds) if place != LOCAL and cut is not None)

    @property
    def threshold(self) -> float:
        """See `Home`."""
        return self._cuts[0][0] if self._cuts else math.nan

    def __call__(self, job: Job, state: State) -> int:
        """See `Home`."""
        for cut, place in reversed(self._cuts):
            if job.tokens > cut and usable(job, state.places[place], place):
                return place
        if not state.places[LOCAL].open:
            for _, place in self._cuts:
                if usable(job, state.places[place], place):
                    return place
        return LOCAL


class Blind:
    """Whatever the length: each place gets its share of the requests."""

    threshold = math.nan

    def __init__(self, shares: Sequence[float], draw: Callable[[], float]) -> None:
        """`shares` by place; `draw` gives even numbers in [0, 1)."""
        self._shares = shares
        self._draw = draw

    def __call__(self, job: Job, state: State) -> int:
        """See `Home`."""
        at = self._draw()
        for place, share in enumerate(self._shares):
            at -= share
            if at < 0 and usable(job, state.places[place], place):
                return place
        return next((i for i, place in enumerate(state.places) if usable(job, place, i)), LOCAL)


def usable(job: Job, place: Place, index: int) -> bool:
    """The place is open, and the request may go there."""
    return place.open and job.seconds[index] < math.inf


class Homed:
    """First come, first served, at each place: the plain threshold, and every other rule that decides at arrival."""

    def __init__(self, home: Home, spill_seconds: float | None = None) -> None:
        """`spill_seconds`: a request that would wait longer than this goes where it is done sooner; None: it waits."""
        self.home = home
        self._spill = spill_seconds
        self._lines: list[deque[Job]] = []

    @property
    def threshold_in_force(self) -> float:
        """See `Queue`."""
        return self.home.threshold

    def set_thresholds(self, thresholds: Sequence[float | None]) -> None:
        """See `Queue`."""
        self.home = ByThreshold(thresholds)

    def add(self, job: Job, state: State) -> None:
        """See `Queue`."""
        while len(self._lines) < len(state.places):
            self._lines.append(deque())
        place = self.home(job, state)
        if self._spill is not None:
            place = self._sooner(job, place, state, self._spill)
        _in_order(self._lines[place], job)

    def next(self, state: State) -> Start | None:
        """See `Queue`."""
        if state.slots <= 0:
            return None
        best: Job | None = None
        at = LOCAL
        for place, line in enumerate(self._lines):
            if not line:
                continue
            if not state.places[place].open and self._moved(place, state):
                return self.next(state)
            if state.places[place].servers.idle and (best is None or line[0].arrived < best.arrived):
                best, at = line[0], place
        if best is None:
            return None
        self._lines[at].popleft()
        return Start(best, at)

    def remove(self, job: Job) -> None:
        """See `Queue`."""
        _remove(self._lines, job)

    def first_token(self, seconds: float) -> None:
        """See `Queue`."""

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def _moved(self, closed: int, state: State) -> bool:
        """Requests of a place that has closed go where they would go now, if that is elsewhere."""
        waiting = self._lines[closed]
        moved = [job for job in waiting if self.home(job, state) != closed]
        for job in moved:
            waiting.remove(job)
            self.add(job, state)
        return bool(moved)

    def _sooner(self, job: Job, home: int, state: State, limit: float) -> int:
        waits = [self._wait(place, state) for place in range(len(state.places))]
        if waits[home] <= limit:
            return home

        def finish(place: int) -> float:
            if not usable(job, state.places[place], place):
                return math.inf
            return waits[place] + job.seconds[place] + state.places[place].transfer_seconds(job.gbit[place])

        best = min(range(len(waits)), key=finish)
        return best if finish(best) < finish(home) else home

    def _wait(self, place: int, state: State) -> float:
        free = state.places[place].servers.left(state.now)
        if not free:
            return math.inf
        for job in self._lines[place]:
            heapq.heapreplace(free, free[0] + job.seconds[place])
        return free[0]


class Stealing:
    """Central FCFS + steal: everyone waits at home, and a place that has nothing to do helps where it is worth it.

    It takes a request if that is then done in at most `margin` of the time it would take at home: of those that are,
    the one it is comparatively best at, T(home) / T(here). Better than the plain threshold on mean, P90, P99 and
    maximum.
    """

    def __init__(self, home: Home, margin: float = 0.9) -> None:
        """`home`: as for `Homed`."""
        self.home = home
        self._margin = margin
        self._lines: list[deque[Job]] = []

    @property
    def threshold_in_force(self) -> float:
        """See `Queue`."""
        return self.home.threshold

    def set_thresholds(self, thresholds: Sequence[float | None]) -> None:
        """See `Queue`."""
        self.home = ByThreshold(thresholds)

    def add(self, job: Job, state: State) -> None:
        """See `Queue`."""
        while len(self._lines) < len(state.places):
            self._lines.append(deque())
        _in_order(self._lines[self.home(job, state)], job)

    def next(self, state: State) -> Start | None:
        """See `Queue`."""
        if not state.can_start():
            return None
        for place, line in enumerate(self._lines):
            if line and not state.places[place].open:
                self._lines[place] = deque()
                for job in line:
                    self.add(job, state)
        idle = [i for i in range(len(self._lines)) if state.places[i].servers.idle and state.places[i].open]
        own = [i for i in idle if self._lines[i]]
        if own:
            place = min(own, key=lambda i: self._lines[i][0].arrived)
            return Start(self._lines[place].popleft(), place)
        for place in idle:
            for other, line in enumerate(self._lines):
                if not line:
                    continue
                done = finish_times(line, other, state)
                taken = steal(line, done, place, other, state, self._margin)
                if taken is not None:
                    line.remove(taken)
                    return Start(taken, place)
        return None

    def remove(self, job: Job) -> None:
        """See `Queue`."""
        _remove(self._lines, job)

    def first_token(self, seconds: float) -> None:
        """See `Queue`."""

    def __len__(self) -> int:
        return sum(map(len, self._lines))


def finish_times(jobs: Iterable[Job], place: int, state: State) -> list[float]:
    """When each would have its KV at the decode instance if the place took them in this order, seconds from now."""
    where = state.places[place]
    free = where.servers.left(state.now)
    pace = where.seconds_per_gbit()
    found = []
    for job in jobs:
        if not free:
            found.append(math.inf)
            continue
        end = free[0] + job.seconds[place]
        heapq.heapreplace(free, end)
        found.append(end + job.gbit[place] * pace)
    return found


def steal(jobs: Sequence[Job], done: Sequence[float], here: int, home: int, state: State, margin: float) -> Job | None:
    """Of another place's requests, done there in `done` seconds from now, the one that an idle place should take."""
    pace = state.places[here].seconds_per_gbit()
    best: Job | None = None
    advantage = 0.0
    for job, there in zip(jobs, done, strict=True):
        mine = job.seconds[here]
        if mine + job.gbit[here] * pace <= margin * there:
            ratio = job.seconds[home] / mine
            if ratio > advantage:
                best, advantage = job, ratio
    return best


def _in_order(line: deque[Job], job: Job) -> None:
    """At the end, or, back after a failure, where it was."""
    line.append(job)
    if len(line) > 1 and line[-2].arrived > job.arrived:
        row = sorted(line, key=lambda each: each.arrived)
        line.clear()
        line.extend(row)


def _remove(lines: Sequence[deque[Job]], job: Job) -> None:
    for line in lines:
        if job in line:
            line.remove(job)
            return
    raise ValueError(f"request {job.key} does not wait")
