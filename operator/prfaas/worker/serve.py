"""One worker process: start the engine, then listen, then drain on SIGTERM as vLLM does.

Nothing listens before the model is "loaded"; `/health` is 200 until the process ends, also while it drains.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from prfaas.worker import supervisor
from prfaas.worker.clock import Clock, MonotonicClock
from prfaas.worker.config import WorkerConfig
from prfaas.worker.engine import Engine
from prfaas.worker.faulty import FaultyServer
from prfaas.worker.http import Api
from prfaas.worker.tls import keep_fresh, server_context

log = logging.getLogger(__name__)

WATCHDOG_SECONDS = 5.0
"""How often vLLM looks whether its engine is dead; modelled seconds."""
DEAD_STATUS = 1
"""Exit status after an engine's death."""


class Worker:
    """An engine behind its HTTP server."""

    def __init__(self, config: WorkerConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.engine = Engine(config, clock or MonotonicClock())
        self._faulty = None if config.faults is None else FaultyServer(self.engine, os._exit)
        self._runner: web.AppRunner | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self.port = config.port

    async def start(self) -> None:
        """Load, then listen. With port 0 in the configuration, `port` says which one it became.

        OSError for an address or a certificate that cannot be used.
        """
        front = self.config.front
        tls = server_context(front.tls) if front.tls is not None else None
        if self._faulty is not None:
            await self._faulty.loading()
        await self.engine.start()
        application = Api(self.engine).application()
        if self._faulty is not None:
            self._faulty.install(application)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self.config.keep_alive_seconds,
            shutdown_timeout=1,
            max_line_size=front.max_header_bytes,
            max_field_size=front.max_header_bytes,
        )
        await self._runner.setup()
        await self._site(self._runner, tls).start()
        if front.uds is None:
            self.port = self._runner.addresses[0][1]
        if tls is not None and front.tls is not None and front.tls.refresh:
            self._refreshing = asyncio.create_task(keep_fresh(front.tls, tls))

    def _site(self, runner: web.AppRunner, tls: ssl.SSLContext | None) -> web.BaseSite:
        if self.config.front.uds is not None:
            return web.UnixSite(runner, self.config.front.uds, backlog=1024, ssl_context=tls)
        return web.TCPSite(runner, self.config.host, self.config.port, backlog=1024, ssl_context=tls)

    async def shutdown(self) -> None:
        """Drain for `--shutdown-timeout`, then end what is left with `abort`, answered before the sockets close."""
        if self._faulty is not None:
            self._faulty.stop()
        await self.engine.drain(self.config.shutdown_timeout)
        if self._refreshing is not None:
            self._refreshing.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.engine.stop()


async def run(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT; a second signal changes nothing. The exit status."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    workers = [Worker(each) for each in by_rank(config)]
    _introduce(config)
    ended = asyncio.create_task(ending.wait())
    if config.front.headless:
        log.info("headless: a further node of an instance serves nothing")
        await ended
        return 0
    starting = asyncio.gather(*(worker.start() for worker in workers))
    await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    health: web.AppRunner | None = None
    try:
        await starting
        health = await _supervise(config, workers)
        log.info("serving on port %s", ", ".join(str(worker.port) for worker in workers))
        over = [asyncio.create_task(_engine_over(worker)) for worker in workers]
        await asyncio.wait((ended, *over), return_when=asyncio.FIRST_COMPLETED)
        if any(each.done() for each in over):
            log.critical("the engine is dead: the server ends")
            return DEAD_STATUS
        for each in over:
            each.cancel()
        log.info("draining for up to %d s", config.shutdown_timeout)
    finally:
        ended.cancel()
        await asyncio.gather(*(worker.shutdown() for worker in workers))
        if health is not None:
            await health.cleanup()
    return 0


def by_rank(config: WorkerConfig) -> list[WorkerConfig]:
    """One server per local data parallel rank: `--data-parallel-multi-port-external-lb`; else the one there is."""
    ranks, transfer = config.front.local_ranks, config.kv_transfer
    if ranks == 1:
        return [config]
    return [
        replace(
            config,
            port=config.port + rank,
            kv_transfer=None
            if transfer is None
            else replace(transfer, port=transfer.port + rank, engine_id=f"{transfer.engine_id}_dp{rank}", dp_rank=rank),
        )
        for rank in range(ranks)
    ]


async def _supervise(config: WorkerConfig, workers: Sequence[Worker]) -> web.AppRunner | None:
    if config.front.supervisor_port is None:
        return None
    runner = web.AppRunner(supervisor.application([worker.engine for worker in workers]), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, config.host, config.front.supervisor_port).start()
    return runner


def _introduce(config: WorkerConfig) -> None:
    profile, transfer = config.profile, config.kv_transfer
    log.info(
        "model %s, %d x %s (%s), time scale %g, KV byte scale %g, %s",
        config.model,
        profile.gpus,
        profile.accelerator,
        profile.source,
        config.time_scale,
        config.kv_byte_scale,
        f"{transfer.role} at {transfer.host}:{transfer.port}" if transfer else "no KV transfer",
    )


async def _engine_over(worker: Worker) -> None:
    """Return when vLLM's watchdog would have ended the server of a dead engine."""
    await worker.engine.dead.wait()
    if worker.config.front.keep_alive_on_death:
        await asyncio.Event().wait()
    await asyncio.sleep(WATCHDOG_SECONDS / worker.config.time_scale)
