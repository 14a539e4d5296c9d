"""Where requests spend their time: prefill instances and decode instances, and how much of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.api.profile import DecodeProfile, Profile
from prfaas.planner.curve import Curve
from prfaas.planner.simulator.loop import Loop
from prfaas.planner.simulator.sharing import Batch
from prfaas.planner.topology import kv_curve, seconds_curve
from prfaas.routing.prefixes import PrefixCache
from prfaas.routing.waiting import Servers


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way."""

    number: int
    at: float
    """When it came, seconds."""
    tokens: float
    output: float
    cached: float
    blocks: tuple[int, ...]
    leave: float
    """Even in [0, 1): it may take links whose allowance is above it."""
    pd: int
    """Index of its PD pool."""
    attempt: int = 0
    """Goes up when an instance under it fails; events of an earlier attempt do nothing."""
    place: int = 0
    decoder: Decoder | None = None
    started: float = 0.0
    first_token: float = -1.0
    moving: dict[int, int] = field(default_factory=dict)
    """Its transfers on a line: which part, and the number to leave with."""
    parts: int = 0
    """Transfers that are still to end."""


class Meter:
    """A count and its integral over time."""

    __slots__ = ("_last", "total", "value")

    def __init__(self, value: float = 0.0) -> None:
        """Since time 0."""
        self.value = value
        self.total = 0.0
        self._last = 0.0

    def add(self, change: float, now: float) -> None:
        """`value` changes by `change`."""
        self.total += self.value * (now - self._last)
        self._last = now
        self.value += change

    def until(self, now: float) -> float:
        """The integral up to now."""
        self.add(0.0, now)
        return self.total


class Station:
    """Prefill instances of one pool, all alike, each with one request at a time, and the pool's prefix cache."""

    def __init__(self, resource: str, profile: Profile, instances: int, cache: PrefixCache | None) -> None:
        """`resource`: as the planner names it, `prfaas/NAME` or `prefill/NAME`."""
        self.resource = resource
        self.startup_seconds = profile.startup_seconds
        self.seconds: Curve = seconds_curve(profile)
        self.gbit: Curve = kv_curve(profile)
        self.cache = cache
        self.servers = Servers(instances)
        self.flights: dict[int, tuple[Flight, int]] = {}
        """By busy instance: the request, and which attempt of it."""
        self._leaving = 0
        self.busy = Meter()
        self.instances = Meter(instances)
        self._idle = list(range(instances - 1, -1, -1))
        self._made = instances

    def prefill_seconds(self, tokens: float, cached: float) -> float:
        """T(l | x), seconds."""
        curve = self.seconds
        return curve(tokens) - curve(cached) + curve(0.0) if cached else curve(tokens)

    def take(self, flight: Flight, attempt: int, end: float, now: float) -> int:
        """An idle instance begins a prefill; returns its number."""
        number = self._idle.pop()
        self.servers.idle -= 1
        self.servers.ends[number] = end
        self.flights[number] = (flight, attempt)
        self.busy.add(1, now)
        return number

    def free(self, number: int, now: float) -> bool:
        """Its prefill has ended; True if it goes now, as `leave` wanted."""
        del self.servers.ends[number], self.flights[number]
        self.busy.add(-1, now)
        if self._leaving:
            self._leaving -= 1
            self.instances.add(-1, now)
            return True
        self._idle.append(number)
        self.servers.idle += 1
        return False

    def leave(self, now: float) -> bool:
        """One instance is to go: True if it was idle and is gone, else the next that is free goes."""
        if self._drop_idle(now):
            return True
        self._leaving = min(self._leaving + 1, len(self.flights))
        return False

    def add(self, now: float) -> None:
        """One instance more, ready."""
        self._idle.append(self._made)
        self._made += 1
        self.servers.idle += 1
        self.instances.add(1, now)

    def lose(self, now: float) -> Flight | None:
        """One instance fails: a busy one, if there is one; returns what it was doing that is still wanted."""
        if self.flights:
            number = min(self.flights)
            flight, attempt = self.flights.pop(number)
            del self.servers.ends[number]
            self.busy.add(-1, now)
            self.instances.add(-1, now)
            self._leaving = min(self._leaving, len(self.flights))
            return flight if flight.attempt == attempt else None
        self._drop_idle(now)
        return None

    def _drop_idle(self, now: float) -> bool:
        if not self._idle:
            return False
        self._idle.pop()
        self.servers.idle -= 1
        self.instances.add(-1, now)
        return True


@dataclass(eq=False)
class Decoder:
    """One decode instance: slots are reserved before the prefill starts, sequences decode together."""

    number: int
    slots: int
    batch: Batch[Flight] | None
    """None: every sequence takes the same time, whatever the others do."""
    used: int = 0
    draining: bool = False
    flights: dict[int, Flight] = field(default_factory=dict)
    """Who holds a slot, by request number."""
    tickets: dict[int, int] = field(default_factory=dict)
    """Numbers in `batch`, by request number, of those that decode."""


class Decoders:
    """The decode instances of a PD pool."""

    def __init__(
        self, loop: Loop, profile: DecodeProfile, count: int, done: Callable[[Flight], None], resource: str
    ) -> None:
        """`done` is called with every request that has all its tokens."""
        self.resource = resource
        self.profile = profile
        self.instances: list[Decoder] = []
        self.active = Meter()
        """Slots that are held."""
        self.capacity = Meter()
        self.slots = 0
        """Slots that are free."""
        self._loop = loop
        self._done = done
        self._made = 0
        steps = profile.steps
        flat = len({step.seconds for step in steps}) == 1 and profile.seconds_per_context_token == 0
        self.token_seconds = steps[0].seconds / profile.tokens_per_step if flat else None
        """Seconds a token takes, where that is always the same."""
        for _ in range(count):
            self.add(0.0)

    def add(self, now: float) -> None:
        """One instance more, ready."""
        batch = None if self.token_seconds is not None else Batch(self._loop, self._speed, _context, self._done)
        self.instances.append(Decoder(self._made, self.profile.max_batch, batch))
        self._made += 1
        self.slots += self.profile.max_batch
        self.capacity.add(self.profile.max_batch, now)

    def reserve(self, flight: Flight, now: float) -> Decoder:
        """A slot of the instance with the most free ones."""
        best = None
        for each in self.instances:
            if not each.draining and each.used < each.slots and (best is None or each.used < best.used):
                best = each
        assert best is not None, "asked for a slot where none is free"
        best.used += 1
        best.flights[flight.number] = flight
        self.slots -= 1
        self.active.add(1, now)
        return best

    def decode(self, flight: Flight) -> float | None:
        """Begin; returns how long it takes, or None where `done` will be called."""
        decoder = flight.decoder
        assert decoder is not None
        if self.token_seconds is not None:
            return flight.output * self.token_seconds
        assert decoder.batch is not None
        lane = decoder.batch.lanes[0]
        decoder.tickets[flight.number] = decoder.batch.join(lane, flight.output, flight)
        return None

    def release(self, flight: Flight, now: float) -> bool:
        """Its slot is free; True if that was the last one of an instance that drains, which is gone now."""
        decoder = flight.decoder
        assert decoder is not None
        flight.decoder = None
        decoder.used -= 1
        del decoder.flights[flight.number]
        decoder.tickets.pop(flight.number, None)
        self.active.add(-1, now)
        if not decoder.draining:
            self.slots += 1
            return False
        if decoder.used == 0:
            self.instances.remove(decoder)
            return True
        return False

    def drain(self, now: float) -> bool | None:
        """The instance with the least to do takes no more; True if it is gone at once, None if there is none."""
        ready = [each for each in self.instances if not each.draining]
        if not ready:
            return None
        decoder = min(ready, key=lambda each: (each.used, each.number))
        decoder.draining = True
        self.slots -= decoder.slots - decoder.used
        self.capacity.add(-decoder.slots, now)
        if decoder.used == 0:
            self.instances.remove(decoder)
            return True
        return False

    def lose(self, now: float) -> list[Flight] | None:
        """One instance fails; returns who was on it and holds no slot any more; None if there is no instance."""
        if not self.instances:
            return None
        decoder = self.instances.pop(0)
        lost = list(decoder.flights.values())
        if decoder.batch is not None:
            for ticket in decoder.tickets.values():
                decoder.batch.leave(decoder.batch.lanes[0], ticket)
        if not decoder.draining:
            self.slots -= decoder.slots - decoder.used
            self.capacity.add(-decoder.slots, now)
        self.active.add(-decoder.used, now)
        for flight in lost:
            flight.decoder = None
        return lost

    def _speed(self, batch: int, context: float) -> float:
        return self.profile.tokens_per_step / self.profile.step_seconds(batch, context)


def _context(flight: Flight) -> float:
    return flight.tokens + flight.output / 2
