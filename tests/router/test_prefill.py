"""The prefill leg on real sockets: each kind of failure is told from the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from aiohttp import web

from e2e.local_router import free_port
from prfaas.router.prefill import ClientFault, Failed, LegTimes, PrefillClient, Prefilled, Trouble, probing_socket
from prfaas.routing.world import Endpoint
from tests.router.rig import (
    Call,
    Engine,
    engine,
    good,
    reset,
    silent,
    status,
    until,
)

BODY = b'{"prompt": "x", "kv_transfer_params": {"do_remote_decode": true}}'


async def run(endpoint: Endpoint, **times: float) -> Any:
    async with PrefillClient(LegTimes(**times)) as client:
        return await client.run(endpoint, "/v1/completions", BODY, {"x-request-id": "r", "authorization": "Bearer k"})


async def test_a_descriptor() -> None:
    async with engine("p") as p:
        found = await run(p.endpoint)
        assert isinstance(found, Prefilled)
        assert found.kv["remote_engine_id"] == "p"
        [call] = p.calls
        assert call.raw == BODY
        assert call.headers["x-request-id"] == "r"
        assert call.headers["authorization"] == "Bearer k"
        assert call.headers["content-type"] == "application/json"
        assert call.headers["content-length"] == str(len(BODY))


async def cut(_: Engine, request: web.Request, __: Call) -> web.StreamResponse:
    """Half an answer."""
    response = web.StreamResponse(headers={"content-length": "100"})
    await response.prepare(request)
    await response.write(b'{"kv_transfer')
    assert request.transport is not None
    request.transport.close()
    return response


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        (status(500), Trouble.SERVER_ERROR),
        (status(302), Trouble.SERVER_ERROR),
        (status(503), Trouble.OVERLOADED),
        (status(200, {"choices": []}), Trouble.NO_KV),
        (reset, Trouble.BROKEN),
        (cut, Trouble.BROKEN),
        (silent, Trouble.TIMEOUT),
    ],
)
async def test_troubles(script: Any, trouble: Trouble) -> None:
    async with engine("p", script) as p:
        found = await run(p.endpoint, total=0.3 if script is silent else 10.0)
        assert isinstance(found, Failed)
        assert found.trouble is trouble


@pytest.mark.parametrize("code", [400, 401, 404, 429])
async def test_the_clients_fault_comes_whole(code: int) -> None:
    async with engine("p", status(code, {"error": "x"})) as p:
        assert await run(p.endpoint) == ClientFault(code, b'{"error": "x"}', "application/json; charset=utf-8")


async def test_nobody_listens() -> None:
    found = await run(Endpoint("127.0.0.1", free_port()))
    assert isinstance(found, Failed)
    assert found.trouble is Trouble.REFUSED


@contextmanager
def deaf() -> Iterator[Endpoint]:
    """An address that answers no connection attempt: a full backlog drops them, as a cut line does."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield Endpoint(*listener.getsockname())


async def test_nobody_answers() -> None:
    with deaf() as endpoint:
        found = await run(endpoint, connect=0.3)
    assert isinstance(found, Failed)
    assert found.trouble is Trouble.UNREACHABLE


async def test_unused_connections_are_closed_before_the_instance_closes_them() -> None:
    assert LegTimes().idle < 5, "vLLM closes them after 5 s; a leg sent at that moment would fail"
    seen: list[asyncio.Transport] = []

    async def look(engine: Engine, request: web.Request, call: Call) -> web.StreamResponse:
        assert request.transport is not None
        seen.append(request.transport)
        return await good(engine, request, call)

    async with engine("p", look) as p, PrefillClient(LegTimes(idle=0.05)) as client:
        assert isinstance(await client.run(p.endpoint, "/", BODY, {}), Prefilled)
        async with asyncio.timeout(5):
            await until("the unused connection is closed", lambda: seen[0].is_closing())


async def test_cancelling_a_leg_closes_its_connection() -> None:
    async with engine("p", silent) as p:
        leg = asyncio.create_task(run(p.endpoint))
        await until("the leg has begun", lambda: p.calls)
        leg.cancel()
        await until("the instance sees it", p.gone.is_set)


def test_a_dead_line_is_noticed_while_waiting_for_the_answer() -> None:
    """No data moves while a prompt is prefilled, so the kernel's probes have to find out."""
    with probing_socket((socket.AF_INET, socket.SOCK_STREAM, 0)) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count == 11
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 11_000
