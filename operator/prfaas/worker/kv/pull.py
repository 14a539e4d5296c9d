"""The reading side of a transfer: one connection per request, from its arrival until its cache is here, and its lanes.

The connection opens when the request arrives and beats while the request queues, so that a long queue here does not
cost the lease there. Whatever ends the request before its transfer is told to the prefill worker, which frees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.worker.clock import Clock
from prfaas.worker.kv.lanes import Cache, Incoming, lanes_for, started
from prfaas.worker.kv.params import RemoteBlocks, blocks_digest
from prfaas.worker.kv.payload import PayloadError
from prfaas.worker.kv.peers import Peer, Peers, TransferError
from prfaas.worker.kv.wire import Connection, Kind, RefusedError, WireError, connect, within


@dataclass(frozen=True)
class Pulled:
    """A cache that came whole."""

    state: bytes
    wire_bytes: int
    """Bytes received on all lanes, framing included."""
    seconds: float
    """From the request to the last byte, real seconds."""
    chunks: int


@dataclass(frozen=True)
class Puller:
    """Reads caches for one engine."""

    clock: Clock
    peers: Peers
    heartbeat_seconds: float
    stall_seconds: float
    """Real seconds without a byte after which a transfer has failed."""
    lanes: int
    cache: Callable[[str, str, int], Cache]
    """What a transfer from an engine, of a request, of so many tokens must be."""
    count: Callable[[Connection], None]
    """Count what came on a connection."""

    async def pull(self, remote: RemoteBlocks, tokens: int, start: asyncio.Event) -> Pulled:
        """Hold the lease until `start` is set, then transfer; TransferError says why not.

        Cancelled or failed, the lease is as it was: the caller releases it.
        """
        peer = peer_of(remote)
        await self.peers.shake(peer)
        connection = await self._open(peer)
        try:
            if remote.tp_size is None:
                await start.wait()  # vLLM sends no heartbeats without it
            else:
                await self._beat(connection, remote, start)
            pulled = await self._transfer(connection, remote, tokens)
            connection.send_json(Kind.DONE, request=remote.request_id)
            await within(self.peers.seconds, connection.close())
            return pulled
        except RefusedError as refusal:
            if refusal.reason == "engine":
                self.peers.forget(peer)
            raise _failed(remote, refusal) from refusal
        except (WireError, PayloadError) as error:
            raise _failed(remote, error) from error
        finally:
            connection.abort()
            self.count(connection)

    async def release(self, remote: RemoteBlocks) -> None:
        """Tell the prefill worker that nobody will pull; TransferError if it cannot be told."""
        peer = peer_of(remote)
        await self.peers.shake(peer)
        await tell(self, peer, Kind.RELEASE, request=remote.request_id)

    async def read(self, connection: Connection, cache: Cache, where: tuple[str, int], began: float) -> Pulled:
        """The transfer that was just asked for on this connection. `where` further lanes are opened."""
        token = started(await within(self.stall_seconds, connection.expect(Kind.START)), cache.size, cache.tokens)
        return await self.take_in(connection, cache, where, token, began)

    async def take_in(
        self, connection: Connection, cache: Cache, where: tuple[str, int], token: str, began: float
    ) -> Pulled:
        """A transfer that has begun on this connection."""
        incoming = Incoming(cache, self.stall_seconds)
        before = connection.received
        lanes = (self._lane(where, token, incoming) for _ in range(lanes_for(cache.size, self.lanes) - 1))
        state = await incoming.receive(connection, *lanes)
        received = connection.received - before + incoming.received
        return Pulled(state, received, self.clock.now() - began, incoming.chunks)

    async def _lane(self, where: tuple[str, int], token: str, incoming: Incoming) -> None:
        try:
            connection = await connect(*where, self.peers.seconds)
        except WireError:
            return  # the other lanes carry it all
        try:
            connection.send_json(Kind.LANE, token=token)
            await incoming.carry(connection)
        finally:
            connection.abort()
            self.count(connection)

    async def _open(self, peer: Peer) -> Connection:
        try:
            connection = await connect(peer.host, peer.port, self.peers.seconds)
        except WireError as error:
            raise TransferError(str(error)) from error
        connection.send_json(Kind.OPEN, engine=peer.engine_id)
        return connection

    async def _beat(self, connection: Connection, remote: RemoteBlocks, until: asyncio.Event) -> None:
        while True:
            connection.send_json(Kind.HEARTBEAT, request=remote.request_id)
            await connection.drain()
            if await self.clock.wait(until, self.clock.now() + self.heartbeat_seconds):
                return

    async def _transfer(self, connection: Connection, remote: RemoteBlocks, tokens: int) -> Pulled:
        began, cache = self.clock.now(), self.cache(remote.engine_id, remote.request_id, tokens)
        connection.send_json(
            Kind.PULL,
            request=remote.request_id,
            blocks=blocks_digest(remote.block_ids),
            tokens=tokens,
            tp=remote.tp_size or 1,
        )
        beating = asyncio.create_task(self._beat(connection, remote, asyncio.Event()))
        try:
            return await self.read(connection, cache, (remote.host, remote.port), began)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


async def tell(puller: Puller, peer: Peer, kind: Kind, **fields: object) -> None:
    """One notification on a connection of its own; TransferError if it cannot be sent."""
    try:
        connection = await connect(peer.host, peer.port, puller.peers.seconds)
    except WireError as error:
        raise TransferError(str(error)) from error
    try:
        connection.send_json(Kind.OPEN, engine=peer.engine_id)
        connection.send_json(kind, **fields)
        await within(puller.peers.seconds, connection.close())
    except WireError as error:
        raise TransferError(str(error)) from error
    finally:
        connection.abort()
        puller.count(connection)


def peer_of(remote: RemoteBlocks) -> Peer:
    """The engine that keeps these blocks."""
    return Peer(remote.engine_id, remote.host, remote.port, remote.tp_size or 1, remote.pp_size)


def _failed(remote: RemoteBlocks, error: Exception) -> TransferError:
    return TransferError(f"KV of request {remote.request_id} from {remote.host}:{remote.port}: {error}")
