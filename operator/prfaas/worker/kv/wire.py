"""Frames on the KV port, which stand in for NIXL's handshake, reads and notifications.

A frame is one byte of kind, four of length (big-endian), a body. Control bodies are JSON.

    decode worker                            prefill worker
    HELLO     {engine, compatibility}   ->
                                        <-   WELCOME {engine, compatibility}
    HEARTBEAT {request}                 ->   extends the lease while the decode worker's queue is long
    PULL      {request, blocks, tokens} ->
                                        <-   START {bytes}, DATA ..., CHECKSUM
    DONE      {request}                 ->   frees the blocks
    RELEASE   {request}                 ->   frees them without a transfer: the decode worker gave up

REFUSED {reason, message} may come instead of WELCOME or START; the connection then ends.
"""

from __future__ import annotations

import asyncio
import enum
import json
import struct
from typing import Any

_HEADER = struct.Struct("!BI")
MAX_BODY = 1024 * 1024


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    HEARTBEAT = 3
    PULL = 4
    START = 5
    DATA = 6
    CHECKSUM = 7
    DONE = 8
    RELEASE = 9
    REFUSED = 10


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
        frame = await self.receive()
        if frame is None:
            raise WireError(f"connection ended, {kind.name} expected")
        if frame[0] is Kind.REFUSED:
            refusal = parse(frame[1])
            raise RefusedError(str(refusal.get("reason")), str(refusal.get("message")))
        if frame[0] is not kind:
            raise WireError(f"{frame[0].name} received, {kind.name} expected")
        return frame[1]

    async def close(self) -> None:
        """End the connection after what was sent; never raises for a peer that is gone."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    def abort(self) -> None:
        """Drop the connection and what was not sent yet."""
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
