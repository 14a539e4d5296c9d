"""Two-promise triage: the discipline that keeps a promise for as many requests as possible.

Every request is promised a first token within D1. Requests wait in one list and are handed out only when an instance is
free. When not all promises can be kept, the longest requests of the overloaded place give way: they are *deferred*. A
deferred request runs when nobody with a live promise waits, and goes first once its second promise, D2 = ratio * D1, is
at stake. D1 sets itself so that about `late_share` of the requests miss it. At every event, while a slot and an idle
instance exist:

    1 cut      R(c), L(c): seconds of work per instance, remote and local (and the line, if that is longer), if requests
               above c were remote. The cut is the threshold t while |R(t) - L(t)| <= 1.5 s, else the c in
               [0.6 t, t / 0.6] with R(c) = L(c). Above the cut a request's home is remote, else local
    2 triage   at each home, in arrival order: add to the schedule; while it would be late, the longest leaves
               (Moore-Hodgson: with one common D1, arrival order is deadline order)
    3 cross    a deferred request moves to the other place if that takes at most 1.5 of its time at home, and nobody
               there becomes late by it
    4 order    those whose second promise is at stake, then those on time, then the deferred; the oldest first
    5 steal    an idle place without requests of its own takes one of the other's (`queueing.steal`)
    6 tune     at each first token D1 <- clip(D1 + gain * ([TTFT > D1] - late_share), floor, ceiling)

One common D1 means that an accepted promise is lost to a later arrival only by being the longest; the balanced cut (1)
is what keeps deferrals rare. Two places: local, and one link.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prfaas.routing.queueing import finish_times, steal
from prfaas.routing.waiting import LOCAL, Job, Place, Start, State, usable

REMOTE: Final = 1
DEAD_BAND_SECONDS: Final = 1.5
WIDEST_CUT: Final = 0.6
BISECTIONS: Final = 8
CROSS_RATIO: Final = 1.5
STEAL_MARGIN: Final = 0.9


@dataclass(frozen=True)
class Promises:
    """What is promised, seconds. `gain` 0: D1 stays what it is at the start."""

    first: float
    ratio: float = 3.0
    late_share: float = 0.01
    gain: float = 0.2
    floor: float = 0.0
    ceiling: float = math.inf

    @classmethod
    def self_tuned(cls, zero_load_p90: float) -> Promises:
        """The recommended setting: D1 from 1.7 times the P90 of an idle system, up to 5 times that."""
        floor = 1.7 * zero_load_p90
        return cls(first=floor, floor=floor, ceiling=5 * floor)

    @classmethod
    def p90_first(cls, zero_load_p90: float) -> Promises:
        """A lower P90 than `self_tuned`, at about the plain threshold's P99."""
        floor = 1.7 * zero_load_p90
        return cls(first=floor, ratio=2.5, late_share=0.06, gain=0.1, floor=floor, ceiling=5 * floor)


class Triage:
    """See the module."""

    def __init__(self, threshold: float, promises: Promises) -> None:
        """`threshold`: the planned t, tokens."""
        self.threshold = max(1.0, threshold)
        self.promises = promises
        self.first = promises.first
        """D1 in force, seconds."""
        self.cut = self.threshold
        """Cut of the last pass, tokens."""
        self._waiting: list[Job] = []

    @property
    def second(self) -> float:
        """D2 in force, seconds."""
        return self.promises.ratio * self.first

    @property
    def threshold_in_force(self) -> float:
        """See `Queue`: the cut of the last pass."""
        return self.cut if math.isfinite(self.threshold) else math.nan

    @property
    def deferred(self) -> int:
        """Requests that wait and gave way."""
        return sum(job.deferred for job in self._waiting)

    def add(self, job: Job, state: State) -> None:
        """See `Queue`. Raises ValueError for more than two places."""
        if len(state.places) > 2:
            raise ValueError(f"triage knows local prefill and one link, there are {len(state.places) - 1} links")
        job.deferred = False
        self._waiting.append(job)
        if len(self._waiting) > 1 and self._waiting[-2].arrived > job.arrived:
            self._waiting.sort(key=lambda each: each.arrived)

    def next(self, state: State) -> Start | None:
        """See `Queue`."""
        if not self._waiting or not state.can_start():
            return None
        self.cut = self._balanced(state) if self._both(state) else self.threshold
        lines: list[list[Job]] = [[] for _ in state.places]
        for job in self._waiting:
            lines[self._home(job, state)].append(job)
        plans = [self._plan(line, place, state) for place, line in enumerate(lines)]
        if len(lines) == 2:
            self._cross(lines, plans, state)
        start = self._ordered(lines, state) or self._stolen(lines, plans, state)
        if start is not None:
            self._waiting.remove(start.job)
        return start

    def remove(self, job: Job) -> None:
        """See `Queue`."""
        self._waiting.remove(job)

    def first_token(self, seconds: float) -> None:
        """See `Queue`."""
        p = self.promises
        moved = self.first + p.gain * ((seconds > self.first) - p.late_share)
        self.first = min(max(moved, p.floor), p.ceiling) if p.gain else self.first

    def set_thresholds(self, thresholds: Sequence[float | None]) -> None:
        """See `Queue`."""
        cut = thresholds[REMOTE] if len(thresholds) > REMOTE else None
        self.threshold = self.cut = math.inf if cut is None else max(1.0, cut)

    def __len__(self) -> int:
        return len(self._waiting)

    @staticmethod
    def _both(state: State) -> bool:
        return len(state.places) == 2 and state.places[LOCAL].open and state.places[REMOTE].open

    def _home(self, job: Job, state: State) -> int:
        if len(state.places) < 2:
            return LOCAL
        wanted = REMOTE if job.tokens > self.cut else LOCAL
        return wanted if usable(job, state.places[wanted], wanted) else 1 - wanted

    def _balanced(self, state: State) -> float:
        """Step 1. Everything about a cut c is a prefix sum over the requests in order of length."""
        local, remote = state.places[LOCAL], state.places[REMOTE]
        live = sorted((job for job in self._waiting if not job.deferred), key=_length)
        lengths = [job.tokens for job in live]
        here = [0.0, *accumulate(job.seconds[LOCAL] for job in live)]
        there = [0.0, *accumulate(job.seconds[REMOTE] for job in live)]
        gbit = [0.0, *accumulate(job.gbit[REMOTE] for job in live)]
        left_here = sum(local.servers.left(state.now))
        left_there = sum(remote.servers.left(state.now))
        many_here, many_there = local.servers.count, remote.servers.count
        wire = remote.wire
        wire_gbit, gbps = wire.gbit, wire.gbps

        def imbalance(cut: float) -> float:
            """R(cut) - L(cut); falls as the cut rises."""
            i = bisect_right(lengths, cut)
            compute = (left_there + there[-1] - there[i]) / many_there
            transfer = (wire_gbit + gbit[-1] - gbit[i]) / gbps
            return max(compute, transfer) - (left_here + here[i]) / many_here

        if math.isinf(self.threshold) or abs(imbalance(self.threshold)) <= DEAD_BAND_SECONDS:
            return self.threshold
        low, high = math.log(WIDEST_CUT * self.threshold), math.log(self.threshold / WIDEST_CUT)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if imbalance(math.exp(middle)) > 0:
                low = middle
            else:
                high = middle
        return math.exp((low + high) / 2)

    def _plan(self, line: Sequence[Job], place: int, state: State) -> list[Job]:
        """Step 2: marks who is deferred, returns those on time, in arrival order."""
        plan: list[Job] = []
        if not line:
            return plan
        where = state.places[place]
        free = where.servers.left(state.now)
        if not free:
            return plan
        pace = where.seconds_per_gbit()
        promised = self.first - state.now
        for job in line:
            job.deferred = False
            latest = job.arrived + promised - job.gbit[place] * pace
            while free[0] + job.seconds[place] > latest:
                longest = max(plan, key=_length, default=job)
                if longest.tokens <= job.tokens:
                    job.deferred = True
                    break
                longest.deferred = True
                plan.remove(longest)
                free = _after(plan, place, where, state.now)
            else:
                heapq.heapreplace(free, free[0] + job.seconds[place])
                plan.append(job)
        return plan

    def _cross(self, lines: list[list[Job]], plans: list[list[Job]], state: State) -> None:
        """Step 3."""
        moving = [(job, home) for home, line in enumerate(lines) for job in line if job.deferred]
        for job, home in sorted(moving, key=lambda each: each[0].arrived):
            other = 1 - home
            if job.seconds[other] > CROSS_RATIO * job.seconds[home] or not usable(job, state.places[other], other):
                continue
            joined = [*plans[other], job]
            joined.sort(key=_arrived)
            if self._all_on_time(joined, other, state):
                job.deferred = False
                plans[other] = joined
                lines[home].remove(job)
                lines[other].append(job)
                lines[other].sort(key=_arrived)

    def _all_on_time(self, plan: Sequence[Job], place: int, state: State) -> bool:
        where = state.places[place]
        free = where.servers.left(state.now)
        pace = where.seconds_per_gbit()
        promised = self.first - state.now
        for job in plan:
            end = free[0] + job.seconds[place]
            if end + job.gbit[place] * pace > job.arrived + promised:
                return False
            heapq.heapreplace(free, end)
        return True

    def _ordered(self, lines: Sequence[Sequence[Job]], state: State) -> Start | None:
        """Step 4; of several idle places the one whose request comes first by the same order."""
        best: tuple[int, float] | None = None
        start = None
        for place, line in enumerate(lines):
            if not state.places[place].servers.idle:
                continue
            pace = state.places[place].seconds_per_gbit()
            for job in line:
                at_stake = state.now - job.arrived + job.seconds[place] + job.gbit[place] * pace > self.second
                rank = (0 if at_stake else 2 if job.deferred else 1, job.arrived)
                if best is None or rank < best:
                    best, start = rank, Start(job, place)
        return start

    def _stolen(self, lines: Sequence[Sequence[Job]], plans: Sequence[Sequence[Job]], state: State) -> Start | None:
        """Step 5; those on time are done in plan order, the deferred after them."""
        for place, line in enumerate(lines):
            if line or not (state.places[place].servers.idle and state.places[place].open):
                continue
            for other, theirs in enumerate(lines):
                if not theirs:
                    continue
                row = [*plans[other], *(job for job in theirs if job.deferred)]
                done = finish_times(row, other, state)
                if (job := steal(row, done, place, other, state, STEAL_MARGIN)) is not None:
                    return Start(job, place)
        return None


def _after(plan: Sequence[Job], place: int, where: Place, now: float) -> list[float]:
    free = where.servers.left(now)
    for job in plan:
        heapq.heapreplace(free, free[0] + job.seconds[place])
    return free


def _length(job: Job) -> float:
    return job.tokens


def _arrived(job: Job) -> float:
    return job.arrived
