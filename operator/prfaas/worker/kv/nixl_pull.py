"""NIXL pull, vLLM's default: the prefill answers first, its blocks wait under a lease until a decode worker read them.

The one leg follows the other. The lease, its heartbeats, the fields and what goes wrong how are vLLM 0.33's.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from prfaas.worker.config import KVTransfer
from prfaas.worker.generation import Generation
from prfaas.worker.kv.connector import Services, reused
from prfaas.worker.kv.leases import Lease, LeaseError, heartbeat_seconds
from prfaas.worker.kv.nixl import Nixl
from prfaas.worker.kv.params import Nowhere, ParamsError, RemoteBlocks, blocks_digest
from prfaas.worker.kv.peers import TransferError
from prfaas.worker.kv.pull import Puller
from prfaas.worker.kv.serve import SILENCE_SECONDS
from prfaas.worker.kv.wire import Connection, Kind, WireError, parse, within

log = logging.getLogger(__name__)


class NixlPull(Nixl):
    """NixlConnector and NixlPullConnector."""

    def __init__(self, services: Services, transfer: KVTransfer) -> None:
        super().__init__(services, transfer)
        self._puller = Puller(
            reader=self.reader,
            peers=self._peers,
            heartbeat_seconds=heartbeat_seconds(transfer.lease_seconds) / services.config.time_scale,
            cache=self.cache,
            in_background=self.in_background,
            count_untold=self.measured.failed_notifications.inc,
        )

    async def start(self) -> None:
        """Listen for readers, where this engine prefills for others."""
        if self.transfer.produces:
            self.port = await self._server.start(self.transfer.host, self.transfer.port)

    def abandon(self, generation: Generation) -> None:
        """See Connector."""
        pulling = generation.fetch is not None and not generation.fetch.done()
        super().abandon(generation)
        if pulling and isinstance(generation.remote, RemoteBlocks):
            self.in_background(self.notify(partial(self._puller.release, generation.remote)))

    def refused(self, params: dict[str, Any] | None) -> None:
        """See Connector."""
        if not self.transfer.consumes or not params or not params.get("do_remote_prefill"):
            return
        try:
            remote = RemoteBlocks.from_params(params)
        except ParamsError as error:
            log.warning("refused request without usable KV parameters: %s", error)
            return
        if isinstance(remote, Nowhere):
            log.warning("refused request without kv_transfer_params.%s", remote.missing)
        else:
            self.in_background(self.notify(partial(self._puller.release, remote)))

    def grant(self, generation: Generation, now: float) -> None:
        """See Connector."""
        remote = self.granted(generation)
        self.lease(generation, remote.request_id, now, blocks_digest(remote.block_ids))
        generation.kv_params = remote.to_params()

    # The reading side.

    async def _fetch(self, generation: Generation) -> None:
        remote, owner = generation.remote, self.services.owner
        assert isinstance(remote, RemoteBlocks)
        tokens = self.sent_tokens(generation.sequence.prompt_tokens)
        try:
            pulled = await self._puller.pull(remote, tokens, generation.may_transfer)
        except TransferError as error:
            log.error("request %s: %s", generation.sequence.request_id, error)
            if not error.counted:
                self.measured.failed_transfers.inc()
            owner.kv_failed(generation)
        else:
            self.count_transfer(pulled.posted, pulled.seconds, pulled.wire_bytes, pulled.chunks)
            owner.kv_arrived(generation, pulled.state)

    def _remote(self, params: dict[str, Any], tokens: int) -> RemoteBlocks | Nowhere:
        remote = RemoteBlocks.from_params(params)
        if isinstance(remote, RemoteBlocks) and remote.tokens not in (None, tokens):
            raise ParamsError(f"KV of {remote.tokens} tokens for a prompt that needs {tokens}")
        return remote

    # The side that is read.

    async def _talk(self, connection: Connection) -> None:
        services, sending = self.services, None
        try:
            while (frame := await self._receive(connection)) is not None:
                kind, fields = frame[0], parse(frame[1])
                request_id = str(fields.get("request"))
                if kind is Kind.HEARTBEAT:
                    if self.leases.renew(request_id, services.clock.now()):
                        services.owner.wake()
                elif kind is Kind.PULL:
                    if sending is not None:
                        raise WireError("second PULL on one connection")
                    if fields.get("tp") != self._server.identity.tp_size:
                        raise LeaseError("mismatch", f"this engine has not {fields.get('tp')} tensor parallel ranks")
                    lease = self._take(request_id, fields.get("blocks"), fields.get("tokens"))
                    sending = asyncio.create_task(self._send(connection, lease))
                elif kind in (Kind.DONE, Kind.RELEASE):
                    self._end(request_id, "used" if kind is Kind.DONE else "released")
                    if kind is Kind.DONE:
                        connection.send_json(Kind.RECEIVED, request=request_id)
                else:
                    raise WireError(f"unexpected {kind.name}")
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _take(self, request_id: str, blocks: object, tokens: object) -> Lease:
        """The lease that a reader asks for; on request also one that is over, with what lies in its blocks now."""
        faults = self.services.faults
        try:
            return self.leases.take(request_id, blocks, tokens, self.services.clock.now())
        except LeaseError as error:
            stale = error.reason in ("used", "expired") and faults.current.stale_kv
            if not stale or not isinstance(tokens, int):
                raise
        faults.note("stale-kv")
        return Lease(request_id, reused(request_id.encode()), tokens, str(blocks), float("inf"), free=lambda: None)

    async def _receive(self, connection: Connection) -> tuple[Kind, bytes] | None:
        """The next frame; a reader that is gone without a word (a cut line) is dropped when its beats stay out."""
        return await within(max(self.leases.duration, SILENCE_SECONDS), connection.receive())

    async def _send(self, connection: Connection, lease: Lease) -> None:
        try:
            await self.send_on_request(connection, self._server, self.outgoing(lease, lease.request_id))
        except WireError as error:
            log.warning("transfer of request %s failed: %s", lease.request_id, error)
            connection.abort()

    def _end(self, request_id: str, how: str) -> None:
        if self.leases.end(request_id, how):
            self.services.owner.wake()
        elif how == "used" and self.leases.ending(request_id) is not None:
            log.error("request %s was read after its blocks had been freed", request_id)
            self.measured.after_expiry.inc()
