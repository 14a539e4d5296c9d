"""Liveness, readiness and metrics over HTTP, for as long as the process lives, leading or not.

`/livez` fails when a reconcile hangs: only a restart helps then. (Events that no longer arrive are for those who watch:
a silent watch is opened anew.) `/readyz` says whether the process does its part: it leads and has queued the objects
that it could list at its start, or it waits for the Lease and the API server answered the last look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prfaas.kube.resources import Key

RECONCILE_LIMIT_SECONDS = 300.0
"""No reconcile takes this long: each of its requests is bounded. One that does hangs."""


class Metrics:
    """What the operator counts. Names are API."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "prfaas_reconciles",
            "Reconciles by kind and outcome (ok, error).",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "prfaas_reconcile_seconds",
            "Time of one reconcile, in seconds.",
            ["kind"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=self.registry,
        )
        self.queue_depth = Gauge("prfaas_queue_depth", "Objects that are due and wait.", registry=self.registry)
        self.leader = Gauge("prfaas_leader", "1 while this process acts, else 0.", registry=self.registry)
        self.epoch = Gauge(
            "prfaas_leader_epoch", "Epoch of this process's leadership; 0: none.", registry=self.registry
        )

        self.credentials = Gauge(
            "prfaas_link_credentials_expiry_timestamp_seconds",
            "When the token of a link's kubeconfig ends, in seconds since 1970.",
            ["namespace", "link"],
            registry=self.registry,
        )

    def set_credentials(self, ends: Mapping[Key, datetime]) -> None:
        """Shows when each link's credentials end, and nothing of links that are not among them."""
        self.credentials.clear()
        for link, end in ends.items():
            self.credentials.labels(link.namespace, link.name).set(end.timestamp())

    def render(self) -> bytes:
        """The metrics in Prometheus' text form."""
        return generate_latest(self.registry)


@dataclass
class Health:
    """What the probes ask. Times are seconds of the event loop's clock."""

    clock: Callable[[], float]
    leading: bool = False
    synced: bool = False
    """While leading: the objects that could be listed have been put into the queue."""
    contact: float | None = None
    """When the API server last answered the candidate."""
    working: dict[str, float] = field(default_factory=dict)
    """What is being reconciled, and since when."""

    def alive(self) -> str | None:
        """None, or why a restart is needed."""
        for name, since in self.working.items():
            if self.clock() - since > RECONCILE_LIMIT_SECONDS:
                return f"the reconcile of {name} hangs"
        return None

    def ready(self, patience: float = 60.0) -> str | None:
        """None, or why the process does not do its part."""
        if self.leading:
            return None if self.synced else "leading, and still reading what there is"
        if self.contact is None or self.clock() - self.contact > patience:
            return "the API server does not answer"
        return None


async def serve(health: Health, metrics: Metrics, port: int) -> web.AppRunner:
    """Starts the server; the caller cleans the runner up. Raises OSError when the port is taken."""

    async def livez(_: web.Request) -> web.Response:
        return _answer(health.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(health.ready())

    async def text(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", text)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    return runner


def _answer(problem: str | None) -> web.Response:
    return web.Response(text=problem or "ok", status=200 if problem is None else 503)
