"""Mooncake: both legs at the same time, under one `transfer_id` that the router made.

The decode worker finds the prefill worker through a bootstrap server and asks it for the cache; either may be first. No
lease is renewed and no hash compared: what one leg waits for the other is one long timeout. The prefill answers without
`kv_transfer_params`, and keeps its blocks only where it ended by length: one that ended early has lost them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

from prfaas.worker.config import KVTransfer
from prfaas.worker.generation import Generation
from prfaas.worker.kv.bootstrap import BootstrapError, BootstrapServer, Rank, find, register
from prfaas.worker.kv.connector import Networked, Services
from prfaas.worker.kv.leases import Lease, LeaseError
from prfaas.worker.kv.params import FatalParamsError, ParamsError, RemoteTransfer
from prfaas.worker.kv.payload import PayloadError
from prfaas.worker.kv.peers import TransferError
from prfaas.worker.kv.pull import Pulled
from prfaas.worker.kv.serve import Identity, KVServer
from prfaas.worker.kv.wire import Connection, Kind, WireError, parse, within

log = logging.getLogger(__name__)
_REMEMBERED = 4096
_ANSWER_SECONDS = 60
"""What a decode worker waits longer than the prefill worker does."""


class Mooncake(Networked):
    """MooncakeConnector."""

    def __init__(self, services: Services, transfer: KVTransfer) -> None:
        super().__init__(services, transfer, transfer.abort_seconds)
        config = services.config
        self._server = KVServer(Identity(transfer.engine_id, "", config.tensor_parallel_size), self._talk)
        self._bootstrap = BootstrapServer()
        self.bootstrap_port = transfer.bootstrap_port
        self._names: dict[str, str] = {}
        """Transfer ids of the prefills under way, by request id."""
        self._lost: OrderedDict[str, str] = OrderedDict()
        """Transfers that cannot be any more, and why."""
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Listen for readers and let them find this engine, where it prefills for others."""
        transfer = self.transfer
        if not transfer.produces:
            return
        self.port = await self._server.start(transfer.host, transfer.port)
        base = transfer.bootstrap_address
        if base is None and transfer.dp_rank > 0:
            base = f"{transfer.host}:{transfer.bootstrap_port}"
        if base is None:
            self.bootstrap_port = await self._bootstrap.start(transfer.host, transfer.bootstrap_port)
            base = f"{transfer.host}:{self.bootstrap_port}"
        ranks = self.services.config.tensor_parallel_size
        addr = f"tcp://{transfer.host}:{self.port}"
        rank = Rank(transfer.engine_id, transfer.dp_rank, ranks, addr)
        await register(f"http://{base}", transfer.bootstrap_seconds, rank)

    async def stop(self) -> None:
        """See Connector."""
        await self._server.stop()
        await self._bootstrap.stop()
        await super().stop()

    def choose(self, generation: Generation, params: dict[str, Any] | None) -> None:
        """See Connector."""
        sequence = generation.sequence
        if params and params.get("do_remote_prefill"):
            if self.transfer.role == "kv_producer":
                raise FatalParamsError("do_remote_prefill sent to a kv_producer: the scheduler asserts that it is none")
            generation.remote = RemoteTransfer.from_params(params)
            sequence.kv_from_remote = generation.external = True
        elif params and params.get("do_remote_decode"):
            if self.transfer.role == "kv_consumer":
                raise FatalParamsError("do_remote_decode sent to a kv_consumer: the scheduler asserts that it is none")
            transfer_id = params.get("transfer_id")
            if not isinstance(transfer_id, str) or not transfer_id:
                log.warning("request %s: kv_transfer_params without transfer_id: KV is not kept", sequence.request_id)
                return
            self._names[sequence.request_id] = transfer_id
            self.keep(generation)

    def abandon(self, generation: Generation) -> None:
        """See Connector."""
        transfer_id = self._names.pop(generation.sequence.request_id, None)
        if transfer_id is not None:
            self._lose(transfer_id, "the prefill was aborted")
        waits = generation.fetch is not None and not generation.fetch.done()
        super().abandon(generation)
        if waits and isinstance(generation.remote, RemoteTransfer):
            self.in_background(self._tell_released(generation.remote))

    def refused(self, params: dict[str, Any] | None) -> None:
        """See Connector."""
        if not self.transfer.consumes or not params or not params.get("do_remote_prefill"):
            return
        try:
            remote = RemoteTransfer.from_params(params)
        except ParamsError as error:
            log.warning("refused request without usable KV parameters: %s", error)
            return
        if isinstance(remote, RemoteTransfer):
            self.in_background(self._tell_released(remote))

    def grant(self, generation: Generation, now: float) -> None:
        """See Connector."""
        sequence = generation.sequence
        transfer_id = self._names.pop(sequence.request_id)
        lease = self.lease(generation, transfer_id, now)
        if generation.end_reason != "length":
            log.warning("request %s ended by %s: KV is not kept", sequence.request_id, generation.end_reason)
            self._lost[transfer_id] = "the prefill did not end by length"
        if transfer_id in self._lost:
            self.leases.end(lease.request_id, "released")
        self._wake()

    # The decode worker.

    async def _fetch(self, generation: Generation) -> None:
        remote, request_id = generation.remote, generation.sequence.request_id
        assert isinstance(remote, RemoteTransfer)
        await generation.may_transfer.wait()
        try:
            pulled = await self._read(remote, self.sent_tokens(generation.sequence.prompt_tokens))
        except TransferError as error:
            log.error("request %s: %s", request_id, error)
            self.measured.failed_receives.inc()
            self.services.owner.kv_failed(generation)
        else:
            self.services.owner.kv_arrived(generation, pulled.state)

    async def _read(self, remote: RemoteTransfer, tokens: int) -> Pulled:
        address = await self._find(remote)
        cache = self.cache(remote.engine_id, remote.transfer_id, tokens)
        patience = (self.transfer.abort_seconds + _ANSWER_SECONDS) / self.services.config.time_scale
        connection = await self.reader.open(address, remote.engine_id)
        try:
            connection.send_json(Kind.WANT, transfer=remote.transfer_id, tokens=tokens)
            pulled = await self.reader.read(connection, cache, address, max(patience, self.reader.stall_seconds))
            connection.send_json(Kind.DONE, transfer=remote.transfer_id)
            await within(self.reader.connect_seconds, connection.close())
            return pulled
        except (WireError, PayloadError) as error:
            raise TransferError(f"KV of transfer {remote.transfer_id}: {error}") from error
        finally:
            connection.abort()
            self.reader.count(connection)

    async def _find(self, remote: RemoteTransfer) -> tuple[str, int]:
        try:
            return await find(remote.bootstrap, self.transfer.bootstrap_seconds, remote.engine_id)
        except BootstrapError as error:
            raise TransferError(str(error)) from error

    async def _tell_released(self, remote: RemoteTransfer) -> None:
        try:
            address = await self._find(remote)
            await self.reader.tell(address, remote.engine_id, Kind.RELEASE, transfer=remote.transfer_id)
        except TransferError as error:
            log.warning("KV stays at the prefill worker until its time is over: %s", error)

    # The prefill worker.

    async def _talk(self, connection: Connection) -> None:
        kind, body = await within(self.reader.stall_seconds, connection.expect_one_of(Kind.WANT, Kind.RELEASE))
        fields = parse(body)
        transfer_id = str(fields.get("transfer"))
        if kind is Kind.RELEASE:
            self._lose(transfer_id, "the decode worker gave up")
            return
        gone = asyncio.create_task(connection.receive())
        try:
            lease = await self._prefilled(transfer_id, fields.get("tokens"), gone)
            await self._send(connection, lease, gone)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _prefilled(self, transfer_id: str, tokens: object, gone: asyncio.Task[Any]) -> Lease:
        """The cache, when its prefill has ended; LeaseError if it will not be, WireError if its reader is gone."""
        clock = self.services.clock
        deadline = clock.now() + self.leases.duration
        while not self.leases.has(transfer_id):
            if transfer_id in self._lost:
                raise LeaseError("lost", f"transfer {transfer_id}: {self._lost[transfer_id]}")
            if self.leases.ending(transfer_id) is not None:
                break
            changed = asyncio.create_task(clock.wait(self._changed, deadline))
            await asyncio.wait((changed, gone), return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if gone.done():
                self._lose(transfer_id, "the decode worker gave up")
                raise WireError(f"the reader of transfer {transfer_id} is gone")
            if clock.now() >= deadline:
                raise LeaseError("late", f"no prefill of transfer {transfer_id} ended in time")
        return self.leases.take(transfer_id, "", tokens, clock.now())

    async def _send(self, connection: Connection, lease: Lease, reply: asyncio.Task[Any]) -> None:
        lease.pinned = True
        clock, outgoing = self.services.clock, self.outgoing(lease, lease.request_id)
        began = clock.now()
        try:
            await self.send_on_request(connection, self._server, outgoing)
            frame = await within(self.reader.stall_seconds, reply)
            if frame is None or frame[0] is not Kind.DONE:
                raise WireError(f"the reader of transfer {lease.request_id} did not take it")
        except WireError:
            self.measured.failed_transfers.inc()
            raise
        else:
            self.count_transfer(0, clock.now() - began, outgoing.sent, outgoing.chunks)
        finally:
            self.leases.end(lease.request_id, "used")
            self.services.owner.wake()

    def _lose(self, transfer_id: str, why: str) -> None:
        """Nobody gets this cache any more."""
        if self.leases.end(transfer_id, "released"):
            self.services.owner.wake()
        elif self.leases.ending(transfer_id) is None:
            self._lost[transfer_id] = why
            if len(self._lost) > _REMEMBERED:
                self._lost.popitem(last=False)
        self._wake()

    def _wake(self) -> None:
        """Let everybody who waits for a prefill look again."""
        self._changed.set()
        self._changed = asyncio.Event()
