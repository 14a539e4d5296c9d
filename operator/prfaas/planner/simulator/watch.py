"""Watching a run: what each resource did between two moments, samples over time, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prfaas.planner.simulator.loop import Loop
from prfaas.planner.simulator.results import Log, Quantiles, Result, Sample, Series
from prfaas.planner.simulator.world import World
from prfaas.routing.triage import Triage


@dataclass(frozen=True)
class Mark:
    """Integrals up to a moment."""

    at: float
    used: Mapping[str, float]
    there: Mapping[str, float]
    gbit: float
    completed: int


class Watch:
    """The observer of one run."""

    def __init__(self, loop: Loop, world: World, log: Log, sample_seconds: float, under_way: Callable[[], int]) -> None:
        """`log` is written by the run; `under_way()` says how many requests are not yet done."""
        self._under_way = under_way
        self._loop = loop
        self._world = world
        self._log = log
        self._series = Series(sample_seconds)
        self._last = (0.0, 0.0, 0)
        self.start: Mark | None = None
        self.end: Mark | None = None

    def mark(self) -> Mark:
        """How it stands."""
        now, world = self._loop.now, self._world
        used: dict[str, float] = {}
        there: dict[str, float] = {}
        for station in world.stations:
            used[station.resource] = station.busy.until(now)
            there[station.resource] = station.instances.until(now)
        for router in world.routers:
            name = router.decoders.resource
            used[name] = router.decoders.active.until(now)
            there[name] = router.decoders.capacity.until(now)
        for name, line in world.lines.items():
            line.advance()
            used[f"line/{name}"] = line.served
            there[f"line/{name}"] = world.line_rates[name].until(now)
        return Mark(now, used, there, self._gbit(), self._log.completed)

    def sample(self) -> None:
        """Write down how it stands, and again after a while, as long as there is more to come."""
        now, world = self._loop.now, self._world
        before, gbit, completed = self._last
        passed = now - before
        served = self._gbit()
        if passed > 0:
            queue = world.routers[0].queue
            self._series.add(
                Sample(
                    at=now,
                    waiting=sum(len(router.queue) for router in world.routers),
                    egress_gbps=(served - gbit) / passed,
                    throughput=(self._log.completed - completed) / passed,
                    decoding=round(sum(router.decoders.active.value for router in world.routers)),
                    threshold=queue.threshold_in_force,
                    promise=queue.first if isinstance(queue, Triage) else math.nan,
                )
            )
        self._last = (now, served, self._log.completed)
        if self._loop.pending and (self._under_way() or self.end is None):
            self._loop.at(now + self._series.every, self.sample)

    def result(self, keep_values: bool) -> Result:
        """Of what there is so far."""
        log, unfinished = self._log, self._under_way()
        last = self.end or self.mark()
        first = self.start if self.start is not None and self.start.at < last.at else None
        if first is None and last.at <= 0:
            last = self.mark()
        at = first.at if first else 0.0
        window = last.at - at

        def between(row: str, name: str) -> float:
            whole: float = getattr(last, row)[name]
            return whole - (getattr(first, row)[name] if first else 0.0)

        gbit = last.gbit - (first.gbit if first else 0.0)
        completed = last.completed - (first.completed if first else 0)
        ttft = {name: Quantiles.of(values) for name, values in log.ttft.items()}
        every = [value for values in log.ttft.values() for value in values]
        remote = ttft["remote"].count
        return Result(
            requests=len(every),
            failed=log.failed,
            unfinished=unfinished,
            seconds=self._loop.now if unfinished else log.ended,
            window=(at, last.at),
            throughput=completed / window if window > 0 else math.nan,
            ttft=Quantiles.of(every),
            tpot=Quantiles.of([value for values in log.tpot.values() for value in values]),
            ttft_by_class=ttft,
            tpot_by_class={name: Quantiles.of(values) for name, values in log.tpot.items()},
            waiting=Quantiles.of(log.waiting),
            offload_share=remote / len(every) if every else math.nan,
            egress_gbps=gbit / window if window > 0 else math.nan,
            utilisation={
                name: between("used", name) / between("there", name) for name in last.used if between("there", name) > 0
            },
            prefill_tokens=log.prefill_tokens,
            prompt_tokens=log.prompt_tokens,
            series=tuple(self._series.samples),
            ttft_values=dict(log.ttft) if keep_values else {},
        )

    def _gbit(self) -> float:
        for line in self._world.lines.values():
            line.advance()
        return sum(line.served for line in self._world.lines.values())
