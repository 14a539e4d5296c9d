"""One transfer over several connections: chunks go out on whichever has room, and may arrive in any order.

A long line gives one TCP connection only its window per round trip; NIXL (`num_threads`) and Mooncake
(`MC_TCP_LANES_PER_PEER`) use several for that reason. A lane that breaks fails the whole transfer; one that could not
be opened does not, the others carry everything.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from prfaas.worker.kv.payload import PayloadReader, PayloadWriter, checksum, chunks_of
from prfaas.worker.kv.wire import Connection, Kind, WireError, parse, within

LANE_BYTES = 256 * 1024
"""A transfer uses no more lanes than it has such parts: a connection costs a round trip too."""
MOST_LANES = 16
_INDEX_BYTES = 4


class Carrier(Protocol):
    """Half a transfer, as a connection that joins it sees it."""

    async def carry(self, connection: Connection) -> None:
        """Use the connection until this lane has nothing more to carry."""


@dataclass(frozen=True)
class Cache:
    """What a transfer is about: whose KV cache, how long its prompt is, how many bytes it has."""

    engine_id: str
    request_id: str
    tokens: int
    size: int


def lanes_for(size: int, limit: int) -> int:
    """How many connections a transfer of so many bytes uses."""
    return max(1, min(limit, -(-size // LANE_BYTES)))


class Outgoing:
    """The sending half. `check` is awaited before each chunk: True to damage it, WireError to send no more."""

    def __init__(self, cache: Cache, state: bytes, check: Callable[[int], Awaitable[bool]]) -> None:
        self.cache, self.token = cache, secrets.token_hex(8)
        self._payload = PayloadWriter(state, cache.request_id, cache.size)
        self._chunks = enumerate(self._payload)
        self._check = check
        self.chunks = chunks_of(cache.size)
        self._joined: set[asyncio.Future[None]] = set()
        self.sent = 0

    async def send(self, connection: Connection) -> None:
        """All that follows START on the first connection; WireError if the transfer broke."""
        before = connection.sent
        try:
            await self._carry(connection)
            if self._joined:
                await asyncio.gather(*self._joined)
            hashes = bytes(self._payload.hashes)
            cache = self.cache
            connection.send(Kind.CHECKSUM, checksum(cache.engine_id, cache.request_id, cache.tokens, hashes))
            await connection.drain()
        finally:
            self.sent += connection.sent - before

    async def carry(self, connection: Connection, until_read: float | None = None) -> None:
        """See Carrier. `until_read`: seconds within which the reader, having read all, must end the connection."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._joined.add(done)
        before = connection.sent
        try:
            await self._carry(connection)
            if until_read is not None:
                await within(until_read, connection.receive())
        except BaseException:
            if not done.done():
                done.set_exception(WireError("one of its lanes broke"))
            raise
        else:
            done.set_result(None)
        finally:
            self.sent += connection.sent - before

    async def _carry(self, connection: Connection) -> None:
        for index, chunk in self._chunks:
            sent = _damaged(chunk) if await self._check(index) else chunk
            connection.send(Kind.DATA, index.to_bytes(_INDEX_BYTES, "big") + sent)
            await connection.drain()
        connection.send(Kind.END, b"")
        await connection.drain()


@dataclass
class Incoming:
    """The receiving half."""

    cache: Cache
    stall_seconds: float
    """Real seconds without a frame on a lane after which the transfer has failed."""
    chunks: int = 0
    received: int = 0
    """Bytes that came on lanes that joined, framing included."""
    _reader: PayloadReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = PayloadReader(self.cache.size)

    async def receive(self, connection: Connection, *lanes: Coroutine[Any, Any, None]) -> bytes:
        """The state, when everything is here; WireError or PayloadError otherwise. `lanes` open more connections."""
        checksum_bytes, *_ = await all_of(self._first(connection), *lanes)
        assert checksum_bytes is not None
        cache = self.cache
        return self._reader.state(cache.engine_id, cache.request_id, cache.tokens, checksum_bytes)

    async def carry(self, connection: Connection) -> None:
        """See Carrier."""
        before = connection.received
        try:
            await self._carry(connection)
        finally:
            self.received += connection.received - before

    async def _first(self, connection: Connection) -> bytes:
        await self._carry(connection)
        return await within(self.stall_seconds, connection.expect(Kind.CHECKSUM))

    async def _carry(self, connection: Connection) -> None:
        while True:
            kind, body = await within(self.stall_seconds, connection.expect_one_of(Kind.DATA, Kind.END))
            if kind is Kind.END:
                return
            self._reader.feed(int.from_bytes(body[:_INDEX_BYTES], "big"), body[_INDEX_BYTES:])
            self.chunks += 1


def _damaged(chunk: bytes) -> bytes:
    return chunk[:-1] + bytes([chunk[-1] ^ 1])


def started(body: bytes, expected: int, tokens: int) -> str:
    """The token in a START frame; WireError if it announces another size than a prompt of that length has here."""
    fields = parse(body)
    if fields.get("bytes") != expected:
        raise WireError(f"{fields.get('bytes')} bytes announced, {expected} expected for {tokens} tokens")
    return str(fields.get("token"))


async def all_of(*doing: Coroutine[Any, Any, bytes | None]) -> list[bytes | None]:
    """The results of all; when one fails the others are cancelled and its error raised."""
    tasks = [asyncio.create_task(each) for each in doing]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
