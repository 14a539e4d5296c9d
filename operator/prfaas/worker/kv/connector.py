"""What the engine sees of its KV connector, whichever it is, and what all connectors share.

The engine says when a request begins, when its prefill ends and when it is given up; the connector says when a cache is
here or will not come.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas.worker.blocks import BlockPool, no_blocks
from prfaas.worker.clock import Clock
from prfaas.worker.config import KVTransfer, WorkerConfig
from prfaas.worker.faults import FaultBox, KVFault, asked_for
from prfaas.worker.generation import Generation
from prfaas.worker.kv.lanes import Cache, Outgoing
from prfaas.worker.kv.leases import Lease, LeaseTable, extension_seconds
from prfaas.worker.kv.params import Nowhere
from prfaas.worker.kv.payload import chunks_of, payload_bytes
from prfaas.worker.kv.pull import Reader
from prfaas.worker.kv.serve import KVServer
from prfaas.worker.kv.wire import Connection, Kind, WireError
from prfaas.worker.metrics import Metrics

log = logging.getLogger(__name__)

LEAST_STALL_SECONDS = 5.0
"""A transfer has failed after a lease without a byte, but real seconds are needed too, since the network is real."""


class Owner(Protocol):
    """The engine, as far as a connector calls it back."""

    def kv_arrived(self, generation: Generation, state: bytes) -> None:
        """The cache of a request is here; `state` is what it holds."""

    def kv_failed(self, generation: Generation) -> None:
        """The cache of a request will not come."""

    def wake(self) -> None:
        """A lease was renewed or ended: blocks may be free, the next deadline may be another."""


@dataclass(frozen=True)
class Services:
    """What a connector works with."""

    config: WorkerConfig
    clock: Clock
    pool: BlockPool
    metrics: Metrics
    faults: FaultBox
    owner: Owner


class Measured:
    """A connector's metrics: vLLM's names for its family, `nixl` or `mooncake`. What a family has not is ignored."""

    def __init__(self, metrics: Metrics, family: str) -> None:
        self.seconds = metrics.of(f"{family}_xfer_time_seconds")
        self.post_time = metrics.of(f"{family}_post_time_seconds")
        self.bytes = metrics.of(f"{family}_bytes_transferred")
        self.descriptors = metrics.of(f"{family}_num_descriptors")
        self.failed_transfers = metrics.of(f"{family}_num_failed_transfers")
        self.failed_receives = metrics.of(f"{family}_num_failed_recvs")
        self.failed_notifications = metrics.of(f"{family}_num_failed_notifications")
        self.expired = metrics.of(f"{family}_num_kv_expired_reqs")
        self.after_expiry = metrics.of(f"{family}_num_notifications_after_expiry")


class Connector:
    """The connector of an engine that has none: requests compute their own caches and keep none."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.leases = LeaseTable(1.0)
        self.port = 0

    async def start(self) -> None:
        """Listen for peers."""

    async def stop(self) -> None:
        """End everything."""

    def choose(self, generation: Generation, params: dict[str, Any] | None) -> None:
        """What a request's parameters say of its KV: sets `remote` where it is elsewhere, `holds_kv` where it is kept.

        ParamsError if nothing can be made of them: the request fails; if it is a FatalParamsError, the engine dies.
        """

    def fetch(self, generation: Generation) -> None:
        """Begin to bring in the cache of a request that `choose` found to be elsewhere."""

    def abandon(self, generation: Generation) -> None:
        """A request is given up: whoever keeps its cache, or waits for it, is told."""

    def refused(self, params: dict[str, Any] | None) -> None:
        """A request was refused before it got here: the prefill worker must not keep its KV until the lease ends."""

    def grant(self, generation: Generation, now: float) -> None:
        """A prefill for others ended: take over its blocks, and say in `kv_params` where they are."""

    def expire(self, now: float) -> None:
        """Free what nobody came for in time."""

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next; None: never."""
        return self.leases.next_deadline()

    @property
    def kept(self) -> int:
        """Caches that wait for their readers."""
        return len(self.leases)


class Networked(Connector):
    """What the real connectors share: leases, background tasks, the sizes of caches, the making of transfers."""

    def __init__(self, services: Services, transfer: KVTransfer, keep_seconds: float) -> None:
        super().__init__(services)
        scale = services.config.time_scale
        self.transfer = transfer
        self.leases = LeaseTable(keep_seconds / scale, extension_seconds(keep_seconds) / scale)
        self._background: set[asyncio.Task[None]] = set()
        self._faulty: dict[str, KVFault] = {}
        """By request id: prefills under way whose transfer is to fail."""
        self.measured = Measured(services.metrics, "mooncake" if transfer.mode == "mooncake" else "nixl")
        self.wire_sent, self.wire_received = map(services.metrics.kv_wire.labels, ("sent", "received"))
        self.reader = Reader(
            clock=services.clock,
            stall_seconds=max(transfer.lease_seconds / scale, LEAST_STALL_SECONDS),
            lanes=transfer.lanes,
            count=self.received,
        )

    async def stop(self) -> None:
        """See Connector."""
        if self._background:
            await asyncio.wait(self._background, timeout=1)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def expire(self, now: float) -> None:
        """See Connector."""
        for key in self.leases.expire(now):
            log.warning("KV of request %s expired unread", key)
            self.measured.expired.inc()

    def fetch(self, generation: Generation) -> None:
        """See Connector."""
        remote = generation.remote
        assert remote is not None
        if isinstance(remote, Nowhere):
            log.warning("request %s: kv_transfer_params without %s", generation.sequence.request_id, remote.missing)
            generation.fetch = asyncio.create_task(_for_ever())
        else:
            generation.fetch = asyncio.create_task(self._fetch(generation))

    def cache(self, engine_id: str, request_id: str, tokens: int) -> Cache:
        """What a transfer of that request is about."""
        config = self.services.config
        return Cache(engine_id, request_id, tokens, payload_bytes(config.profile.kv, tokens, config.kv_byte_scale))

    def outgoing(self, lease: Lease, request_id: str) -> Outgoing:
        """A transfer of a cache that is kept here, under the name that its reader knows."""

        cache = self.cache(self.transfer.engine_id, request_id, lease.tokens)
        fault = lease.fault or self.services.faults.current.kv
        last = chunks_of(cache.size) - 1

        async def check(index: int) -> bool:
            if lease.ended:
                # Freed under the reader: it must not get a whole cache out of blocks that are another's now.
                raise WireError("its lease ended during the transfer")
            if fault is None or index < last:
                return False
            self.services.faults.note("kv")
            if fault == "stall":
                await asyncio.Event().wait()
            if fault == "cut":
                raise WireError("it was asked to break")
            return fault == "corrupt"

        return Outgoing(cache, reused(lease.state) if fault == "wrong" else lease.state, check)

    def keep(self, generation: Generation) -> None:
        """The prefill of this request is for others."""
        generation.sequence.holds_kv = True
        if (fault := asked_for.get().kv) is not None:
            self._faulty[generation.sequence.request_id] = fault

    def lease(self, generation: Generation, name: str, now: float, digest: str = "") -> Lease:
        """Take over the blocks of a prefill that ended, under the name by which they will be asked for."""
        sequence = generation.sequence
        blocks, sequence.blocks = sequence.blocks, no_blocks()
        lease = Lease(
            request_id=name,
            state=generation.state,
            tokens=self.sent_tokens(sequence.prompt_tokens),
            blocks=digest,
            deadline=now + self.leases.duration,
            free=lambda: self.services.pool.give_back(blocks),
            fault=self._faulty.pop(sequence.request_id, None),
        )
        self.leases.grant(lease)
        return lease

    def abandon(self, generation: Generation) -> None:
        """See Connector."""
        self._faulty.pop(generation.sequence.request_id, None)
        if generation.fetch is not None:
            generation.fetch.cancel()

    async def send_on_request(self, connection: Connection, server: KVServer, outgoing: Outgoing) -> None:
        """A transfer that a reader asked for on this connection; it may join more of them. WireError if it broke."""
        server.transfers[outgoing.token] = outgoing
        before = connection.sent
        try:
            connection.send_json(Kind.START, bytes=outgoing.cache.size, token=outgoing.token)
            started = connection.sent - before
            await outgoing.send(connection)
        finally:
            del server.transfers[outgoing.token]
            self.wire_sent.inc(outgoing.sent + started)

    def count_transfer(self, posted: float, seconds: float, wire_bytes: int, chunks: int) -> None:
        """Measure a transfer that is over, on the side where vLLM measures it: the one that moves the bytes."""
        measured = self.measured
        measured.post_time.observe(posted)
        measured.seconds.observe(seconds)
        measured.bytes.observe(wire_bytes)
        measured.descriptors.observe(chunks)

    def shown_blocks(self, generation: Generation) -> tuple[tuple[int, ...], ...]:
        """The blocks of a prompt, one list per group of layers, as peers are told of them."""
        sequence = generation.sequence
        return (tuple(sequence.blocks[: self.services.pool.blocks_for(sequence.prompt_tokens)]),)

    def sent_tokens(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt cross: of a hybrid model all but the last, which the decode worker computes."""
        return prompt_tokens - (self.services.config.attention == "hybrid")

    def received(self, connection: Connection) -> None:
        """Count what came, since the last call, on a connection that this engine opened."""
        self.wire_received.inc(connection.received - connection.counted)
        connection.counted = connection.received

    def in_background(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside everything else; ended by `stop`."""
        task = asyncio.create_task(doing)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _fetch(self, generation: Generation) -> None:
        raise NotImplementedError


def reused(state: bytes) -> bytes:
    """What lies in blocks that were given to another request since."""
    return hashlib.sha256(b"reused\0" + state).digest()


async def _for_ever() -> None:
    await asyncio.Event().wait()
