"""Mooncake's bootstrap server: where the ranks of prefill engines can be reached, by HTTP on a port of its own.

    POST /register {engine_id, dp_rank, tp_rank, pp_rank, addr}    200 {"status": "ok"}; 400 if another is there
    GET  /query    {dp_rank: {engine_id, worker_addr: {tp_rank: {pp_rank: addr}}}}

The first rank of a prefill engine runs one; routers ask it for the engine's id, decode workers for its addresses.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

ATTEMPTS = 3
REGISTER_BACKOFF_SECONDS = 1.0
QUERY_RETRY_SECONDS = 0.1
_NUMBERS = ("dp_rank", "tp_rank", "pp_rank")


class BootstrapError(Exception):
    """The bootstrap server does not know, or cannot be asked."""


@dataclass
class Registry:
    """What a bootstrap server knows."""

    _engines: dict[int, str] = field(default_factory=dict)
    _addresses: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def register(self, engine_id: str, dp_rank: int, tp_rank: int, pp_rank: int, addr: str) -> None:
        """Add a rank; BootstrapError if another engine or another address is there."""
        known = self._engines.setdefault(dp_rank, engine_id)
        if known != engine_id:
            raise BootstrapError(f"Engine ID mismatch for dp_rank {dp_rank}: {known} is registered, not {engine_id}")
        there = self._addresses.setdefault((dp_rank, tp_rank, pp_rank), addr)
        if there != addr:
            raise BootstrapError(f"Address mismatch for dp_rank {dp_rank}, tp_rank {tp_rank}: {there} is registered")

    def document(self) -> dict[str, Any]:
        """The answer to /query."""
        known: dict[str, Any] = {
            str(rank): {"engine_id": engine_id, "worker_addr": {}} for rank, engine_id in self._engines.items()
        }
        for (dp_rank, tp_rank, pp_rank), addr in self._addresses.items():
            known[str(dp_rank)]["worker_addr"].setdefault(str(tp_rank), {})[str(pp_rank)] = addr
        return known


class BootstrapServer:
    """The server."""

    def __init__(self) -> None:
        self._registry = Registry()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which is another where 0 was asked for."""
        app = web.Application()
        app.router.add_post("/register", self._register)
        app.router.add_get("/query", self._query)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _register(self, request: web.Request) -> web.Response:
        try:
            fields = await request.json()
            given = [fields["engine_id"], *(fields[name] for name in _NUMBERS), fields["addr"]]
        except (ValueError, TypeError, KeyError) as error:
            missing = {"type": "missing", "loc": ["body", str(error).strip("'")], "msg": "Field required"}
            return web.json_response({"detail": [missing]}, status=422)
        try:
            self._registry.register(*given)
        except BootstrapError as error:
            return web.json_response({"detail": str(error)}, status=400)
        return web.json_response({"status": "ok"})

    async def _query(self, _: web.Request) -> web.Response:
        return web.json_response(self._registry.document())


@dataclass(frozen=True)
class Rank:
    """A data parallel rank of a prefill engine, which has an engine id of its own."""

    engine_id: str
    dp_rank: int
    tp_size: int
    addr: str
    """Of all its tensor parallel ranks: this worker has one listener for them."""


async def register(base: str, seconds: float, rank: Rank) -> None:
    """Register every tensor parallel rank; BootstrapError if that is refused or nobody answers."""
    body: dict[str, Any] = {"engine_id": rank.engine_id, "dp_rank": rank.dp_rank, "pp_rank": 0, "addr": rank.addr}
    async with _session(seconds) as session:
        for tp_rank in range(rank.tp_size):
            body["tp_rank"] = tp_rank
            for attempt in range(ATTEMPTS):
                try:
                    async with session.post(f"{base}/register", json=body) as response:
                        if response.status != 200:
                            raise BootstrapError(f"{base}/register answered {response.status}: {await response.text()}")
                    break
                except (aiohttp.ClientError, TimeoutError) as error:
                    if attempt == ATTEMPTS - 1:
                        raise BootstrapError(f"{base}/register: {error}") from error
                    await asyncio.sleep(REGISTER_BACKOFF_SECONDS * 2**attempt)


async def find(base: str, seconds: float, engine_id: str) -> tuple[str, int]:
    """Host and port of an engine's first rank; BootstrapError if it is not known there or nobody answers."""
    said = "no answer"
    async with _session(seconds) as session:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(QUERY_RETRY_SECONDS)
            try:
                async with session.get(f"{base}/query") as response:
                    known = await response.json(content_type=None)
                for entry in known.values():
                    if entry["engine_id"] == engine_id:
                        host, _, port = entry["worker_addr"]["0"]["0"].removeprefix("tcp://").rpartition(":")
                        return host, int(port)
                said = f"engine {engine_id} is not registered"
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
                said = f"{type(error).__name__} {error}"
    raise BootstrapError(f"{base}/query: {said}")


def _session(seconds: float) -> aiohttp.ClientSession:
    phase = aiohttp.ClientTimeout(total=None, connect=seconds, sock_read=seconds)
    return aiohttp.ClientSession(timeout=phase)
