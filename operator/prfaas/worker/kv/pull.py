"""The decode side of the KV port: one connection per request, from its arrival until its cache is here.

The connection opens when the request arrives and beats while the request queues, so that a long queue here does not
cost the lease there. Whatever ends the request before its transfer is told to the prefill worker, which frees.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from prfaas.worker.clock import Clock
from prfaas.worker.kv.params import RemoteBlocks, blocks_digest
from prfaas.worker.kv.payload import Checksum, PayloadError, PayloadReader
from prfaas.worker.kv.wire import Connection, Kind, WireError, parse

log = logging.getLogger(__name__)
T = TypeVar("T")

HANDSHAKE_SECONDS = 5.0
"""vLLM's limit on a handshake; real seconds, since the network is real."""


class TransferError(Exception):
    """The cache did not come, or what came is not it."""


@dataclass(frozen=True)
class Pulled:
    """A cache that came whole."""

    state: bytes
    wire_bytes: int
    """Bytes received on the connection, framing and handshake included."""
    seconds: float
    """From PULL to the last byte, real seconds."""
    chunks: int


@dataclass(frozen=True)
class Puller:
    """Pulls caches for one engine."""

    compatibility: str
    clock: Clock
    heartbeat_seconds: float
    stall_seconds: float
    """Real seconds without a byte after which a transfer has failed."""
    payload_size: Callable[[int], int]
    """Bytes that a prompt of so many tokens must have here; another announced size is refused."""
    count_received: Callable[[int], None]

    async def pull(self, remote: RemoteBlocks, start: asyncio.Event) -> Pulled:
        """Hold the lease until `start` is set, then transfer; TransferError says why not.

        Cancelled or failed, the lease is as it was: the caller releases it.
        """
        connection = await self._open(remote)
        try:
            await self._beat(connection, remote, start)
            pulled = await self._transfer(connection, remote)
            await _within(HANDSHAKE_SECONDS, connection.close())
            return pulled
        except (WireError, PayloadError) as error:
            where = f"{remote.host}:{remote.port}"
            raise TransferError(f"KV of request {remote.request_id} from {where}: {error}") from error
        finally:
            connection.abort()
            self.count_received(connection.received)

    async def release(self, remote: RemoteBlocks) -> None:
        """Tell the prefill worker that nobody will pull; TransferError if it cannot be told."""
        connection = await self._open(remote)
        try:
            connection.send_json(Kind.RELEASE, request=remote.request_id)
            await _within(HANDSHAKE_SECONDS, connection.close())
        except WireError as error:
            raise TransferError(f"request {remote.request_id} was not released: {error}") from error
        finally:
            connection.abort()
            self.count_received(connection.received)

    async def _open(self, remote: RemoteBlocks) -> Connection:
        try:
            reader, writer = await _within(HANDSHAKE_SECONDS, asyncio.open_connection(remote.host, remote.port))
        except (OSError, UnicodeError, WireError) as error:  # UnicodeError: no host has such a name
            raise TransferError(f"no connection to {remote.host}:{remote.port}: {error}") from error
        connection = Connection(reader, writer)
        try:
            connection.send_json(Kind.HELLO, engine=remote.engine_id, compatibility=self.compatibility)
            await _within(HANDSHAKE_SECONDS, connection.expect(Kind.WELCOME))
        except WireError as error:
            connection.abort()
            raise TransferError(f"handshake with {remote.host}:{remote.port} failed: {error}") from error
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _beat(self, connection: Connection, remote: RemoteBlocks, until: asyncio.Event) -> None:
        while True:
            connection.send_json(Kind.HEARTBEAT, request=remote.request_id)
            await connection.drain()
            if await self.clock.wait(until, self.clock.now() + self.heartbeat_seconds):
                return

    async def _transfer(self, connection: Connection, remote: RemoteBlocks) -> Pulled:
        began = self.clock.now()
        connection.send_json(
            Kind.PULL, request=remote.request_id, blocks=blocks_digest(remote.block_ids), tokens=remote.tokens
        )
        beating = asyncio.create_task(self._beat(connection, remote, asyncio.Event()))
        try:
            announced = parse(await self._next(connection, Kind.START)).get("bytes")
            size = self.payload_size(remote.tokens)
            if announced != size:
                raise PayloadError(f"{announced} bytes announced, {size} expected for {remote.tokens} tokens")
            reader = PayloadReader(size, Checksum(remote.engine_id, remote.request_id, remote.tokens))
            left, chunks = size, 0
            while left:
                chunk = await self._next(connection, Kind.DATA)
                reader.feed(chunk)
                left -= len(chunk)
                chunks += 1
            state = reader.state(await self._next(connection, Kind.CHECKSUM))
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        connection.send_json(Kind.DONE, request=remote.request_id)
        return Pulled(state, connection.received, self.clock.now() - began, chunks)

    async def _next(self, connection: Connection, kind: Kind) -> bytes:
        return await _within(self.stall_seconds, connection.expect(kind))


async def _within(seconds: float, doing: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await doing
    except TimeoutError as error:
        raise WireError(f"nothing came for {seconds:g} s") from error
