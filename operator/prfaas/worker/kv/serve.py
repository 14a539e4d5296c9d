"""The port where an engine is found by its peers: it shakes hands, and passes on who wants something.

As with vLLM's side channel, only the one who asks compares: the answer says who this engine is and what its
compatibility hash is. And as there, a question that the listener cannot answer, for a rank that does not exist, ends
it: whoever has shaken hands goes on, nobody else gets an answer until the engine is restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prfaas.worker.kv.lanes import Carrier
from prfaas.worker.kv.leases import LeaseError
from prfaas.worker.kv.payload import PayloadError
from prfaas.worker.kv.wire import Connection, Kind, WireError, parse, within

log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0
"""Least time without a frame after which a peer counts as gone; real seconds, since the network is real."""


@dataclass(frozen=True)
class Identity:
    """Who an engine is to its peers."""

    engine_id: str
    compatibility: str
    """Hash over what must be equal on both sides of a transfer."""
    tp_size: int = 1
    pp_size: int = 1

    def has(self, rank: object) -> bool:
        """Whether [pipeline rank, tensor rank] is one of this engine's."""
        match rank:
            case [int(pipeline), int(tensor)]:
                return 0 <= pipeline < self.pp_size and 0 <= tensor < self.tp_size
            case _:
                return False


class KVServer:
    """Listens for one engine. `talk` has the conversation after OPEN, which differs between connectors."""

    def __init__(self, identity: Identity, talk: Callable[[Connection], Awaitable[None]]) -> None:
        self.identity, self._talk = identity, talk
        self.transfers: dict[str, Carrier] = {}
        """Transfers under way, by the token with which further connections join."""
        self.answers = True
        """Whether it still shakes hands."""
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], Connection] = {}

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
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = connection = Connection(reader, writer)
        try:
            await self._greet(connection)
        except LeaseError as refusal:
            log.warning("KV transfer refused: %s", refusal)
            await refuse(connection, refusal.reason, str(refusal))
        except (WireError, PayloadError) as error:
            log.warning("KV connection failed: %s", error)
        except asyncio.CancelledError:
            # `stop` ended it: asyncio would report the cancellation of a connection's task as an error.
            return
        finally:
            del self._connections[task]
            connection.abort()

    async def _greet(self, connection: Connection) -> None:
        first = (Kind.HELLO, Kind.OPEN, Kind.LANE)
        kind, body = await within(SILENCE_SECONDS, connection.expect_one_of(*first))
        if kind is Kind.HELLO:
            await self._shake(connection, body)
        elif kind is Kind.LANE:
            carrier = self.transfers.get(str(parse(body).get("token")))
            if carrier is None:  # the others have carried everything by now
                connection.send(Kind.END, b"")
                await connection.close()
            else:
                await carrier.carry(connection)
                await connection.close()
        else:
            engine = parse(body).get("engine")
            if engine != self.identity.engine_id:
                raise LeaseError("engine", f"this is engine {self.identity.engine_id}, not {engine}")
            await self._talk(connection)

    async def _shake(self, connection: Connection, body: bytes) -> None:
        try:
            rank = parse(body).get("rank")
        except WireError:
            rank = None
        if self.answers and not self.identity.has(rank):
            self.answers = False
            log.error("handshake for rank %s, which this engine has not: no handshake is answered any more", rank)
        if not self.answers:
            await connection.receive()  # nothing comes: the peer's patience ends first
            return
        identity = self.identity
        connection.send_json(Kind.WELCOME, engine=identity.engine_id, compatibility=identity.compatibility)
        await connection.drain()
        await connection.close()


async def refuse(connection: Connection, reason: str, message: str) -> None:
    """Say no and why, and end the connection."""
    connection.send_json(Kind.REFUSED, reason=reason, message=message)
    try:
        await connection.drain()
    except WireError:
        return
    await connection.close()
