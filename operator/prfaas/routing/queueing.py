"""Which waiting request is prefilled next, and where: the disciplines of the router's queue (`waiting.Queue`).

    Homed      first come, first served, per place; where a request belongs is decided when it comes. With exact lengths
               this is the plain threshold router that gives each request to the instance with the least work left
    spill      the same, but a request whose own place would let it wait goes where it is done sooner
    Stealing   one list; an idle place without requests of its own takes one of another's (central FCFS + steal)

`triage` has the fourth.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prfaas.routing.waiting import LOCAL, Home, Job, Start, State, usable


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


class _Lined:
    """What queues with a line at each place share: requests wait at home, in order of arrival."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._lines: list[deque[Job]] = []

    @property
    def threshold_in_force(self) -> float:
        """See `Queue`."""
        return self.home.threshold

    def set_thresholds(self, thresholds: Sequence[float | None]) -> None:
        """See `Queue`."""
        self.home = ByThreshold(thresholds)

    def _grow(self, state: State) -> None:
        while len(self._lines) < len(state.places):
            self._lines.append(deque())

    def remove(self, job: Job) -> None:
        """See `Queue`."""
        _remove(self._lines, job)

    def first_token(self, seconds: float) -> None:
        """See `Queue`."""

    def __len__(self) -> int:
        return sum(map(len, self._lines))


class Homed(_Lined):
    """First come, first served, at each place: the plain threshold, and every other rule that decides at arrival."""

    def __init__(self, home: Home, spill_seconds: float | None = None) -> None:
        """`spill_seconds`: a request that would wait longer than this goes where it is done sooner; None: it waits."""
        super().__init__(home)
        self._spill = spill_seconds

    def add(self, job: Job, state: State) -> None:
        """See `Queue`."""
        self._grow(state)
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


class Stealing(_Lined):
    """Central FCFS + steal: everyone waits at home, and a place that has nothing to do helps where it is worth it.

    It takes a request if that is then done in at most `margin` of the time it would take at home: of those that are,
    the one it is comparatively best at, T(home) / T(here). Better than the plain threshold on mean, P90, P99 and
    maximum.
    """

    def __init__(self, home: Home, margin: float = 0.9) -> None:
        """`home`: as for `Homed`."""
        super().__init__(home)
        self._margin = margin

    def add(self, job: Job, state: State) -> None:
        """See `Queue`."""
        self._grow(state)
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
