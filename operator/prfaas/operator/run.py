"""The operator's process: wait for the Lease, act while holding it, end when it is lost.

While waiting it answers its probes and nothing else. Leading starts everything at once (Kopf, workers, resync); the
first part that ends takes the rest with it, and the process. A lost Lease ends it with a status of its own, so that the
pod starts anew as a candidate.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import kopf

from prfaas.kube.client import KubeClient, Timeouts
from prfaas.kube.election import Elector, LeadershipLost
from prfaas.kube.errors import BadCredentials, KubeError, NotFound
from prfaas.kube.resources import LEADER_WORKER_SET, LEASE, Key
from prfaas.links.registry import PeerRegistry
from prfaas.operator import exchange, secrets
from prfaas.operator.config import Config
from prfaas.operator.handlers import register
from prfaas.operator.health import Health, Metrics, serve
from prfaas.operator.queue import WorkQueue
from prfaas.operator.routers import Routers
from prfaas.operator.settings import kopf_settings
from prfaas.operator.workers import look_at_everything, resync, work
from prfaas.operator.world import KINDS, World

log = logging.getLogger("prfaas.operator")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_LEASE_LOST = 3


class NotInstalled(Exception):  # noqa: N818  # it says what a person has to do
    """Something that must be there before the operator is not: CRDs, or rights."""


@dataclass(frozen=True)
class _Process:
    config: Config
    client: KubeClient
    health: Health
    metrics: Metrics

    async def lead(self, epoch: int) -> None:
        """Everything that only the leader does. Returns when told to stop."""
        self.metrics.leader.set(1)
        self.metrics.epoch.set(epoch)
        self.health.leading = True
        queue: WorkQueue[Key] = WorkQueue()
        routers = Routers(self.config.router_token)
        groups = await self._has_groups()
        try:
            async with PeerRegistry(self.client, queue.add) as peers, asyncio.TaskGroup() as tasks:
                world = World.create(
                    self.client,
                    self.config,
                    epoch,
                    now=lambda: datetime.now(UTC),
                    routers=routers,
                    peers=peers,
                    enqueue=queue.add,
                )
                background = [
                    tasks.create_task(work(queue, world, self.health, self.metrics)) for _ in range(self.config.workers)
                ]
                background.append(tasks.create_task(resync(queue, world, self.config.resync)))
                background.append(tasks.create_task(self._begin(queue, world)))
                secret_watch = secrets.watch(self.client, self.config.namespace, world.secrets, queue.add)
                background.append(tasks.create_task(secret_watch.run()))
                background.append(tasks.create_task(exchange.watch(world).run()))
                background.append(tasks.create_task(self._gauge(queue, peers)))
                await self._kopf(queue, groups)
                for task in background:
                    task.cancel()
        finally:
            await routers.close()

    async def _begin(self, queue: WorkQueue[Key], world: World) -> None:
        await look_at_everything(queue, world)
        self.health.synced = True

    async def _gauge(self, queue: WorkQueue[Key], peers: PeerRegistry) -> None:
        while True:
            self.metrics.queue_depth.set(queue.depth())
            self.metrics.set_credentials(peers.credentials())
            await asyncio.sleep(5.0)

    async def _kopf(self, queue: WorkQueue[Key], groups: bool) -> None:
        """Returns when Kopf was told to stop by a signal; raises when it ends by itself."""
        stop = asyncio.Event()
        operator = asyncio.ensure_future(
            kopf.operator(
                registry=register(queue.add, self.client, groups=groups),
                settings=kopf_settings(self.config.identity),
                # Without one Kopf asks for the name of the user, and a container's user has none.
                identity=cast("Any", self.config.identity),
                clusterwide=not self.config.namespaces,
                namespaces=self.config.namespaces,
                standalone=True,
                stop_flag=stop,
            )
        )
        try:
            await asyncio.shield(operator)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({operator}, timeout=10.0)
            raise

    async def _has_groups(self) -> bool:
        try:
            await self.client.list(LEADER_WORKER_SET, self.config.namespaces[0] if self.config.namespaces else None)
        except (NotFound, KubeError):
            return False
        return True


async def run(config: Config) -> int:
    """Runs until told to stop; returns the exit status."""
    loop = asyncio.get_running_loop()
    metrics, health = Metrics(), Health(loop.time)
    runner = await serve(health, metrics, config.port)
    try:
        async with _client(config) as client, _client(config, config.election.request_timeout) as lease_client:
            elector = Elector(lease_client, namespace=config.namespace, name=config.lease, identity=config.identity)
            client.write_gate = elector.require
            process = _Process(config, client, health, metrics)
            await check_installed(client, config)
            async with _contact(lease_client, config, health):
                await _until_signalled(elector.run(process.lead))
    except NotInstalled as error:
        log.error("%s", error)
        return EXIT_FAILED
    except BadCredentials as error:
        log.error("%s", error)
        return EXIT_FAILED
    except LeadershipLost as error:
        log.error("leadership lost: %s", error)
        return EXIT_LEASE_LOST
    except BaseExceptionGroup as group:
        lost = group.subgroup(LeadershipLost)
        log.error("stopped: %s", causes(group), exc_info=group)
        return EXIT_FAILED if lost is None else EXIT_LEASE_LOST
    finally:
        await runner.cleanup()
    return EXIT_OK


def causes(error: BaseException) -> str:
    """What is at the bottom of a group of errors, in one line."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(causes, error.exceptions)))
    return " ".join(f"{type(error).__name__}: {error}".split())


async def _until_signalled(work_to_do: Awaitable[None]) -> None:
    """Awaits; SIGTERM and SIGINT cancel it, which is a good end. (While leading, Kopf takes the signals.)"""
    task = asyncio.ensure_future(work_to_do)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("told to stop")


async def check_installed(client: KubeClient, config: Config) -> None:
    """Our CRDs must be there, and readable. An API server that does not answer is waited for."""
    for resource in KINDS.values():
        for namespace in config.namespaces or (None,):
            waiting = False
            while True:
                try:
                    await client.list(resource, namespace)
                    break
                except NotFound:
                    text = f"the API server does not know {resource.plural}.{resource.group}: install chart prfaas-crds"
                    raise NotInstalled(text) from None
                except KubeError as error:
                    if error.code in (401, 403):
                        raise NotInstalled(f"the operator's rights do not suffice: {error}") from error
                    if not waiting:
                        log.warning("waiting for the API server: %s", error)
                    waiting = True
                    await asyncio.sleep(2.0)


@asynccontextmanager
async def _client(config: Config, call: float = 20.0) -> AsyncIterator[KubeClient]:
    timeouts = Timeouts(connect=min(5.0, call), call=call)
    if config.kubeconfig is None:
        client = KubeClient.in_cluster(timeouts=timeouts)
    else:
        client = await KubeClient.from_kubeconfig_file(config.kubeconfig, timeouts=timeouts)
    async with client:
        yield client


@asynccontextmanager
async def _contact(client: KubeClient, config: Config, health: Health) -> AsyncIterator[None]:
    """While in this block, what readiness says of a candidate is kept up to date."""

    async def look() -> None:
        while True:
            try:
                await client.get(LEASE, config.lease, config.namespace)
                health.contact = health.clock()
            except NotFound:
                health.contact = health.clock()
            except KubeError:
                pass
            await asyncio.sleep(10.0)

    task = asyncio.ensure_future(look())
    try:
        yield
    finally:
        task.cancel()
