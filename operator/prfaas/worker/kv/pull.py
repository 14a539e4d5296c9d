"""The reading side of a transfer: one connection per request, from its arrival until its cache is here, and its lanes.

With NIXL pull the connection opens when the request arrives and beats while the request queues, so that a long queue
here does not cost the lease there. Whatever ends the request before its transfer is told to the prefill worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from prfaas.worker.clock import Clock
from prfaas.worker.kv.lanes import Cache, Incoming, lanes_for, started
from prfaas.worker.kv.params import RemoteBlocks, blocks_digest
from prfaas.worker.kv.payload import PayloadError
from prfaas.worker.kv.peers import HANDSHAKE_SECONDS, Peer, Peers, TransferError
from prfaas.worker.kv.wire import Connection, Kind, RefusedError, WireError, connect, within

log = logging.getLogger(__name__)
Address = tuple[str, int]


@dataclass(frozen=True)
class Pulled:
    """A cache that came whole."""

    state: bytes
    wire_bytes: int
    """Bytes received on all lanes, framing included."""
    posted: float
    """From the request until the transfer began, real seconds."""
    seconds: float
    """From the request to the last byte, real seconds."""
    chunks: int


@dataclass(frozen=True)
class Reader:
    """Reads transfers for one engine."""

    clock: Clock
    stall_seconds: float
    """Real seconds without a byte after which a transfer has failed."""
    lanes: int
    count: Callable[[Connection], None]
    """Count what came on a connection."""
    connect_seconds: float = HANDSHAKE_SECONDS

    async def open(self, address: Address, engine_id: str) -> Connection:
        """A connection for one request; TransferError if there is none."""
        try:
            connection = await connect(*address, self.connect_seconds)
        except WireError as error:
            raise TransferError(str(error)) from error
        connection.send_json(Kind.OPEN, engine=engine_id)
        return connection

    async def tell(self, address: Address, engine_id: str, kind: Kind, **fields: object) -> None:
        """One notification on a connection of its own; TransferError if it cannot be sent."""
        connection = await self.open(address, engine_id)
        try:
            connection.send_json(kind, **fields)
            await within(self.connect_seconds, connection.close())
        except WireError as error:
            raise TransferError(str(error)) from error
        finally:
            connection.abort()
            self.count(connection)

    async def read(self, connection: Connection, cache: Cache, address: Address, patience: float) -> Pulled:
        """The transfer that was just asked for on this connection; it must begin within so many real seconds."""
        began, before = self.clock.now(), connection.received
        token = started(await within(patience, connection.expect(Kind.START)), cache.size, cache.tokens)
        posted = self.clock.now() - began
        incoming = Incoming(cache, self.stall_seconds)
        lanes = (self._lane(address, token, incoming) for _ in range(lanes_for(cache.size, self.lanes) - 1))
        state = await incoming.receive(connection, *lanes)
        received = connection.received - before + incoming.received
        return Pulled(state, received, posted, self.clock.now() - began, incoming.chunks)

    async def _lane(self, address: Address, token: str, incoming: Incoming) -> None:
        try:
            connection = await connect(*address, self.connect_seconds)
        except WireError:
            return  # the other lanes carry it all
        try:
            connection.send_json(Kind.LANE, token=token)
            await incoming.carry(connection)
        finally:
            connection.abort()
            self.count(connection)


@dataclass(frozen=True)
class Puller:
    """Reads what others keep under a lease (NIXL pull)."""

    reader: Reader
    peers: Peers
    heartbeat_seconds: float
    cache: Callable[[str, str, int], Cache]
    """What a transfer from an engine, of a request, of so many tokens must be."""
    in_background: Callable[[Coroutine[Any, Any, None]], object]
    count_untold: Callable[[], None]
    """A prefill worker could not be told that its cache was read."""

    async def pull(self, remote: RemoteBlocks, tokens: int, start: asyncio.Event) -> Pulled:
        """Hold the lease until `start` is set, then transfer; TransferError says why not.

        Cancelled or failed, the lease is as it was: the caller releases it.
        """
        peer = peer_of(remote)
        await self.peers.shake(peer)
        connection = await self.reader.open((remote.host, remote.port), remote.engine_id)
        done = False
        try:
            if remote.tp_size is None:
                await start.wait()  # vLLM sends no heartbeats without it
            else:
                await self._beat(connection, remote, start)
            pulled = await self._transfer(connection, remote, tokens)
            done = True
            self.in_background(self._tell_done(connection, remote))
            return pulled
        except RefusedError as refusal:
            if refusal.reason == "engine":
                self.peers.forget(peer)
            raise _failed(remote, refusal) from refusal
        except (WireError, PayloadError) as error:
            raise _failed(remote, error) from error
        finally:
            self.reader.count(connection)
            if not done:
                connection.abort()

    async def release(self, remote: RemoteBlocks) -> None:
        """Tell the prefill worker that nobody will pull; TransferError if it cannot be told."""
        await self.peers.shake(peer_of(remote))
        address = (remote.host, remote.port)
        await self.reader.tell(address, remote.engine_id, Kind.RELEASE, request=remote.request_id)

    async def _tell_done(self, connection: Connection, remote: RemoteBlocks) -> None:
        """The cache is here whether or not the prefill worker can be told so, and the request does not wait for it."""
        try:
            connection.send_json(Kind.DONE, request=remote.request_id)
            await within(self.reader.connect_seconds, connection.expect(Kind.RECEIVED))
        except WireError as error:
            log.warning(
                "KV of request %s stays at the prefill worker until its lease ends: %s", remote.request_id, error
            )
            self.count_untold()
        finally:
            connection.abort()
            self.reader.count(connection)

    async def _beat(self, connection: Connection, remote: RemoteBlocks, until: asyncio.Event) -> None:
        clock = self.reader.clock
        while True:
            connection.send_json(Kind.HEARTBEAT, request=remote.request_id)
            await connection.drain()
            if await clock.wait(until, clock.now() + self.heartbeat_seconds):
                return

    async def _transfer(self, connection: Connection, remote: RemoteBlocks, tokens: int) -> Pulled:
        connection.send_json(
            Kind.PULL,
            request=remote.request_id,
            blocks=blocks_digest(remote.block_ids),
            tokens=tokens,
            tp=remote.tp_size or 1,
        )
        cache = self.cache(remote.engine_id, remote.request_id, tokens)
        beating = asyncio.create_task(self._beat(connection, remote, asyncio.Event()))
        try:
            return await self.reader.read(connection, cache, (remote.host, remote.port), self.reader.stall_seconds)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


def peer_of(remote: RemoteBlocks) -> Peer:
    """The engine that keeps these blocks."""
    return Peer(remote.engine_id, remote.host, remote.port, remote.tp_size or 1, remote.pp_size)


def _failed(remote: RemoteBlocks, error: Exception) -> TransferError:
    return TransferError(f"KV of request {remote.request_id} from {remote.host}:{remote.port}: {error}")
