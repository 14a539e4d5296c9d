"""NIXL push: both legs at the same time, and the prefill worker writes when its prefill is done.

The decode worker, once it has blocks, registers with the prefill worker under its own internal id; the two belong
together when they are equal up to the eight hex digits at their ends, so both legs need the same X-Request-Id. A decode
worker that is never written to waits until its request is aborted, as vLLM's does. Heartbeats are not sent: a lease is
its duration long, whatever the decode worker's queue (vllm #53095).
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from prfaas.worker.config import KVTransfer
from prfaas.worker.generation import Generation
from prfaas.worker.kv.connector import Services
from prfaas.worker.kv.lanes import Incoming, Outgoing, all_of, lanes_for, started
from prfaas.worker.kv.leases import Lease, LeaseError
from prfaas.worker.kv.nixl import Nixl
from prfaas.worker.kv.params import RemoteWriter, pushed_params
from prfaas.worker.kv.payload import PayloadError
from prfaas.worker.kv.peers import HANDSHAKE_SECONDS, Peer, TransferError
from prfaas.worker.kv.wire import Connection, Kind, WireError, connect, parse, within

log = logging.getLogger(__name__)
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


@dataclass(frozen=True)
class Registration:
    """Where a decode worker wants a cache to be written."""

    request_id: str
    peer: Peer
    deadline: float


@dataclass(frozen=True)
class Awaited:
    """A cache that is to be written here."""

    tokens: int
    arrived: asyncio.Future[bytes]


class NixlPush(Nixl):
    """NixlPushConnector."""

    def __init__(self, services: Services, transfer: KVTransfer) -> None:
        super().__init__(services, transfer)
        self._registered: dict[str, Registration] = {}
        """By the request's name, see `_name`: decode workers whose prefill has not ended here."""
        self._waiting: dict[str, Lease] = {}
        """By the request's name: prefills that ended before their decode worker registered."""
        self._writes: dict[str, asyncio.Task[None]] = {}
        """By the decode worker's request id."""
        self._awaited: dict[str, Awaited] = {}
        """By this engine's request id."""
        self._watch_seconds = transfer.push_registration_seconds / services.config.time_scale

    def _name(self, request_id: str) -> str:
        """What the internal ids of both legs have in common: all, where they have no random end."""
        random = self.services.config.front.random_request_ids
        return _SUFFIX.sub("", request_id) if random else request_id

    async def start(self) -> None:
        """Listen: on one side for registrations, on the other for writes."""
        self.port = await self._server.start(self.transfer.host, self.transfer.port)

    def abandon(self, generation: Generation) -> None:
        """See Connector."""
        request_id, fetch = generation.sequence.request_id, generation.fetch
        waits = fetch is not None and not fetch.done()
        super().abandon(generation)
        if waits and request_id in self._awaited and isinstance(generation.remote, RemoteWriter):
            self.in_background(self.notify(partial(self._withdraw, request_id, generation.remote)))

    def grant(self, generation: Generation, now: float) -> None:
        """See Connector."""
        remote = self.granted(generation)
        lease = self.lease(generation, remote.request_id, now)
        generation.kv_params = pushed_params(remote)
        name = self._name(remote.request_id)
        self._waiting[name] = lease
        self._match(name)

    def expire(self, now: float) -> None:
        """See Connector."""
        super().expire(now)
        for name in [name for name, lease in self._waiting.items() if lease.ended]:
            del self._waiting[name]
        for name in [name for name, each in self._registered.items() if each.deadline <= now]:
            log.warning("no prefill came for the registered request %s: dropped", self._registered.pop(name).request_id)

    def next_deadline(self) -> float | None:
        """See Connector."""
        deadlines = [each.deadline for each in self._registered.values()]
        lease = super().next_deadline()
        return min(deadlines if lease is None else [*deadlines, lease], default=None)

    # The decode worker.

    async def _fetch(self, generation: Generation) -> None:
        remote, request_id = generation.remote, generation.sequence.request_id
        assert isinstance(remote, RemoteWriter)
        await generation.may_transfer.wait()
        awaited = Awaited(
            self.sent_tokens(generation.sequence.prompt_tokens), asyncio.get_running_loop().create_future()
        )
        self._awaited[request_id] = awaited
        try:
            await self._register(request_id, remote, generation)
            self._watch(request_id)
            state = await awaited.arrived
        except TransferError as error:
            log.error("request %s: %s", request_id, error)
            if not error.counted:
                self.measured.failed_transfers.inc()
            self.services.owner.kv_failed(generation)
        else:
            self.services.owner.kv_arrived(generation, state)
        finally:
            self._awaited.pop(request_id, None)

    async def _register(self, request_id: str, remote: RemoteWriter, generation: Generation) -> None:
        await self._peers.shake(_peer(remote))
        await self.reader.tell(
            (remote.host, remote.port),
            remote.engine_id,
            Kind.REGISTER,
            request_id=request_id,
            decode_engine_id=self.transfer.engine_id,
            decode_host=self.transfer.host,
            decode_port=self.port,
            decode_tp_size=self.services.config.tensor_parallel_size,
            local_block_ids=[list(group) for group in self.shown_blocks(generation)],
            remote_engine_id=remote.engine_id,
            remote_host=remote.host,
            remote_port=remote.port,
            remote_tp_size=remote.tp_size,
            remote_pp_size=remote.pp_size,
        )

    def _watch(self, request_id: str) -> None:
        async def watch() -> None:
            clock = self.services.clock
            await clock.wait(asyncio.Event(), clock.now() + self._watch_seconds)
            if self._awaited.pop(request_id, None) is not None:
                log.warning(
                    "request %s was not written for %g s: not expected any more", request_id, self._watch_seconds
                )

        watching = self.in_background(watch())
        self._awaited[request_id].arrived.add_done_callback(lambda _: watching.cancel())

    async def _withdraw(self, request_id: str, remote: RemoteWriter) -> None:
        await self.reader.tell((remote.host, remote.port), remote.engine_id, Kind.RELEASE, request=request_id)

    def _remote(self, params: dict[str, Any], tokens: int) -> RemoteWriter:
        return RemoteWriter.from_params(params)

    async def _take_in(self, connection: Connection, fields: dict[str, Any]) -> None:
        """A prefill worker begins to write."""
        request_id = str(fields.get("request"))
        awaited = self._awaited.get(request_id)
        if awaited is None or awaited.arrived.done():
            raise LeaseError("unknown", f"request {request_id} waits for no KV")
        cache = self.cache(str(fields.get("engine")), request_id, awaited.tokens)
        before = connection.received
        try:
            token = started(
                await within(self.reader.stall_seconds, connection.expect(Kind.START)), cache.size, cache.tokens
            )
            incoming = Incoming(cache, self.reader.stall_seconds)
            self._server.transfers[token] = incoming
            try:
                connection.send_json(Kind.WELCOME)
                state = await incoming.receive(connection)
            finally:
                del self._server.transfers[token]
                received = incoming.received + connection.received - before
                self.wire_received.inc(received)
        except PayloadError as error:
            # The bytes are here and are not this request's: vLLM would answer with them.
            if not awaited.arrived.done():
                awaited.arrived.set_exception(TransferError(f"KV written by {fields.get('engine')}: {error}"))
            raise
        if not awaited.arrived.done():
            awaited.arrived.set_result(state)
        connection.send_json(Kind.RECEIVED, request=request_id)
        await connection.drain()

    # The prefill worker.

    async def _talk(self, connection: Connection) -> None:
        kind, body = await within(
            self.reader.stall_seconds, connection.expect_one_of(Kind.REGISTER, Kind.RELEASE, Kind.PUSH)
        )
        fields = parse(body)
        if kind is Kind.PUSH:
            await self._take_in(connection, fields)
        elif kind is Kind.REGISTER:
            self._note(fields)
        else:
            self._forget(str(fields.get("request")))
        await connection.close()

    def _note(self, fields: dict[str, Any]) -> None:
        try:
            peer = Peer(
                engine_id=str(fields["decode_engine_id"]),
                host=str(fields["decode_host"]),
                port=int(fields["decode_port"]),
                tp_size=int(fields["decode_tp_size"]),
            )
            request_id = str(fields["request_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"not a registration: {error}") from error
        deadline = self.services.clock.now() + self._watch_seconds
        self._registered[self._name(request_id)] = Registration(request_id, peer, deadline)
        self._match(self._name(request_id))
        self.services.owner.wake()

    def _forget(self, request_id: str) -> None:
        """A decode worker does not want its cache any more."""
        name = self._name(request_id)
        self._registered.pop(name, None)
        if (write := self._writes.get(request_id)) is not None:
            write.cancel()
        lease = self._waiting.pop(name, None)
        if lease is not None and self.leases.end(lease.request_id, "released"):
            self.services.owner.wake()

    def _match(self, name: str) -> None:
        lease, registration = self._waiting.get(name), self._registered.get(name)
        if lease is None or registration is None or lease.ended:
            return
        del self._waiting[name], self._registered[name]
        task = self.in_background(self._write(lease, registration))
        self._writes[registration.request_id] = task
        task.add_done_callback(lambda _: self._writes.pop(registration.request_id, None))

    async def _write(self, lease: Lease, registration: Registration) -> None:
        lease.pinned = True
        clock, how = self.services.clock, None
        try:
            await self._peers.shake(registration.peer)
            began = clock.now()
            wire_bytes, posted, chunks = await self._push(lease, registration, began)
            how = "used"
        except asyncio.CancelledError:
            how = "released"
            raise
        except (TransferError, WireError) as error:
            # The decode worker is not told, and waits; the blocks stay until the lease ends.
            log.error("KV of request %s could not be written: %s", lease.request_id, error)
            if not isinstance(error, TransferError):
                self.measured.failed_transfers.inc()
        else:
            self.count_transfer(posted - began, clock.now() - began, wire_bytes, chunks)
        finally:
            lease.pinned = False
            if how is not None:
                self.leases.end(lease.request_id, how)
            self.services.owner.wake()

    async def _push(self, lease: Lease, registration: Registration, began: float) -> tuple[int, float, int]:
        peer, patience = registration.peer, self.reader.stall_seconds
        outgoing = self.outgoing(lease, registration.request_id)
        size = outgoing.cache.size
        connection = await connect(peer.host, peer.port, HANDSHAKE_SECONDS)
        try:
            connection.send_json(Kind.OPEN, engine=peer.engine_id)
            connection.send_json(Kind.PUSH, request=registration.request_id, engine=self.transfer.engine_id)
            connection.send_json(Kind.START, bytes=size, token=outgoing.token)
            await within(patience, connection.expect(Kind.WELCOME))
            posted = self.services.clock.now()
            lanes = (self._lane(peer, outgoing) for _ in range(lanes_for(size, self.transfer.lanes) - 1))
            await all_of(outgoing.send(connection), *lanes)
            await within(patience, connection.expect(Kind.RECEIVED))
            return outgoing.sent, posted, outgoing.chunks
        finally:
            self.wire_sent.inc(outgoing.sent)
            connection.abort()

    async def _lane(self, peer: Peer, outgoing: Outgoing) -> None:
        try:
            connection = await connect(peer.host, peer.port, HANDSHAKE_SECONDS)
        except WireError:
            return  # the other lanes carry it all
        try:
            connection.send_json(Kind.LANE, token=outgoing.token)
            await outgoing.carry(connection, until_read=self.reader.stall_seconds)
        finally:
            connection.abort()


def _peer(remote: RemoteWriter) -> Peer:
    return Peer(remote.engine_id, remote.host, remote.port, remote.tp_size, remote.pp_size)
