"""Handshakes with other engines: one per engine, kept, and shared by whoever waits for it.

The one who asks compares (vLLM does it on this side only): another engine at that address, or another compatibility
hash, and there is no transfer. A failed handshake fails every request that waits for it and counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.worker.clock import Clock
from prfaas.worker.kv.wire import Kind, WireError, connect, parse, within

HANDSHAKE_SECONDS = 5.0
"""vLLM's limit on a handshake; real seconds, since the network is real."""


class TransferError(Exception):
    """The cache did not come, or what came is not it. `counted`: the failure is in the metrics already."""

    counted = False


class HandshakeError(TransferError):
    """No transfer with that engine."""

    counted = True


@dataclass(frozen=True)
class Peer:
    """Another engine, and where it listens."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1


@dataclass
class Peers:
    """The engines that this one has shaken hands with."""

    compatibility: str
    enforced: bool
    """False: another hash is no obstacle (`enforce_handshake_compat`)."""
    count_failed: Callable[[], None]
    clock: Clock
    idle_seconds: float
    """An engine that nothing was wanted of for so long is forgotten (`engine_ttl`): 0 or less, never."""
    seconds: float = HANDSHAKE_SECONDS
    _known: dict[Peer, float] = field(default_factory=dict)
    """When something was last wanted of each."""
    _under_way: dict[Peer, asyncio.Task[None]] = field(default_factory=dict)

    async def shake(self, peer: Peer) -> None:
        """Return when hands are shaken, at once if they are already; HandshakeError says why not."""
        now = self.clock.now()
        if self.idle_seconds > 0:
            self._known = {each: at for each, at in self._known.items() if now - at <= self.idle_seconds}
        if peer in self._known:
            self._known[peer] = now
            return
        task = self._under_way.get(peer)
        if task is None:
            task = self._under_way[peer] = asyncio.create_task(self._shake(peer))
            task.add_done_callback(lambda done: self._over(peer, done))
        await asyncio.shield(task)

    def forget(self, peer: Peer) -> None:
        """That engine is not there any more: shake hands again next time."""
        self._known.pop(peer, None)

    def stop(self) -> None:
        """Give up what is under way."""
        for task in self._under_way.values():
            task.cancel()

    def _over(self, peer: Peer, task: asyncio.Task[None]) -> None:
        del self._under_way[peer]
        if task.cancelled():
            return
        if task.exception() is None:
            self._known[peer] = self.clock.now()
        else:
            self.count_failed()

    async def _shake(self, peer: Peer) -> None:
        where = f"{peer.host}:{peer.port}"
        try:
            connection = await connect(peer.host, peer.port, self.seconds)
            try:
                # The highest rank: where it is not there the sizes were wrong.
                connection.send_json(Kind.HELLO, engine=peer.engine_id, rank=[peer.pp_size - 1, peer.tp_size - 1])
                welcome = parse(await within(self.seconds, connection.expect(Kind.WELCOME)))
            finally:
                connection.abort()
        except WireError as error:
            raise HandshakeError(f"handshake with {where} failed: {error}") from error
        if welcome.get("engine") != peer.engine_id:
            raise HandshakeError(f"{where} is engine {welcome.get('engine')}, not {peer.engine_id}")
        if self.enforced and welcome.get("compatibility") != self.compatibility:
            raise HandshakeError(
                f"engine {peer.engine_id} at {where} has another compatibility hash: model, version, dtype, cache "
                "dtype, attention backend, transfer mode or KV scale differ"
            )
