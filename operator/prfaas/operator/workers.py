"""The workers: take a key, reconcile its object, and say how it went. One failure never ends another object's turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from prfaas.kube.election import LeadershipLost
from prfaas.kube.errors import KubeError, NamespaceTerminating
from prfaas.kube.resources import Key
from prfaas.operator import exchange, inter_cluster_link, pd_cluster, prfaas_cluster
from prfaas.operator.health import Health, Metrics
from prfaas.operator.queue import WorkQueue
from prfaas.operator.world import KINDS, Result, World

log = logging.getLogger("prfaas.operator")

Reconcile = Callable[[World, Key], Awaitable[Result]]
RECONCILES: Mapping[str, Reconcile] = {
    "PrfaaSCluster": prfaas_cluster.reconcile,
    "PDCluster": pd_cluster.reconcile,
    "InterClusterLink": inter_cluster_link.reconcile,
}


async def work(
    queue: WorkQueue[Key],
    world: World,
    health: Health,
    metrics: Metrics,
    reconciles: Mapping[str, Reconcile] = RECONCILES,
) -> None:
    """Works for ever. Raises LeadershipLost when a write is refused since we no longer lead."""
    loop = asyncio.get_running_loop()
    while True:
        key = await queue.take()
        started = loop.time()
        health.working[str(key)] = started
        try:
            result = await reconciles[key.kind](world, key)
        except LeadershipLost:
            raise
        except KubeError as error:
            _retry(queue, key, error, error.retry_after or 0.0)
            metrics.reconciles.labels(key.kind, "error").inc()
        except Exception:
            # A bug that one object brings to light must not stop the others.
            log.exception("bug in a reconcile", extra=_names(key))
            queue.failed(key)
            metrics.reconciles.labels(key.kind, "error").inc()
        else:
            queue.done(key)
            if result.again_after is not None:
                queue.add_after(key, result.again_after)
            metrics.reconciles.labels(key.kind, "ok").inc()
        finally:
            del health.working[str(key)]
            metrics.seconds.labels(key.kind).observe(loop.time() - started)


async def resync(queue: WorkQueue[Key], world: World, period: float) -> None:
    """Puts every object of ours into the queue each `period` seconds, so that a lost event does not matter."""
    while True:
        await asyncio.sleep(period)
        await look_at_everything(queue, world)


async def look_at_everything(queue: WorkQueue[Key], world: World) -> None:
    """Puts every object of ours into the queue, and sweeps what deleted ones have left in the exchange."""
    for key in await everything(world):
        queue.add(key)
    try:
        await exchange.sweep(world)
    except KubeError as error:
        log.warning("exchange not swept: %s", error)


async def everything(world: World) -> list[Key]:
    """Keys of all objects of ours. Those of a kind or namespace that cannot be listed now are left out."""
    found = []
    for resource in KINDS.values():
        for namespace in world.config.namespaces or (None,):
            try:
                items = (await world.client.list(resource, namespace)).items
            except KubeError as error:
                log.warning("cannot list: %s", error)
                continue
            for item in items:
                metadata = item["metadata"]
                found.append(Key(resource.api_version, resource.kind, metadata["namespace"], metadata["name"]))
    return found


def _retry(queue: WorkQueue[Key], key: Key, error: KubeError, at_least: float) -> None:
    wait = queue.failed(key, at_least)
    # Conflicts and dying namespaces are the normal course of things.
    level = logging.DEBUG if isinstance(error, NamespaceTerminating) or error.code == 409 else logging.WARNING
    log.log(level, "not reconciled: %s", error, extra={**_names(key), "retry_seconds": round(wait, 1)})


def _names(key: Key) -> dict[str, str]:
    return {"kind": key.kind, "namespace": key.namespace, "object": key.name}
