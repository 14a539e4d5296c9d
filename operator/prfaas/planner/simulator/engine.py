"""A run: requests come, wait in their pool's queue, are prefilled, moved and decoded.

    arrival -> queue of the PD pool -> [slot free, instance free] prefill -> transfer -> first token -> decode -> done

A decode slot is reserved before the prefill starts and held to the last token; with `slots` "after" it is taken when
the KV cache has come, and who finds none waits for one, first come, first served. A prefill instance is free as soon
as its prefill ends, while the transfer goes on. Over a link the transfer shares the line; within a pool it gets
`rdma_gbps`. With `overlap` the rows of full attention cross while the prefill still runs, and only the recurrent state
comes after it; without it, as in vLLM's NIXL connector, everything is moved when the prefill is done.

Prefix caches, where the requests name their blocks: one per pool. What a pool prefills it keeps, rows and states; what
it gets over a link it keeps as rows, and the state it gets is at the prompt's very end, where nobody can reuse it. A
threshold is compared with the length that is uncached in the PD pool.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prfaas.planner.errors import PlanError
from prfaas.planner.setting import Setting
from prfaas.planner.simulator.arrivals import Arrival
from prfaas.planner.simulator.changes import Change, Conversion, Failure, LineRate, NewThresholds
from prfaas.planner.simulator.loop import Loop
from prfaas.planner.simulator.results import LOCAL_CLASS, REMOTE_CLASS, Log, Result
from prfaas.planner.simulator.stations import Flight, Station
from prfaas.planner.simulator.watch import Watch
from prfaas.planner.simulator.world import CacheOf, Part, QueueOf, Router, build
from prfaas.planner.topology import Topology
from prfaas.routing.waiting import LOCAL, Job

ROWS, STATE = 0, 1
PROGRESS_EVERY = 500


@dataclass(frozen=True)
class Options:
    """How a run is made."""

    warmup: float = 0.0
    """Requests that come before this, seconds, are not counted."""
    overlap: bool = False
    """Rows cross the line while the prefill runs."""
    slots: Literal["before", "after"] = "before"
    """When a decode slot is taken: before the prefill, or after it."""
    sample_seconds: float = 1.0
    """Distance of the samples over time, to begin with."""
    keep_values: bool = False
    """The result holds every single time to first token, for a plot."""


DEFAULT = Options()


class Simulation:
    """One run of a setting. `result` can be asked at any time, also after an interrupted `run`."""

    def __init__(
        self,
        topology: Topology,
        setting: Setting,
        arrivals: Iterable[Arrival],
        queue_of: QueueOf,
        *,
        seed: int = 0,
        options: Options = DEFAULT,
        cache_of: CacheOf = lambda pool: None,
        changes: Sequence[Change] = (),
    ) -> None:
        """Raises PlanError where the setting or a change does not fit the topology."""
        self._loop = Loop()
        self._options = options
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._draw = random.Random(f"{seed}/routing").random
        self._log = Log()
        self._world = build(self._loop, topology, setting, queue_of, cache_of, self._moved, self._complete)
        self._watch = Watch(self._loop, self._world, self._log, options.sample_seconds, lambda: self._under_way)
        self._came = 0
        self._under_way = 0
        self._begun = False
        for index, change in enumerate(changes):
            self._loop.at(change.at, self._prepared(change, f"changes[{index}]"))

    def run(self, progress: Callable[[int, float], None] | None = None) -> Result:
        """To the last token of the last request, or until nothing can happen any more.

        `progress(requests so far, simulated seconds)` is called now and then. An exception of its, or an interrupt,
        leaves the simulation as it is.
        """
        if not self._begun:
            self._begun = True
            self._loop.at(self._options.warmup, self._warm)
            self._come()
            self._watch.sample()
        step = self._loop.step
        told = self._came
        while step():
            if progress is not None and self._came - told >= PROGRESS_EVERY:
                told = self._came
                progress(told, self._loop.now)
        return self.result()

    def result(self) -> Result:
        """Of what has happened so far."""
        return self._watch.result(self._options.keep_values)

    # The life of a request

    def _warm(self) -> None:
        if self._watch.end is None:
            self._watch.start = self._watch.mark()

    def _come(self) -> None:
        """Look at the next request; it comes when it comes."""
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._watch.end = self._watch.mark()
        else:
            self._loop.at(arrival.at, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._came += 1
        self._under_way += 1
        world = self._world
        pd = 0
        if len(world.routers) > 1:
            at = self._draw()
            while pd + 1 < len(world.shares) and at >= world.shares[pd]:
                at -= world.shares[pd]
                pd += 1
        leave = self._draw() if world.residency else 0.0
        flight = Flight(
            number=self._came,
            at=self._loop.now,
            tokens=arrival.tokens,
            output=arrival.output,
            cached=arrival.cached,
            blocks=arrival.blocks,
            leave=leave,
            pd=pd,
        )
        self._enqueue(flight)
        self._come()

    def _enqueue(self, flight: Flight) -> None:
        router = self._world.routers[flight.pd]
        seen = router.predict(flight)
        seconds = [took if router.may_go(flight, place) else math.inf for place, took in enumerate(seen.seconds)]
        job = Job(flight.number, flight.at, flight.tokens - seen.cached[LOCAL], seconds, seen.gbit)
        router.waiting[flight.number] = flight
        router.queue.add(job, router.state(self._loop.now))
        self._dispatch(router)

    def _dispatch(self, router: Router) -> None:
        """Start what can start."""
        queue = router.queue
        after = self._options.slots == "after"
        while router.waiting and (after or router.decoders.slots > 0):
            state = router.state(self._loop.now)
            if after:
                state.slots = len(router.waiting)
            start = queue.next(state)
            if start is None:
                return
            self._start(router, router.waiting.pop(start.job.key), start.job, start.place)

    def _start(self, router: Router, flight: Flight, job: Job, place: int) -> None:
        now = self._loop.now
        station = router.stations[place]
        took, gbit, cached = job.seconds[place], job.gbit[place], flight.cached
        if flight.blocks:  # what was cached when it came may have gone, or more may be there
            seen = router.predict(flight)
            took, gbit, cached = seen.seconds[place], seen.gbit[place], seen.cached[place]
        flight.place, flight.started = place, now
        if self._options.slots == "before":
            flight.decoder = router.decoders.reserve(flight, now)
        number = station.take(flight, flight.attempt, now + took, now)
        if flight.at >= self._options.warmup:
            self._log.prompt_tokens += flight.tokens
            self._log.prefill_tokens += flight.tokens - cached
        flight.parts = 1
        after = gbit
        lane = router.lanes[place]
        if self._options.overlap and lane is not None:
            after = min(gbit, station.gbit(0))
            flight.parts = 2
            idle = min(lane[0].gbps, lane[1].cap)
            # As late as an idle line allows: before that it would run out of rows to send.
            wait = max(0.0, took - (gbit - after) / idle) if idle > 0 else took
            self._loop.at(now + wait, self._move, flight, flight.attempt, ROWS, gbit - after)
        self._loop.at(now + took, self._prefilled, flight, flight.attempt, station, number, after)

    def _prefilled(self, flight: Flight, attempt: int, station: Station, number: int, gbit: float) -> None:
        if number not in station.flights:
            return  # the instance has failed
        if station.free(number, self._loop.now):
            self._become_decode(station)
        if flight.attempt == attempt:
            if flight.blocks:
                self._keep(flight)
            self._move(flight, attempt, STATE, gbit)
        self._freed(station)

    def _freed(self, station: Station) -> None:
        """An instance is there for whoever waits; those who share it take turns."""
        users = self._world.users[station.resource]
        for router in users:
            self._dispatch(router)
        if len(users) > 1:
            users.append(users.pop(0))

    def _keep(self, flight: Flight) -> None:
        router = self._world.routers[flight.pd]
        for place in sorted({LOCAL, flight.place}):
            cache = router.stations[place].cache
            if cache is not None:
                cache.keep(flight.blocks, int(flight.tokens), states=place == flight.place)

    def _move(self, flight: Flight, attempt: int, part: int, gbit: float) -> None:
        if flight.attempt != attempt:
            return
        router = self._world.routers[flight.pd]
        lane = router.lanes[flight.place]
        if lane is None:
            self._loop.at(self._loop.now + gbit / router.pd.rdma_gbps, self._moved, (flight, attempt, part))
        else:
            flight.moving[part] = lane[0].join(lane[1], gbit, (flight, attempt, part))

    def _moved(self, moved: Part) -> None:
        flight, attempt, part = moved
        if flight.attempt != attempt:
            return
        flight.moving.pop(part, None)
        flight.parts -= 1
        if flight.parts:
            return
        router = self._world.routers[flight.pd]
        if flight.decoder is None:
            router.ready.append(flight)
            self._admit(router)
        else:
            self._first_token(flight, router)

    def _admit(self, router: Router) -> None:
        """Who has his KV cache and waits for a slot gets one."""
        while router.ready and router.decoders.slots > 0:
            flight = router.ready.popleft()
            flight.decoder = router.decoders.reserve(flight, self._loop.now)
            self._first_token(flight, router)

    def _first_token(self, flight: Flight, router: Router) -> None:
        now = self._loop.now
        flight.first_token = now
        router.queue.first_token(now - flight.at)
        if flight.at >= self._options.warmup:
            self._log.ttft[_class(flight)].append(now - flight.at)
            self._log.waiting.append(flight.started - flight.at)
        took = router.decoders.decode(flight) if flight.output > 0 else 0.0
        if took is not None:
            self._loop.at(now + took, self._decoded, flight, flight.attempt)

    def _decoded(self, flight: Flight, attempt: int) -> None:
        if flight.attempt == attempt:
            self._complete(flight)

    def _complete(self, flight: Flight) -> None:
        now = self._loop.now
        if flight.output > 0 and flight.at >= self._options.warmup:
            self._log.tpot[_class(flight)].append((now - flight.first_token) / flight.output)
        self._log.completed += 1
        self._log.ended = now
        self._under_way -= 1
        router = self._world.routers[flight.pd]
        if router.decoders.release(flight, now):
            self._become_prefill(router)
        self._admit(router)
        self._dispatch(router)

    # What happens from outside

    def _prepared(self, change: Change, path: str) -> Callable[[], None]:
        """What to do at the time of a change; names are looked up now."""
        world = self._world
        if isinstance(change, LineRate):
            if change.line not in world.lines:
                raise PlanError(f"{path}.line", f"there is no line {change.line!r}; there are {sorted(world.lines)}")
            return lambda: self._set_rate(change.line, change.gbps)
        if isinstance(change, NewThresholds):
            return lambda: self._set_thresholds(change)
        if isinstance(change, Conversion):
            router = world.router(change.pd, f"{path}.pd")
            return lambda: self._convert(router, to_decode=change.to == "decode")
        kind, _, name = change.resource.partition("/")
        if kind == "decode":
            router = world.router(name, f"{path}.resource")
            return lambda: self._lose_decode(router, change)
        station = world.station(change.resource, f"{path}.resource")
        return lambda: self._lose_prefill(station, change)

    def _set_rate(self, line: str, gbps: float) -> None:
        self._world.line_rates[line].add(gbps - self._world.line_rates[line].value, self._loop.now)
        self._world.lines[line].set_rate(gbps)
        for router in self._world.routers:
            self._dispatch(router)

    def _set_thresholds(self, change: NewThresholds) -> None:
        for router in self._world.routers:
            cuts = [None, *(change.thresholds.get(link.name) for link in router.links)]
            router.enabled = [True, *(cut is not None for cut in cuts[1:])]
            router.queue.set_thresholds(cuts)
            self._dispatch(router)

    def _convert(self, router: Router, *, to_decode: bool) -> None:
        now = self._loop.now
        station = router.stations[LOCAL]
        if to_decode:
            if station.leave(now):
                self._become_decode(station)
        elif router.decoders.drain(now):
            self._become_prefill(router)

    def _become_decode(self, station: Station) -> None:
        router = next(each for each in self._world.routers if each.stations[LOCAL] is station)

        def ready() -> None:
            router.decoders.add(self._loop.now)
            self._admit(router)
            self._dispatch(router)

        self._loop.at(self._loop.now + station.startup_seconds, ready)

    def _become_prefill(self, router: Router) -> None:
        station = router.stations[LOCAL]
        self._loop.at(self._loop.now + station.startup_seconds, self._ready, station)

    def _ready(self, station: Station) -> None:
        station.add(self._loop.now)
        self._freed(station)

    def _lose_prefill(self, station: Station, change: Failure) -> None:
        if station.servers.count == 0:
            return
        flight = station.lose(self._loop.now)
        self._loop.at(self._loop.now + change.seconds, self._ready, station)
        if flight is None:
            return
        router = self._world.routers[flight.pd]
        if flight.decoder is not None and router.decoders.release(flight, self._loop.now):
            self._become_prefill(router)
        self._again(flight)

    def _lose_decode(self, router: Router, change: Failure) -> None:
        lost = router.decoders.lose(self._loop.now)
        if lost is None:
            return

        def ready() -> None:
            router.decoders.add(self._loop.now)
            self._admit(router)
            self._dispatch(router)

        self._loop.at(self._loop.now + change.seconds, ready)
        for flight in lost:
            if flight.first_token < 0:
                self._again(flight)
            else:
                flight.attempt += 1
                self._log.failed += 1
                self._under_way -= 1

    def _again(self, flight: Flight) -> None:
        """It waits anew, with its old place in time."""
        flight.attempt += 1
        lane = self._world.routers[flight.pd].lanes[flight.place]
        if lane is not None:
            for number in flight.moving.values():
                lane[0].leave(lane[1], number)
        flight.moving.clear()
        self._enqueue(flight)


def _class(flight: Flight) -> str:
    return LOCAL_CLASS if flight.place == LOCAL else REMOTE_CLASS
