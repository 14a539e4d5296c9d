"""The supervisor of `--data-parallel-multi-port-external-lb`: the health of all local servers on a port of its own."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from prfaas.worker.engine import Engine

PATHS = ("/health", "/ready", "/readyz")


def application(engines: Sequence[Engine]) -> web.Application:
    """200 while every engine lives, 503 from the first that died; no bodies."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=503 if any(engine.dead.is_set() for engine in engines) else 200)

    app = web.Application()
    for path in PATHS:
        app.router.add_get(path, health, allow_head=False)
    return app
