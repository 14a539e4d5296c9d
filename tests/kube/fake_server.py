"""An API server that misbehaves as a test says: for what a real one does only by accident."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from prfaas.kube.client import KubeClient, Timeouts

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeServer:
    """Answers lists with `items` and watches with the next of `watches`; the last one is repeated."""

    items: list[dict[str, Any]] = field(default_factory=list)
    version: str = "100"
    list_answer: Answer | None = None
    watches: list[Answer] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            self.requests.append(f"watch {request.query['resourceVersion']}")
            answer = self.watches[0] if len(self.watches) == 1 else self.watches.pop(0)
            return await answer(request)
        self.requests.append("list")
        if self.list_answer is not None:
            return await self.list_answer(request)
        return web.json_response({"metadata": {"resourceVersion": self.version}, "items": self.items})

    @property
    def lists(self) -> int:
        return self.requests.count("list")


def config_map(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": version}}


def stream(*events: tuple[str, dict[str, Any]], then: str = "end") -> Answer:
    """Sends events, then ends the stream or stays silent."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for kind, obj in events:
            await response.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")
        if then == "silence":
            await asyncio.Event().wait()
        return response

    return answer


def status(code: int, reason: str = "", **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        body = {"kind": "Status", "code": code, "reason": reason, "message": reason}
        return web.json_response(body, status=code, headers={name.replace("_", "-"): v for name, v in headers.items()})

    return answer


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def plain_client(url: str, *, connect: float = 1.0, call: float = 1.0) -> KubeClient:
    """A client over plain http, which no kubeconfig of ours would give."""
    configuration = Configuration()
    configuration.host = url
    configuration.client_session_kwargs = {"trust_env": False}
    return KubeClient(ApiClient(configuration), Timeouts(connect, call))
