"""One router process: the picker's gRPC server, the admin server, and the endpoint list for Envoy, put together.

Endpoints and policy come from where the caller says: Kubernetes in a pod (`kubernetes_source`), memory in a test.
"""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc.aio
from aiohttp import web
from envoy.service.accesslog.v3 import als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from prfaas.api import labels, router_pod
from prfaas.api.policy import RoutingPolicy
from prfaas.router import eds
from prfaas.router.accesslog import AccessLog
from prfaas.router.admin import Admin, ReviewToken
from prfaas.router.bootstrap import BODY_SLACK
from prfaas.router.endpoints import EndpointSource
from prfaas.router.extproc import ExternalProcessor
from prfaas.router.ledger import Ledger
from prfaas.router.metrics import Metrics
from prfaas.router.picker import Picker
from prfaas.router.policies import PolicyStore
from prfaas.router.prefill import LegTimes, PrefillClient
from prfaas.routing.world import Endpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How one router process runs. Seconds and bytes."""

    run_dir: Path = Path(router_pod.RUN_DIR)
    admin_host: str = "0.0.0.0"
    admin_port: int = labels.PORT_ROUTER_ADMIN
    policy_writers: frozenset[str] = frozenset()
    max_body_bytes: int = router_pod.DEFAULT_MAX_BODY_BYTES
    leg: LegTimes = field(default_factory=LegTimes)
    grace_s: float = 5.0
    """What running prefill legs get when the process is told to end."""


class RouterProcess:
    """Runs while its context is open."""

    def __init__(self, settings: Settings, source: EndpointSource, policies: PolicyStore, review: ReviewToken) -> None:
        self._settings, self._source, self._policies = settings, source, policies
        self.ledger = Ledger(now=time.monotonic)
        self.metrics = Metrics(self.ledger, lambda: source.pools)
        self.admin = Admin(
            policies,
            self.metrics,
            self.ledger,
            lambda: source.synced,
            review,
            settings.policy_writers,
            settings.run_dir / "envoy-admin.sock",
        )
        self.admin_port = settings.admin_port
        """The port in use; differs from the setting when that is 0."""
        self._listed: tuple[Endpoint, ...] | None = None
        """What Envoy's list holds, as far as this process wrote it."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()  # a gRPC server left running would keep the process from ending
            raise
        return self

    async def _start(self) -> None:
        settings = self._settings
        legs = await self._stack.enter_async_context(PrefillClient(settings.leg))
        picker = Picker(
            self._policies, lambda: self._source.pools, lambda: self._source.synced, self.ledger, legs, self.metrics
        )
        self._source.on_change(self._endpoints_changed)
        self._policies.on_change = self._policy_changed
        if self._policies.current is not None:
            self._policy_changed(self._policies.current)
        self._endpoints_changed()
        await self._start_grpc(picker)
        runner = web.AppRunner(self.admin.application(), access_log=None, handle_signals=False)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, settings.admin_host, settings.admin_port)
        await site.start()
        self.admin_port = runner.addresses[0][1]
        log.info("router is up: admin port %d, sockets in %s", self.admin_port, settings.run_dir)

    async def __aexit__(self, *_: object) -> None:
        self.admin.stopping = True
        await self._stack.aclose()

    async def _start_grpc(self, picker: Picker) -> None:
        settings = self._settings
        limit = settings.max_body_bytes + BODY_SLACK
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
            ]
        )
        # Both legs of one request, and a margin for what is between them.
        processor = ExternalProcessor(picker, 2 * (settings.leg.total + settings.leg.connect) + 10)
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(processor, server)
        access_log = AccessLog(self.ledger, self.metrics)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(access_log, server)
        path = settings.run_dir / "picker.sock"
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        # Left by a process that was killed; nobody else uses the directory.
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._stack.push_async_callback(server.stop, settings.grace_s)
        self._stack.callback(access_log.stop)

    def _endpoints_changed(self) -> None:
        if not self._source.synced:
            return  # an Envoy that runs keeps the list of the picker before us
        pools = self._source.pools
        if pools.decode != self._listed:
            eds.write(self._settings.run_dir, pools.decode)
            self._listed = pools.decode
        listed = [*pools.prefill, *pools.decode, *(endpoint for found in pools.remote.values() for endpoint in found)]
        self.ledger.retain(endpoint.address for endpoint in listed)

    def _policy_changed(self, policy: RoutingPolicy) -> None:
        self.metrics.policy(policy)
        log.info("policy in force: epoch %d, version %d, hash %s", policy.epoch, policy.version, policy.hash)
