"""A router to test against: the real Envoy, our picker, and engines that do as they are told.

Everything listens on loopback, on ports and in directories of its own.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from e2e.local_router import EnvoyProcess
from prfaas.api.policy import Fallback, LinkThreshold, RoutingPolicy
from prfaas.router.policies import PolicyStore
from prfaas.router.prefill import LegTimes
from prfaas.router.serve import RouterProcess, Settings
from prfaas.routing.world import Endpoint, Pools

DEADLINE = 20.0
"""Seconds that a condition may take to become true; only a failing test waits so long."""
MAX_BODY = 9 * 1024 * 1024
WRITER = "system:serviceaccount:prfaas-system:prfaas-operator"
LINK = "to-east"


async def until(what: str, condition: Callable[[], object | Awaitable[object]]) -> Any:
    """Wait for a condition to become true; its value."""
    end = time.monotonic() + DEADLINE
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, f"still not: {what}"
        await asyncio.sleep(0.01)


def own_address() -> str:
    """An address of this machine that is not loopback, which the API refuses in EndpointSlices."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


# Engines


@dataclass(frozen=True)
class Call:
    """One request as an engine saw it."""

    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw)
        return found

    @property
    def kv(self) -> Any:
        """The KV descriptor or request for one; None without."""
        return self.body.get("kv_transfer_params")


Script = Callable[["Engine", web.Request, Call], Awaitable[web.StreamResponse]]
_kv_numbers = itertools.count(1)


@dataclass
class Engine:
    """An engine whose answer is a function; by default it does both legs right."""

    name: str
    script: Script
    host: str = "127.0.0.1"
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """A client left before its answer was complete."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.port, self.name)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.path, {k.lower(): v for k, v in request.headers.items()}, await request.read())
        self.calls.append(call)
        try:
            return await self.script(self, request, call)
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone.set()
            raise


async def good(engine: Engine, request: web.Request, call: Call) -> web.StreamResponse:
    """Both legs as vLLM has them."""
    if request.method == "GET":
        return web.json_response({"object": "list", "data": [{"id": "m", "served_by": engine.name}]})
    if isinstance(call.kv, dict) and call.kv.get("do_remote_decode"):
        kv = {
            "do_remote_prefill": True,
            "remote_engine_id": engine.name,
            "remote_request_id": f"kv-{next(_kv_numbers)}",
        }
        return web.json_response({"choices": [{"text": "t"}], "kv_transfer_params": kv})
    if not call.body.get("stream"):
        return web.json_response({"choices": [{"text": f"answer of {engine.name}"}]})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number in range(4):
        await response.write(b'data: {"choices":[{"text":"%d"}]}\n\n' % number)
    await response.write(b"data: [DONE]\n\n")
    return response


def status(code: int, body: Mapping[str, Any] | None = None) -> Script:
    """Always this status."""

    async def answer(_: Engine, __: web.Request, ___: Call) -> web.StreamResponse:
        return web.json_response(body or {"error": {"message": "as told", "code": code}}, status=code)

    return answer


async def reset(_: Engine, request: web.Request, __: Call) -> web.StreamResponse:
    """Break the connection before the first byte."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


async def silent(_: Engine, __: web.Request, ___: Call) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


@dataclass
class Gate:
    """Streams one event per `step`, so that a test decides how far an answer has come."""

    steps: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps.release()

    async def __call__(self, engine: Engine, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await self.steps.acquire()
            await response.write(b"data: %d\n\n" % number)
        return response


@asynccontextmanager
async def engine(name: str, script: Script = good, host: str = "127.0.0.1") -> AsyncIterator[Engine]:
    """An engine on a free port."""
    made = Engine(name, script, host)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        made.port = runner.addresses[0][1]
        yield made
    finally:
        await runner.cleanup()


# The router


@dataclass
class MemorySource:
    """Endpoints as the test says."""

    pools: Pools = field(default_factory=Pools)
    synced: bool = True
    callback: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def set(self, pools: Pools) -> None:
        self.pools = pools
        self.callback()


def policy(threshold: int = 100, fallback: Fallback = Fallback.LOCAL_PREFILL, **changes: Any) -> RoutingPolicy:
    """A policy with one link."""
    fields: dict[str, Any] = {"pd_cluster_uid": "uid-1", "epoch": 1, "version": 1, "model": "m"}
    cuts = (LinkThreshold(link=LINK, tokens=threshold),)
    return RoutingPolicy.build(**(fields | {"thresholds": cuts, "fallback": fallback} | changes))


@dataclass
class Rig:
    """Everything together. `short` and `long` are bodies below and above the threshold."""

    envoy: EnvoyProcess
    source: MemorySource
    policies: PolicyStore
    process: RouterProcess
    session: aiohttp.ClientSession
    short: dict[str, Any] = field(default_factory=lambda: {"model": "m", "prompt": "x" * 40})
    long: dict[str, Any] = field(default_factory=lambda: {"model": "m", "prompt": "y" * 4000})

    async def use(
        self,
        prefill: tuple[Endpoint, ...] = (),
        decode: tuple[Endpoint, ...] = (),
        remote: tuple[Endpoint, ...] = (),
    ) -> None:
        """Let these be the endpoints, and wait until Envoy knows."""
        self.source.set(Pools(prefill, decode, {LINK: remote}))
        await self.envoy.knows({endpoint.address for endpoint in decode})

    async def post(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.session.post(self.envoy.url + path, data=io.BytesIO(raw), headers=sent) as response:
            return await _answer(response)

    async def get(self, path: str) -> Answer:
        async with self.session.get(self.envoy.url + path) as response:
            return await _answer(response)

    def samples(self, metric: str) -> dict[tuple[str, ...], float]:
        """Values of a metric by its label values, in order of label names."""
        found = {}
        for family in self.process.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == metric:
                    found[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
        return found

    async def idle(self) -> None:
        """Wait until nothing is in flight in the router's book."""
        await until("nothing in flight", lambda: not self.process.ledger.entries and not self.process.ledger.in_flight)


async def _answer(response: aiohttp.ClientResponse) -> Answer:
    return Answer(response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()})


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    status: int
    raw: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def decision(self) -> str | None:
        return self.headers.get("x-prfaas-decision")

    def error(self) -> dict[str, Any]:
        """The error object; fails unless the answer is one in OpenAI's form."""
        assert self.headers["content-type"].startswith("application/json"), self
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, self
        assert error["code"] == self.status
        assert error["message"]
        return error


async def no_review(_: str) -> str | None:
    return None


@asynccontextmanager
async def rig(
    running: EnvoyProcess, rules: RoutingPolicy | None = None, leg: LegTimes | None = None
) -> AsyncIterator[Rig]:
    """A picker in this process on the socket of a running Envoy, and a client."""
    source, policies = MemorySource(), PolicyStore(current=rules or policy())
    settings = Settings(
        run_dir=running.run_dir,
        admin_host="127.0.0.1",
        admin_port=0,
        policy_writers=frozenset({WRITER}),
        max_body_bytes=MAX_BODY,
        leg=leg or LegTimes(connect=1.0, total=15.0),
        grace_s=0.1,
    )
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    async with (
        RouterProcess(settings, source, policies, no_review) as process,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        made = Rig(running, source, policies, process, session)
        await made.use()
        yield made
