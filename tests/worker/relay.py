"""Somebody between decode and prefill worker: relays the KV port frame by frame and may change what it likes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prfaas.worker.kv.wire import Kind

Frames = list[tuple[Kind, bytes]]
Change = Callable[[Kind, bytes], Frames | None]
"""The frames to pass on in place of one; None: end the connection here."""


def unchanged(kind: Kind, body: bytes) -> Frames:
    """Pass a frame on."""
    return [(kind, body)]


def flip(kind: Kind, body: bytes) -> Frames:
    """One bit changed."""
    return [(kind, body[:-1] + bytes([body[-1] ^ 1]) if kind is Kind.DATA else body)]


@dataclass
class Relay:
    """Its port, what to change in each direction, and what went through."""

    port: int = 0
    to_decode: Change = unchanged
    to_prefill: Change = unchanged
    seen: list[Kind] = field(default_factory=list)


@asynccontextmanager
async def relaying(port: int, to_decode: Change = unchanged, to_prefill: Change = unchanged) -> AsyncIterator[Relay]:
    """A relay in front of a KV port on loopback."""
    relay, tasks = Relay(to_decode=to_decode, to_prefill=to_prefill), set[asyncio.Task[None]]()

    async def accept(near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        pumps = [
            asyncio.create_task(_pump(near_reader, far_writer, lambda k, b: relay.to_prefill(k, b), relay)),
            asyncio.create_task(_pump(far_reader, near_writer, lambda k, b: relay.to_decode(k, b), relay)),
        ]
        tasks.update(pumps)
        await asyncio.wait(pumps)
        for writer in (near_writer, far_writer):
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Change, relay: Relay) -> None:
    try:
        while True:
            number, size = struct.unpack("!BI", await reader.readexactly(5))
            kind, body = Kind(number), await reader.readexactly(size)
            relay.seen.append(kind)
            frames = change(kind, body)
            if frames is None:
                return
            for out, content in frames:
                writer.write(struct.pack("!BI", out, len(content)) + content)
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        return
    finally:
        writer.close()
