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

    @property
    def open(self) -> bool:
        """There is an instance, and a way back from it."""
        return self.servers.count > 0 and self.wire.gbps > 0

    def transfer_seconds(self, gbit: float) -> float:
        """How long moving `gbit` would take, sharing the wire with what is on it now."""
        wire = self.wire
        return gbit * (wire.transfers + 1) / wire.gbps if wire.gbps > 0 else math.inf


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


Home = Callable[[Job, State], int]
"""Where a request belongs: the index of a place that is open, if there is one that it may use, else LOCAL."""


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

    def __len__(self) -> int:
        """Requests that wait."""


def by_threshold(thresholds: Sequence[float | None]) -> Home:
    """By length: of the links whose threshold is below it the one with the highest, else local.

    `thresholds` by place, tokens; None: not used (place 0's is not looked at). A link that is cut, or a place without
    instances, is passed over; without a local instance a short request takes the link with the lowest threshold.
    """
    cuts = sorted((cut, place) for place, cut in enumerate(thresholds) if place != LOCAL and cut is not None)

    def home(job: Job, state: State) -> int:
        for cut, place in reversed(cuts):
            if job.tokens > cut and usable(job, state.places[place], place):
                return place
        if not state.places[LOCAL].open:
            for _, place in cuts:
                if usable(job, state.places[place], place):
                    return place
        return LOCAL

    return home


def blind(shares: Sequence[float], draw: Callable[[], float]) -> Home:
    """Length-blind: each place gets its share of the requests, `draw` giving even numbers in [0, 1)."""

    def home(job: Job, state: State) -> int:
        at = draw()
        for place, share in enumerate(shares):
            at -= share
            if at < 0 and usable(job, state.places[place], place):
                return place
        return next((i for i, place in enumerate(state.places) if usable(job, place, i)), LOCAL)

    return home


def usable(job: Job, place: Place, index: int) -> bool:
    """The place is open, and the request may go there."""
    return place.open and job.seconds[index] < math.inf


class Homed:
    """First come, first served, at each place: the plain threshold, and every other rule that decides at arrival."""

    def __init__(self, home: Home, spill_seconds: float | None = None) -> None:
        """`spill_seconds`: a request that would wait longer than this goes where it is done sooner; None: it waits."""
        self._home = home
        self._spill = spill_seconds
        self._lines: list[deque[Job]] = []

    def add(self, job: Job, state: State) -> None:
        """See `Queue`."""
        while len(self._lines) < len(state.places):
            self._lines.append(deque())
        place = self._home(job, state)
        if self._spill is not None:
            place = self._sooner(job, place, state, self._spill)
        line = self._lines[place]
        if line and line[-1].arrived > job.arrived:  # back after a failure: it has its turn
            self._lines[place] = deque(sorted([*line, job], key=_age))
        else:
            line.append(job)

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
        moved = [job for job in waiting if self._home(job, state) != closed]
        if moved:
            self._lines[closed] = deque(job for job in waiting if job not in moved)
            for job in moved:
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
    the one it is comparatively best at, T(home) / T(here). Better than the plain threshold on mean, P90, P99 and maximum.
    """

    def __init__(self, home: Home, margin: float = 0.9) -> None:
        """`home`: as for `Homed`."""
        self._home = home
        self._margin = margin
        self._lines: list[list[Job]] = []

    def add(self, job: Job, state: State) -> None:
        """See `Queue`."""
        while len(self._lines) < len(state.places):
            self._lines.append([])
        line = self._lines[self._home(job, state)]
        line.append(job)
        if len(line) > 1 and line[-2].arrived > job.arrived:
            line.sort(key=_age)

    def next(self, state: State) -> Start | None:
        """See `Queue`."""
        if not state.can_start():
            return None
        for place, line in enumerate(self._lines):
            if line and not state.places[place].open:
                self._lines[place] = []
                for job in line:
                    self.add(job, state)
        idle = [i for i in range(len(self._lines)) if state.places[i].servers.idle and state.places[i].open]
        own = [i for i in idle if self._lines[i]]
        if own:
            place = min(own, key=lambda i: self._lines[i][0].arrived)
            return Start(self._lines[place].pop(0), place)
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
    found = []
    for job in jobs:
        if not free:
            found.append(math.inf)
            continue
        end = free[0] + job.seconds[place]
        heapq.heapreplace(free, end)
        found.append(end + where.transfer_seconds(job.gbit[place]))
    return found


def steal(jobs: Sequence[Job], done: Sequence[float], here: int, home: int, state: State, margin: float) -> Job | None:
    """Of another place's requests, done there in `done` seconds from now, the one that an idle place should take."""
    where = state.places[here]
    best: Job | None = None
    advantage = 0.0
    for job, there in zip(jobs, done, strict=True):
        mine = job.seconds[here]
        if mine + where.transfer_seconds(job.gbit[here]) <= margin * there:
            ratio = job.seconds[home] / mine
            if ratio > advantage:
                best, advantage = job, ratio
    return best


def _age(job: Job) -> float:
    return job.arrived


def _remove(lines: Sequence[deque[Job] | list[Job]], job: Job) -> None:
    for line in lines:
        if job in line:
            line.remove(job)
            return
    raise ValueError(f"request {job.key} does not wait")
