"""Applies faults to requests and to the process; the KV side of them is in kv.connector.

A layer around the server's application: with faults disabled it is not there at all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from prfaas.worker.blocks import Blocks, no_blocks
from prfaas.worker.engine import Engine
from prfaas.worker.faults import FaultError, Faults, asked_for, parse

log = logging.getLogger(__name__)

PATH, HEADER = "/prfaas/faults", "x-prfaas-fault"
_PROBES = ("/health", "/ping")
_END = b"\n\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FaultyServer:
    """Makes an engine's server fail on request. `end` ends the process with a status, at once."""

    def __init__(self, engine: Engine, end: Callable[[int], None]) -> None:
        self._engine, self._box, self._end = engine, engine.faults, end
        self._held: Blocks = no_blocks()
        self._exit: asyncio.TimerHandle | None = None
        self._requests_left: int | None = None

    def install(self, app: web.Application) -> None:
        """Put the layer around an application that does not serve yet."""
        app.middlewares.insert(0, self._middleware)
        app.on_response_prepare.append(_on_prepare)
        app.router.add_get(PATH, self._show, allow_head=False)
        app.router.add_put(PATH, self._set)
        app.router.add_delete(PATH, self._clear)
        self.apply()

    async def loading(self) -> None:
        """Load longer than the model needs."""
        if self._box.current.slow_start is not None:
            self._box.note("slow-start")
            await asyncio.sleep(self._box.current.slow_start)

    def stop(self) -> None:
        """The server ends: no timer may be left."""
        if self._exit is not None:
            self._exit.cancel()

    def apply(self) -> None:
        """Bring the process into the state that the faults in force ask for."""
        faults, pool = self._box.current, self._engine.pool
        pool.give_back(self._held)
        self._held = no_blocks()
        if faults.blocks is not None:
            taken = pool.take(max(0, min(pool.free, pool.total - faults.blocks)))
            assert taken is not None
            self._held = taken
        self._engine.wake()
        self.stop()
        self._exit, self._requests_left = None, faults.requests
        if faults.exit is not None and faults.requests is None:
            self._exit = asyncio.get_running_loop().call_later(faults.after or 0, self._die, faults.exit)

    # The admin endpoint.

    async def _show(self, _: web.Request) -> web.Response:
        return web.json_response(self._box.document() | {"blocks_held": len(self._held)})

    async def _set(self, request: web.Request) -> web.Response:
        try:
            faults = parse(await request.text())
        except FaultError as error:
            return _refused(str(error))
        self._box.set(faults)
        self.apply()
        log.warning("faults in force: %s", faults)
        return await self._show(request)

    async def _clear(self, request: web.Request) -> web.Response:
        self._box.set(Faults())
        self.apply()
        log.warning("no faults in force")
        return await self._show(request)

    # Requests.

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == PATH:
            return await handler(request)
        if request.path in _PROBES:
            return await self._probe(request, handler)
        if request.method != "POST":
            return await handler(request)
        try:
            faults = self._box.of_request(request.headers.get(HEADER))
        except FaultError as error:
            return _refused(f"{HEADER}: {error}")
        if self._requests_left is not None:
            self._requests_left -= 1
            if self._requests_left == 0 and self._box.current.exit is not None:
                self._die(self._box.current.exit)
        refused = await self._before(request, faults)
        if refused is not None:
            return refused
        asked_for.set(faults)
        request[_TAMPER] = _Tamper(self, request, faults)
        return await self._after(request, await handler(request), faults)

    async def _probe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        health = self._box.current.health
        if health is None:
            return await handler(request)
        self._box.note("health")
        if health == "hang":
            await _for_ever()
        return web.Response(status=int(health))

    async def _before(self, request: web.Request, faults: Faults) -> web.Response | None:
        if faults.latency is not None:
            self._box.note("latency")
            await asyncio.sleep(faults.latency)
        if faults.hang:
            self._box.note("hang")
            await _for_ever()
        if faults.cut == "request":
            await self.cut(request)
        if faults.error is None:
            return None
        self._box.note("error")
        if faults.body is not None:
            return web.Response(status=faults.error, body=faults.body, content_type="text/plain")
        return _error(faults.error, "InternalServerError", "a fault that was asked for")

    async def _after(self, request: web.Request, response: web.StreamResponse, faults: Faults) -> web.StreamResponse:
        """An answer that is not out yet, so not a stream."""
        if response.prepared or not isinstance(response, web.Response):
            return response
        if faults.cut == "headers":
            await self.cut(request)
        body = response.body if isinstance(response.body, bytes | bytearray) else b""
        if _rewrites(faults):
            response.body = body = self.rewrite_json(bytes(body), faults)
        if isinstance(faults.cut, int) or faults.stall is not None:
            request.pop(_TAMPER)
            half = web.StreamResponse(status=response.status, headers=response.headers)
            half.content_length = len(body)
            await half.prepare(request)
            await half.write(bytes(body)[: len(body) // 2])
            if faults.stall is not None:
                self._box.note("stall")
                await _for_ever()
            await self.cut(request)
        return response

    async def cut(self, request: web.Request) -> None:
        """Drop the connection; does not return, the handler is cancelled."""
        self._box.note("cut")
        if request.transport is not None:
            # What was written goes out first: a client must see how far the answer came.
            request.transport.close()
        await _for_ever()

    def rewrite_json(self, raw: bytes, faults: Faults) -> bytes:
        """An answer, or one event of a stream, with what is to be wrong in it."""
        try:
            answer = json.loads(raw)
        except ValueError:
            return raw
        if not isinstance(answer, dict) or "error" in answer:
            return raw
        if faults.no_kv and answer.get("kv_transfer_params") is not None:
            self._box.note("no-kv")
            answer["kv_transfer_params"] = None
        if faults.wrong == "model" and "model" in answer:
            self._box.note("wrong")
            answer["model"] = "another-model"
        if faults.wrong == "token" and _spoil(answer):
            self._box.note("wrong")
        return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()

    def note(self, name: str) -> None:
        """A fault was applied."""
        self._box.note(name)

    def _die(self, status: int) -> None:
        log.critical("exit status %d was asked for", status)
        self._end(status)


class _Tamper:
    """What is done to the parts of one stream: its events."""

    def __init__(self, server: FaultyServer, request: web.Request, faults: Faults) -> None:
        self._server, self._request, self._faults = server, request, faults
        self._parts = 0
        self._spoilt = False

    async def prepared(self, response: web.StreamResponse) -> None:
        """The headers are about to go out."""
        if self._faults.cut == "headers":
            await self._server.cut(self._request)
        self._write = response.write
        response.write = self._written  # type: ignore[method-assign]  # the one place where all parts pass

    async def _written(self, data: Any) -> None:
        for event in bytes(data).split(_END):
            if event:
                await self._part(event)

    async def _part(self, event: bytes) -> None:
        if self._faults.stall is not None and self._parts >= self._faults.stall:
            self._server.note("stall")
            await _for_ever()
        if isinstance(self._faults.cut, int) and self._parts >= self._faults.cut:
            await self._server.cut(self._request)
        self._parts += 1
        await self._write((self._event(event) if _rewrites(self._faults) else event) + _END)

    def _event(self, event: bytes) -> bytes:
        if self._spoilt or not event.startswith(b"data: {"):
            return event
        changed = b"data: " + self._server.rewrite_json(event.removeprefix(b"data: "), self._faults)
        if self._faults.wrong == "token" and json.loads(changed[6:]) != json.loads(event[6:]):
            self._spoilt = True  # one token is enough
        return changed


_TAMPER = web.RequestKey("tamper", _Tamper)


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Signal of the application: a stream begins."""
    tamper = request.get(_TAMPER)
    if tamper is not None and not isinstance(response, web.Response):
        await tamper.prepared(response)


def _rewrites(faults: Faults) -> bool:
    return faults.no_kv or faults.wrong is not None


def _spoil(answer: dict[str, Any]) -> bool:
    """Change the first letter of the first text in an answer; False if it has none."""
    for choice in answer.get("choices") or ():
        for holder, name in ((choice, "text"), (choice.get("message"), "content"), (choice.get("delta"), "content")):
            text = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(text, str) and text.strip():
                at = len(text) - len(text.lstrip())
                holder[name] = text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]
                return True
    return False


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


def _refused(message: str) -> web.Response:
    return _error(400, "BadRequestError", message)


async def _for_ever() -> None:
    await asyncio.Event().wait()
