"""What NIXL's two connectors share: handshakes, which side may ask for what, and what the router is told of a cache."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prfaas.worker.config import KVTransfer
from prfaas.worker.generation import Generation
from prfaas.worker.kv.connector import Networked, Services
from prfaas.worker.kv.params import Nowhere, ParamsError, RemoteBlocks, RemoteWriter
from prfaas.worker.kv.peers import Peers, TransferError
from prfaas.worker.kv.serve import Identity, KVServer
from prfaas.worker.kv.wire import Connection

log = logging.getLogger(__name__)


class Nixl(Networked):
    """A NIXL connector; who moves the bytes, and when, is its subclass's."""

    def __init__(self, services: Services, transfer: KVTransfer) -> None:
        super().__init__(services, transfer, transfer.lease_seconds)
        config = services.config
        self._peers = Peers(
            compatibility=config.compatibility,
            enforced=transfer.enforce_compatibility,
            count_failed=self.measured.failed_transfers.inc,
            clock=services.clock,
            idle_seconds=transfer.engine_ttl / config.time_scale,
        )
        self._server = KVServer(
            Identity(transfer.engine_id, config.compatibility, config.tensor_parallel_size), self._talk
        )
        self.port = transfer.port

    async def stop(self) -> None:
        """See Connector."""
        await self._server.stop()
        self._peers.stop()
        await super().stop()

    def choose(self, generation: Generation, params: dict[str, Any] | None) -> None:
        """See Connector."""
        sequence = generation.sequence
        if params and params.get("do_remote_prefill"):
            if not self.transfer.consumes:
                raise ParamsError("do_remote_prefill sent to a kv_producer")
            generation.remote = self._remote(params, self.sent_tokens(sequence.prompt_tokens))
            sequence.kv_from_remote = generation.external = True
        elif params and params.get("do_remote_decode"):
            if not self.transfer.produces:
                raise ParamsError("do_remote_decode sent to a kv_consumer")
            self.keep(generation)

    def granted(self, generation: Generation) -> RemoteBlocks:
        """Where the cache of a prefill that ended lies; asked before its lease takes the blocks over."""
        sequence = generation.sequence
        return RemoteBlocks(
            engine_id=self.transfer.engine_id,
            request_id=sequence.request_id,
            host=self.transfer.host,
            port=self.port,
            tokens=self.sent_tokens(sequence.prompt_tokens),
            block_ids=self.shown_blocks(generation),
            tp_size=self.services.config.tensor_parallel_size,
            cached_tokens=sequence.local_hit if sequence.generated == 1 else None,
        )

    async def notify(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Tell a prefill worker that its cache is not wanted; where that fails, only its lease frees it."""
        try:
            await tell()
        except TransferError as error:
            log.warning("KV stays at the prefill worker until its lease ends: %s", error)
            self.measured.failed_notifications.inc()

    def _remote(self, params: dict[str, Any], tokens: int) -> RemoteBlocks | RemoteWriter | Nowhere:
        """Where the cache of a prompt is or comes from; `tokens` are what must cross of it. ParamsError."""
        raise NotImplementedError

    async def _talk(self, connection: Connection) -> None:
        """Serve a peer."""
        raise NotImplementedError
