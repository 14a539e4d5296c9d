"""A new cache type goes through both ends while requests flow: the plan, the router, Envoy and workers together.

The plan of each end restarts workers of its own; engines of two cache types refuse each other, so that no failed
request means that no pair was mixed. An instance that goes leaves the rotation first and ends once the requests that
were under way have: what a preStop hook gives a pod time for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import pytest

from e2e.client import Outcome, Target, send
from e2e.workload import Ask, text
from prfaas.routing.world import Endpoint, Pools
from prfaas.worker.serve import Worker
from prfaas.workloads.assignment import Cause, Observed, Step, Wanted, instance_index, plan
from prfaas.workloads.pairing import Consumer, Pairing, Supplier
from tests.router.rig import LINK, Rig
from tests.worker.rig import MODEL, config

pytestmark = pytest.mark.envoy

OLD, NEW = "auto", "fp8"
"""Compatibility keys; here they are the cache types themselves."""


@dataclass
class Pool:
    """One end: its children, and the worker of each that runs."""

    name: str
    counts: dict[str, int]
    key: str = OLD
    children: dict[str, Observed] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)

    def step(self, pairing: Pairing) -> Step:
        target = Wanted(self.counts, dict.fromkeys(self.counts, self.key))
        return plan(self.name, list(self.children.values()), target, 1, pairing=pairing)

    def endpoints(self, role: str) -> tuple[Endpoint, ...]:
        ready = [child for child in self.children.values() if child.ready and child.role == role]
        return tuple(Endpoint("127.0.0.1", self.workers[each.name].port, each.name, each.key) for each in ready)

    def keys(self, role: str) -> frozenset[str]:
        return frozenset(child.key for child in self.children.values() if child.role == role)


@dataclass
class Traffic:
    """Requests one after the other on a few streams."""

    router: Rig
    outcomes: list[Outcome] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    under_way: set[int] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def stream(self) -> None:
        target = Target(self.router.envoy.url, MODEL, MODEL)
        while True:
            number = next(self.numbers)
            tokens = (10, 300)[number % 2]
            self.under_way.add(number)
            ask = Ask(at=0.0, prompt_tokens=tokens, output_tokens=6, prompt=text(f"ask {number}", tokens))
            outcome = await send(self.router.session, target, ask, timeout=20)
            async with self.changed:
                self.outcomes.append(outcome)
                self.under_way.discard(number)
                self.changed.notify_all()

    async def passes(self) -> None:
        """Until all requests that are under way now have ended."""
        before = set(self.under_way)
        async with self.changed:
            await self.changed.wait_for(lambda: not before & self.under_way)

    async def more(self, count: int) -> list[Outcome]:
        """The next so many outcomes."""
        mark = len(self.outcomes)
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.outcomes) >= mark + count)
        return self.outcomes[mark:]


@asynccontextmanager
async def flowing(router: Rig) -> AsyncIterator[Traffic]:
    made = Traffic(router)
    streams = [asyncio.create_task(made.stream()) for _ in range(6)]
    try:
        yield made
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


@dataclass
class Datacenters:
    """Both ends and the router of one."""

    router: Rig
    west: Pool
    east: Pool

    async def show(self) -> None:
        """The router learns what is ready."""
        decode = self.west.endpoints("decode")
        self.router.source.set(Pools(self.west.endpoints("prefill"), decode, {LINK: self.east.endpoints("prefill")}))
        await self.router.envoy.knows({endpoint.address for endpoint in decode})

    async def start(self, pool: Pool, name: str, role: str) -> None:
        plain = config("kv_producer") if role == "prefill" else config("kv_consumer")
        worker = Worker(replace(plain, kv_cache_dtype=pool.key))
        await worker.start()
        index = instance_index(pool.name, name)
        assert index is not None
        pool.workers[name] = worker
        pool.children[name] = Observed(name, index, role, pool.key, True, key=pool.key)

    async def act(self, flow: Traffic | None) -> bool:
        """One step of each end; whether either did anything."""
        supplier = Supplier("to-east", self.east.keys("prefill"), self.east.key)
        consumer = Consumer("to-west", self.west.keys("decode"), self.west.keys("decode"))
        acted = False
        for pool, pairing in (
            (self.west, Pairing(self.west.key, suppliers=(supplier,))),
            (self.east, Pairing(self.east.key, consumers=(consumer,))),
        ):
            result = pool.step(pairing)
            for name, role in {**result.create, **result.convert, **result.roll}.items():
                acted = True
                if name in pool.children:
                    assert flow is not None
                    gone = pool.workers[name]
                    pool.children[name] = replace(pool.children[name], ready=False)
                    await self.show()
                    await flow.passes()
                    await gone.shutdown()
                await self.start(pool, name, role)
                await self.show()
        return acted

    def halted(self, pool: Pool, peer: str) -> bool:
        """Whether a pool waits for its peer and nothing else."""
        supplier = Supplier("to-east", self.east.keys("prefill"), self.east.key)
        consumer = Consumer("to-west", self.west.keys("decode"), self.west.keys("decode"))
        held = pool.step(Pairing(pool.key, (supplier,), (consumer,))).held
        return bool(held) and all((why.cause, why.peers) == (Cause.PEER, (peer,)) for why in held.values())


@pytest.fixture
async def datacenters(router: Rig) -> AsyncIterator[Datacenters]:
    """One prefill and two decode workers here, two prefill workers behind the link."""
    made = Datacenters(router, Pool("west", {"prefill": 1, "decode": 2}), Pool("east", {"prefill": 2}))
    try:
        await made.act(None)
        yield made
    finally:
        for pool in (made.west, made.east):
            await asyncio.gather(*(worker.shutdown() for worker in pool.workers.values()))


@pytest.mark.parametrize("first", ["west", "east"])
async def test_no_request_fails_and_none_is_mixed(datacenters: Datacenters, first: str) -> None:
    west, east, router = datacenters.west, datacenters.east, datacenters.router
    pools, peers = {"west": west, "east": east}, {"west": "to-east", "east": "to-west"}
    second = "east" if first == "west" else "west"
    async with flowing(router) as flow:
        await flow.more(12)
        pools[first].key = NEW
        while await datacenters.act(flow):
            await flow.more(12)
        assert datacenters.halted(pools[first], peers[first])
        await flow.more(12)
        pools[second].key = NEW
        while await datacenters.act(flow):
            await flow.more(12)
        await flow.passes()
        last = await flow.more(12)
    assert {child.key for pool in pools.values() for child in pool.children.values()} == {NEW}
    assert [outcome.error for outcome in flow.outcomes if outcome.error] == []
    assert all(f"key={NEW};" in outcome.decision for outcome in last)
    # Labels in order: decode_key, link, prefill_key.
    pairs = {(decode, prefill) for decode, _, prefill in router.samples("prfaas_router_pairs_total")}
    assert {(OLD, OLD), (NEW, NEW)} <= pairs <= {(OLD, OLD), (NEW, NEW), (OLD, ""), (NEW, "")}


async def test_requests_would_fail_if_the_router_did_not_know_the_keys(datacenters: Datacenters) -> None:
    """The proof that the test above can fail: the same instances, half way, without what tells them apart."""
    datacenters.west.key = NEW
    async with flowing(datacenters.router) as flow:
        while await datacenters.act(flow):
            await flow.more(6)
    source = datacenters.router.source
    blind = [
        tuple(replace(endpoint, compatibility_key=None) for endpoint in endpoints)
        for endpoints in (source.pools.prefill, source.pools.decode, source.pools.remote[LINK])
    ]
    await datacenters.router.use(*blind)
    target = Target(datacenters.router.envoy.url, MODEL, MODEL)
    asks = [Ask(0.0, 300, 6, text(f"blind {number}", 300)) for number in range(8)]
    async with aiohttp.ClientSession() as session:
        outcomes = await asyncio.gather(*(send(session, target, ask, timeout=20) for ask in asks))
    assert [outcome for outcome in outcomes if outcome.error]
