"""One worker process: start the engine, then listen, then drain on SIGTERM as vLLM does.

Nothing listens before the model is "loaded"; `/health` is 200 until the process ends, also while it drains.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from aiohttp import web

from prfaas.worker.clock import Clock, MonotonicClock
from prfaas.worker.config import WorkerConfig
from prfaas.worker.engine import Engine
from prfaas.worker.http import Api

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
        self._runner: web.AppRunner | None = None
        self.port = config.port

    async def start(self) -> None:
        """Load, then listen. With port 0 in the configuration, `port` says which one it became."""
        await self.engine.start()
        self._runner = web.AppRunner(
            Api(self.engine).application(),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self.config.keep_alive_seconds,
            shutdown_timeout=1,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.config.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def shutdown(self) -> None:
        """Drain for `--shutdown-timeout`, then end what is left with `abort`, answered before the sockets close."""
        await self.engine.drain(self.config.shutdown_timeout)
        if self._runner is not None:
            await self._runner.cleanup()
        await self.engine.stop()


async def run(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT; a second signal changes nothing. The exit status."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    worker = Worker(config)
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
    starting = asyncio.create_task(worker.start())
    ended = asyncio.create_task(ending.wait())
    await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    try:
        await starting
        log.info("serving on port %d", worker.port)
        over = asyncio.create_task(_engine_over(worker))
        await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            log.critical("the engine is dead: the server ends")
            return DEAD_STATUS
        over.cancel()
        log.info("draining for up to %d s", config.shutdown_timeout)
    finally:
        ended.cancel()
        await worker.shutdown()
    return 0


async def _engine_over(worker: Worker) -> None:
    """Return when vLLM's watchdog would have ended the server of a dead engine."""
    await worker.engine.dead.wait()
    if worker.config.front.keep_alive_on_death:
        await asyncio.Event().wait()
    await asyncio.sleep(WATCHDOG_SECONDS / worker.config.time_scale)
