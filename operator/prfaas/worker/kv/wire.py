"""Frames on the KV port, which stand in for a handshake, for reads and writes of GPU memory, and for notifications.

A frame is one byte of kind, four of length (big-endian), a body. Control bodies are JSON. Every connection says first
what it is for.

    HELLO {engine, ranks}        the side channel: WELCOME {engine, compatibility} comes back, the connection ends
    OPEN  {engine}               notifications and reads of one request. Then, from a reader (NIXL pull):
        HEARTBEAT {request}          extends the lease while the reader's queue is long
        PULL {request, blocks, tokens, tp, lanes}    asks for a transfer, see below
        DONE {request}               frees the blocks; RECEIVED comes back
        RELEASE {request}            frees them without a transfer: the reader gave up
        REGISTER {request_id, ...}   (NIXL push) where the writer is to write to; RELEASE takes it back
    OPEN, PUSH {request, ...}    from a writer (NIXL push): a transfer begins; RECEIVED comes back when it is whole
    OPEN, WANT {transfer, ...}   from a reader (Mooncake): the transfer begins when the prefill has ended
    LANE  {token}                one more connection for a transfer that has begun

A transfer is START {bytes, token} on the connection that asked for it, then chunks on that one and on those that
joined: DATA (four bytes of index, bytes), in any order, END where a lane carries no more; CHECKSUM is the last frame on
the first connection. REFUSED {reason, message} may come instead of an answer; the connection then ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import struct
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

_HEADER = struct.Struct("!BI")
MAX_BODY = 1024 * 1024


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    OPEN = 3
    HEARTBEAT = 4
    PULL = 5
    START = 6
    DATA = 7
    END = 8
    CHECKSUM = 9
    DONE = 10
    RELEASE = 11
    REFUSED = 12
    LANE = 13
    REGISTER = 14
    PUSH = 15
    RECEIVED = 16
    WANT = 17


_KINDS = frozenset(Kind)


class WireError(Exception):
    """The peer broke the connection or the protocol."""


class RefusedError(WireError):
    """The peer said no, and why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class Connection:
    """Frames over one stream; counts every byte in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.sent = self.received = 0
        self._closed = False
        self.counted = 0
        """Of the received bytes, those that are in the metrics."""

    def send(self, kind: Kind, body: bytes) -> None:
        """Hand a frame to the socket without waiting."""
        self._writer.write(_HEADER.pack(kind, len(body)) + body)
        self.sent += _HEADER.size + len(body)

    def send_json(self, kind: Kind, **fields: Any) -> None:
        """Hand a control frame to the socket without waiting."""
        self.send(kind, json.dumps(fields, separators=(",", ":")).encode())

    async def drain(self) -> None:
        """Wait until the socket's buffer has room; WireError if the peer is gone."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise WireError(f"connection lost: {error}") from error

    async def receive(self) -> tuple[Kind, bytes] | None:
        """The next frame, None where the peer ended the connection between frames; WireError for anything else."""
        try:
            header = await self._reader.readexactly(_HEADER.size)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise WireError("connection ended inside a frame") from error
            return None
        except OSError as error:
            raise WireError(f"connection lost: {error}") from error
        number, size = _HEADER.unpack(header)
        if number not in _KINDS or size > MAX_BODY:
            raise WireError(f"not a frame: kind {number}, {size} bytes")
        try:
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WireError("connection ended inside a frame") from error
        self.received += _HEADER.size + size
        return Kind(number), body

    async def expect(self, kind: Kind) -> bytes:
        """The body of the next frame, which must be of that kind; RefusedError or WireError otherwise."""
        return (await self.expect_one_of(kind))[1]

    async def expect_one_of(self, *kinds: Kind) -> tuple[Kind, bytes]:
        """The next frame, of one of these kinds; RefusedError or WireError otherwise."""
        names = " or ".join(kind.name for kind in kinds)
        frame = await self.receive()
        if frame is None:
            raise WireError(f"connection ended, {names} expected")
        if frame[0] is Kind.REFUSED:
            refusal = parse(frame[1])
            raise RefusedError(str(refusal.get("reason")), str(refusal.get("message")))
        if frame[0] not in kinds:
            raise WireError(f"{frame[0].name} received, {names} expected")
        return frame

    async def close(self) -> None:
        """End the connection after what was sent; never raises for a peer that is gone."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        self._closed = True

    def abort(self) -> None:
        """Drop the connection and what was not sent yet."""
        if not self._closed:  # asyncio fails where a transport that had something to send is aborted after its end
            self._writer.transport.abort()


def parse(body: bytes) -> dict[str, Any]:
    """The object in a control frame; WireError if it is none."""
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise WireError("control frame is not JSON") from error
    if not isinstance(fields, dict):
        raise WireError("control frame is not a JSON object")
    return fields


async def within(seconds: float, doing: Awaitable[T]) -> T:
    """What `doing` gives; WireError if that takes longer than so many real seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await doing
    except TimeoutError as error:
        raise WireError(f"nothing came for {seconds:g} s") from error


async def connect(host: str, port: int, seconds: float) -> Connection:
    """A connection to a KV port; WireError if there is none within so many real seconds."""
    try:
        reader, writer = await within(seconds, asyncio.open_connection(host, port))
    except (OSError, UnicodeError, WireError) as error:  # UnicodeError: no host has such a name
        raise WireError(f"no connection to {host}:{port}: {error}") from error
    return Connection(reader, writer)
