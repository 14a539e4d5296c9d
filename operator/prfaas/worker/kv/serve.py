"""The prefill side of the KV port: shakes hands, renews leases, sends payloads."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from prfaas.worker.kv.leases import Lease, LeaseError, LeaseTable
from prfaas.worker.kv.payload import Checksum, payload_chunks
from prfaas.worker.kv.wire import Connection, Kind, WireError, parse

log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0
"""Least time without a frame after which a reader counts as gone; real seconds, since the network is real."""


@dataclass(frozen=True)
class Identity:
    """Who an engine is to its peers."""

    engine_id: str
    compatibility: str
    """Hash over what must be equal on both sides of a transfer."""


class LeaseHolder(Protocol):
    """What the port needs from the engine: its leases at the current time, and its counters."""

    leases: LeaseTable

    def now(self) -> float:
        """The engine's clock."""

    def lease_changed(self) -> None:
        """A lease was renewed or ended: blocks may be free, the next deadline may be another."""

    def notified_after_expiry(self) -> None:
        """A reader finished after its lease had ended."""

    def payload_size(self, tokens: int) -> int:
        """Bytes of the payload for a prompt of that length."""

    def kv_sent(self, count: int) -> None:
        """Bytes were handed to a KV socket."""


@dataclass
class KVServer:
    """Serves the leases of one engine."""

    identity: Identity
    holder: LeaseHolder
    _server: asyncio.Server | None = None
    _connections: dict[asyncio.Task[None], Connection] = field(default_factory=dict)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which is another where 0 was asked for."""
        self._server = await asyncio.start_server(self._accept, host, port, backlog=128)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.abort()
        await asyncio.gather(*self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = connection = Connection(reader, writer)
        try:
            await self._talk(connection)
        except LeaseError as refusal:
            log.warning("KV pull refused: %s", refusal)
            await _refuse(connection, refusal.reason, str(refusal))
        except WireError as error:
            log.warning("KV connection failed: %s", error)
            connection.abort()
        finally:
            del self._connections[task]
            connection.abort()

    async def _talk(self, connection: Connection) -> None:
        hello = parse(await connection.expect(Kind.HELLO))
        if hello.get("engine") != self.identity.engine_id:
            raise LeaseError("engine", f"this is engine {self.identity.engine_id}, not {hello.get('engine')}")
        if hello.get("compatibility") != self.identity.compatibility:
            raise LeaseError("incompatible", "compatibility hash differs: model, version, dtype, backend or KV scale")
        connection.send_json(Kind.WELCOME, engine=self.identity.engine_id, compatibility=self.identity.compatibility)
        sending: asyncio.Task[None] | None = None
        try:
            while (frame := await self._receive(connection)) is not None:
                kind, body = frame
                fields = parse(body)
                request_id = str(fields.get("request"))
                if kind is Kind.HEARTBEAT:
                    if self.holder.leases.renew(request_id, self.holder.now()):
                        self.holder.lease_changed()
                elif kind is Kind.PULL:
                    if sending is not None:
                        raise WireError("second PULL on one connection")
                    lease = self.holder.leases.take(
                        request_id, fields.get("blocks"), fields.get("tokens"), self.holder.now()
                    )
                    sending = asyncio.create_task(self._send(connection, lease))
                elif kind in (Kind.DONE, Kind.RELEASE):
                    self._end(request_id, "used" if kind is Kind.DONE else "released")
                else:
                    raise WireError(f"unexpected {kind.name}")
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _receive(self, connection: Connection) -> tuple[Kind, bytes] | None:
        """The next frame; a reader that is gone without a word (a cut line) is dropped when its beats stay out."""
        limit = max(self.holder.leases.duration, SILENCE_SECONDS)
        try:
            async with asyncio.timeout(limit):
                return await connection.receive()
        except TimeoutError as error:
            raise WireError(f"no heartbeat for {limit:g} s") from error

    def _end(self, request_id: str, how: str) -> None:
        if self.holder.leases.end(request_id, how):
            self.holder.lease_changed()
        elif how == "used" and self.holder.leases.ending(request_id) == "expired":
            log.error("request %s was read after its lease had ended", request_id)
            self.holder.notified_after_expiry()

    async def _send(self, connection: Connection, lease: Lease) -> None:
        size = self.holder.payload_size(lease.tokens)
        checksum = Checksum(self.identity.engine_id, lease.request_id, lease.tokens)
        before = connection.sent
        try:
            connection.send_json(Kind.START, bytes=size)
            for chunk in payload_chunks(lease.state, lease.request_id, size):
                if lease.ended:
                    # Freed under the reader: it must not get a whole cache out of blocks that are another's now.
                    raise WireError("its lease ended during the transfer")
                checksum.update(chunk)
                connection.send(Kind.DATA, chunk)
                await connection.drain()
            connection.send(Kind.CHECKSUM, checksum.digest())
            await connection.drain()
        except WireError as error:
            log.warning("transfer of request %s failed: %s", lease.request_id, error)
            connection.abort()
        finally:
            self.holder.kv_sent(connection.sent - before)


async def _refuse(connection: Connection, reason: str, message: str) -> None:
    connection.send_json(Kind.REFUSED, reason=reason, message=message)
    try:
        await connection.drain()
    except WireError:
        return
    await connection.close()
