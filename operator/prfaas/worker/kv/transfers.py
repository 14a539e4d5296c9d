"""What one engine does with KV caches: keeps those it prefilled for others, brings in those that others prefilled.

The engine says when a request begins, when its prefill ends and when it is given up; this says when a cache is here or
will not come. Everything that a connector defines is behind this class, so that the engine knows none of it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from prfaas.worker.blocks import BlockPool, no_blocks
from prfaas.worker.clock import Clock
from prfaas.worker.config import WorkerConfig
from prfaas.worker.generation import Generation
from prfaas.worker.kv.leases import HEARTBEATS_PER_LEASE, Lease, LeaseTable
from prfaas.worker.kv.params import ParamsError, RemoteBlocks, blocks_digest
from prfaas.worker.kv.payload import payload_bytes
from prfaas.worker.kv.pull import HANDSHAKE_SECONDS, Pulled, Puller, TransferError
from prfaas.worker.kv.serve import Identity, KVServer
from prfaas.worker.metrics import Metrics

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The engine, as far as transfers call it back."""

    def kv_arrived(self, generation: Generation, state: bytes) -> None:
        """The cache of a request is here; `state` is what it holds."""

    def kv_failed(self, generation: Generation) -> None:
        """The cache of a request will not come."""

    def wake(self) -> None:
        """A lease was renewed or ended: blocks may be free, the next deadline may be another."""


class Transfers:
    """The KV caches that enter and leave one engine."""

    def __init__(self, config: WorkerConfig, clock: Clock, pool: BlockPool, metrics: Metrics, owner: Owner) -> None:
        self._config, self._clock, self._pool, self._metrics, self._owner = config, clock, pool, metrics, owner
        transfer = config.kv_transfer
        lease_seconds = (transfer.lease_seconds if transfer else 1.0) / config.time_scale
        self.leases = LeaseTable(lease_seconds)
        self._puller = Puller(
            compatibility=config.compatibility,
            clock=clock,
            heartbeat_seconds=lease_seconds / HEARTBEATS_PER_LEASE,
            stall_seconds=max(lease_seconds, HANDSHAKE_SECONDS),
            payload_size=self.payload_size,
            count_received=metrics.kv_wire.labels("received").inc,
        )
        self.port = transfer.port if transfer else 0
        self._server: KVServer | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen for readers, where this engine prefills for others."""
        transfer = self._config.kv_transfer
        if transfer is not None and transfer.produces:
            self._server = KVServer(Identity(transfer.engine_id, self._config.compatibility), self)
            self.port = await self._server.start(transfer.host, transfer.port)

    async def stop(self) -> None:
        """End everything."""
        if self._server is not None:
            await self._server.stop()
        if self._background:
            await asyncio.wait(self._background, timeout=1)
        for task in self._background:
            task.cancel()

    def choose(self, generation: Generation, params: dict[str, Any] | None) -> None:
        """What a request's parameters say of its KV; ParamsError if nothing can be made of them."""
        transfer = self._config.kv_transfer
        if transfer is None or not params:
            return
        sequence = generation.sequence
        if params.get("do_remote_prefill"):
            if not transfer.consumes:
                raise ParamsError("do_remote_prefill sent to a kv_producer")
            generation.remote = remote = RemoteBlocks.from_params(params)
            if remote.tokens != sequence.prompt_tokens:
                raise ParamsError(f"KV of {remote.tokens} tokens for a prompt of {sequence.prompt_tokens}")
            sequence.kv_from_remote = generation.external = True
        elif params.get("do_remote_decode"):
            if not transfer.produces:
                raise ParamsError("do_remote_decode sent to a kv_consumer")
            sequence.holds_kv = True

    def fetch(self, generation: Generation) -> None:
        """Begin to bring in the cache of a request that `choose` found to be elsewhere."""
        assert generation.remote is not None
        generation.fetch = asyncio.create_task(self._fetch(generation, generation.remote))

    def abandon(self, generation: Generation) -> None:
        """A request is given up: whoever keeps its cache is told."""
        pulling = generation.fetch is not None and not generation.fetch.done()
        if generation.fetch is not None:
            generation.fetch.cancel()
        if generation.remote is not None and pulling:
            self._release(generation.remote)

    def refused(self, params: dict[str, Any] | None) -> None:
        """A request was refused before it got here: the prefill worker must not keep its KV until the lease ends."""
        transfer = self._config.kv_transfer
        if transfer is not None and transfer.consumes and params and params.get("do_remote_prefill"):
            try:
                self._release(RemoteBlocks.from_params(params))
            except ParamsError as error:
                log.warning("refused request without usable KV parameters: %s", error)

    def grant(self, generation: Generation, now: float) -> None:
        """A prefill for others ended: keep its blocks under a lease, and say in `kv_params` where they are."""
        transfer, sequence = self._config.kv_transfer, generation.sequence
        assert transfer is not None
        shown = (tuple(sequence.blocks[: self._pool.blocks_for(sequence.prompt_tokens)]),)
        blocks, sequence.blocks = sequence.blocks, no_blocks()
        self.leases.grant(
            Lease(
                request_id=sequence.request_id,
                state=generation.state,
                tokens=sequence.prompt_tokens,
                blocks=blocks_digest(shown),
                deadline=now + self.leases.duration,
                free=lambda: self._pool.give_back(blocks),
            )
        )
        generation.kv_params = RemoteBlocks(
            engine_id=transfer.engine_id,
            request_id=sequence.request_id,
            host=transfer.host,
            port=self.port,
            tokens=sequence.prompt_tokens,
            block_ids=shown,
            tp_size=self._config.tensor_parallel_size,
        ).to_params()

    def expire(self, now: float) -> None:
        """Free what nobody came for in time."""
        for request_id in self.leases.expire(now):
            log.warning("KV of request %s expired unread", request_id)
            self._metrics.expired.inc()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next; None: never."""
        return self.leases.next_deadline()

    @property
    def kept(self) -> int:
        """Caches that wait for their readers."""
        return len(self.leases)

    # What the KV port needs (kv.serve.LeaseHolder).

    def now(self) -> float:
        """The engine's clock."""
        return self._clock.now()

    def lease_changed(self) -> None:
        """A lease was renewed or ended."""
        self._owner.wake()

    def notified_after_expiry(self) -> None:
        """A reader finished after its lease had ended."""
        self._metrics.after_expiry.inc()

    def payload_size(self, tokens: int) -> int:
        """Bytes that cross for a prompt of that length."""
        return payload_bytes(self._config.profile.kv, tokens, self._config.kv_byte_scale)

    def kv_sent(self, count: int) -> None:
        """Bytes were handed to a KV socket."""
        self._metrics.kv_wire.labels("sent").inc(count)

    async def _fetch(self, generation: Generation, remote: RemoteBlocks) -> None:
        try:
            pulled = await self._puller.pull(remote, generation.may_transfer)
        except TransferError as error:
            log.error("request %s: %s", generation.sequence.request_id, error)
            self._metrics.failed_transfers.inc()
            self._owner.kv_failed(generation)
        else:
            self._count(pulled, generation.sequence.prompt_tokens)
            self._owner.kv_arrived(generation, pulled.state)

    def _count(self, pulled: Pulled, tokens: int) -> None:
        metrics = self._metrics
        metrics.xfer_time.observe(pulled.seconds)
        metrics.xfer_bytes.observe(pulled.wire_bytes)
        metrics.descriptors.observe(pulled.chunks)
        metrics.external_queries.inc(tokens)
        metrics.external_hits.inc(tokens)

    def _release(self, remote: RemoteBlocks) -> None:
        task = asyncio.create_task(self._tell_released(remote))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tell_released(self, remote: RemoteBlocks) -> None:
        try:
            await self._puller.release(remote)
        except TransferError as error:
            log.warning("KV stays at the prefill worker until its lease ends: %s", error)
            self._metrics.failed_notifications.inc()
