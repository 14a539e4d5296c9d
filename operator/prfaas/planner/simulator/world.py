"""What a simulation is made of: the pools, lines and routers of a topology in one setting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.planner.errors import PlanError
from prfaas.planner.setting import Setting
from prfaas.planner.simulator.loop import Loop
from prfaas.planner.simulator.sharing import Lane, Line
from prfaas.planner.simulator.stations import Decoders, Flight, Meter, Station
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.routing.prefixes import MISS, PrefixCache
from prfaas.routing.waiting import LOCAL, Place, Private, Queue, State

Part = tuple[Flight, int, int]
"""A transfer: whose, of which attempt, which part of it."""
QueueOf = Callable[[PDPool, Sequence[Link]], Queue]
"""The queue of a PD pool's router; place 0 is local, the links follow."""
CacheOf = Callable[[PrfaaSPool | PDPool], PrefixCache | None]


@dataclass(slots=True)
class Prediction:
    """What a request would take at each place."""

    seconds: Sequence[float]
    """Of prefill."""
    gbit: Sequence[float]
    """To be moved."""
    cached: Sequence[float]
    """Tokens that need not be computed."""


class Router:
    """A PD pool, and the queue before it. Lists are by place: 0 is local, the links follow."""

    def __init__(
        self, pd: PDPool, links: Sequence[Link], queue: Queue, decoders: Decoders, stations: Sequence[Station]
    ) -> None:
        """Links are enabled, lanes and places set by `build`."""
        self.pd = pd
        self.links = links
        self.queue = queue
        self.decoders = decoders
        self.stations = stations
        self.lanes: list[tuple[Line[Part], Lane[Part]] | None] = [None]
        self.enabled = [True]
        self.waiting: dict[int, Flight] = {}
        """For their prefill, by number."""
        self.ready: deque[Flight] = deque()
        """For a decode slot, with their KV cache made and moved."""
        self._state = State(0.0, 0, [])

    def set_places(self, places: Sequence[Place]) -> None:
        """What its queue may choose from."""
        self._state.places = places

    def predict(self, flight: Flight) -> Prediction:
        """As the caches are now. Rows that the PD pool holds are not moved again."""
        tokens, stations = flight.tokens, self.stations
        cached: Sequence[float]
        local = stations[LOCAL].cache
        if flight.blocks and local is not None:
            hits = [s.cache.look(flight.blocks, int(tokens)) if s.cache else MISS for s in stations]
            cached, rows = [hit.reusable for hit in hits], float(hits[LOCAL].rows)
        else:
            cached, rows = [flight.cached] * len(stations), flight.cached
        seconds = [s.prefill_seconds(tokens, x) for s, x in zip(stations, cached, strict=True)]
        gbit = [s.gbit(tokens - rows) for s in stations]
        return Prediction(seconds, gbit, cached)

    def may_go(self, flight: Flight, place: int) -> bool:
        """The link is in use, and open to this request (residency)."""
        return place == LOCAL or (self.enabled[place] and flight.leave < self.links[place - 1].allowance)

    def state(self, now: float) -> State:
        """What its queue is asked with; the same object every time."""
        self._state.now = now
        self._state.slots = self.decoders.slots
        return self._state


@dataclass(frozen=True)
class World:
    """Everything there is."""

    routers: Sequence[Router]
    stations: Sequence[Station]
    lines: dict[str, Line[Part]]
    line_rates: dict[str, Meter]
    users: dict[str, list[Router]]
    """Whose requests a station prefills, by its resource."""
    shares: Sequence[float]
    """Of the traffic, by router."""
    residency: bool
    """Some link is not for everyone."""

    def router(self, pd: str, path: str) -> Router:
        """The router of a PD pool. Raises PlanError at `path`."""
        for each in self.routers:
            if each.pd.name == pd:
                return each
        raise PlanError(path, f"there is no PD pool {pd!r}")

    def station(self, resource: str, path: str) -> Station:
        """Prefill instances by resource. Raises PlanError at `path`."""
        for each in self.stations:
            if each.resource == resource:
                return each
        known = ", ".join(sorted(each.resource for each in self.stations))
        raise PlanError(path, f"there are no prefill instances {resource!r}; there are {known}")


def build(
    loop: Loop,
    topology: Topology,
    setting: Setting,
    queue_of: QueueOf,
    cache_of: CacheOf,
    moved: Callable[[Part], None],
    complete: Callable[[Flight], None],
) -> World:
    """`moved` is called for every transfer over a link that ends, `complete` for sequences that end in a batch.

    Raises PlanError where the setting does not fit the topology.
    """
    prfaas = {
        pool.name: Station(
            f"prfaas/{pool.name}", pool.profile, setting.prfaas.get(pool.name, pool.instances), cache_of(pool)
        )
        for pool in topology.prfaas
    }
    lines: dict[str, Line[Part]] = {}
    lanes: dict[str, Lane[Part]] = {}
    for name in topology.lines:
        on_it = [link for link in topology.links if link.line_name == name]
        for link in on_it:
            lanes[link.name] = Lane(math.inf if link.flow_gbps is None else link.flow_gbps)
        lines[name] = Line(loop, min(map(_rate, on_it)), [lanes[link.name] for link in on_it], moved)
    routers = []
    for pd in topology.pd:
        split = setting.splits.get(pd.name)
        if split is None:
            raise PlanError(f"setting.splits.{pd.name}", "is missing: how many instances prefill and decode")
        links = topology.links_of(pd.name)
        station = Station(f"prefill/{pd.name}", pd.profile, split.prefill, cache_of(pd))
        decoders = Decoders(loop, pd.profile.decode, split.decode, complete, f"decode/{pd.name}")
        stations = [station, *(prfaas[link.prfaas] for link in links)]
        router = Router(pd, links, queue_of(pd, links), decoders, stations)
        places = [Place(station.servers, Private(pd.rdma_gbps))]
        for link in links:
            line, lane = lines[link.line_name], lanes[link.name]
            router.lanes.append((line, lane))
            router.enabled.append(link.name in setting.thresholds)
            places.append(Place(prfaas[link.prfaas].servers, line, lane.cap))
        router.set_places(places)
        routers.append(router)
    every = [*prfaas.values(), *(router.stations[LOCAL] for router in routers)]
    shares = [setting.shares.get(pd.name, 1.0 if len(topology.pd) == 1 else 0.0) for pd in topology.pd]
    if sum(shares) <= 0:
        raise PlanError("setting.shares", "give some PD pool a part of the traffic")
    return World(
        routers=routers,
        stations=every,
        lines=lines,
        line_rates={name: Meter(line.gbps) for name, line in lines.items()},
        users={each.resource: [r for r in routers if each in r.stations] for each in every},
        shares=[share / sum(shares) for share in shares],
        residency=any(link.allowance < 1 for link in topology.links),
    )


def _rate(link: Link) -> float:
    return link.capacity_gbps if link.measured_gbps is None else min(link.capacity_gbps, link.measured_gbps)
