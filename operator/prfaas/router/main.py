"""A router process in a pod: Kubernetes as the source of endpoints and policy, SIGTERM as the end."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

from prfaas.kube.client import KubeClient
from prfaas.router.kubernetes_source import KubernetesSource, PolicyWatch, review_token
from prfaas.router.policies import PolicyStore
from prfaas.router.serve import RouterProcess, Settings


async def serve(settings: Settings, namespace: str, cluster: str, kubeconfig: Path | None = None) -> None:
    """Run until SIGTERM or SIGINT. Raises BadCredentials at once when there is no API server to ask."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = await KubeClient.from_kubeconfig_file(kubeconfig) if kubeconfig else KubeClient.in_cluster()
    async with client:
        source = KubernetesSource(client, namespace, cluster)
        policies = PolicyStore()
        process = RouterProcess(settings, source, policies, partial(review_token, client))
        watch = PolicyWatch(client, namespace, cluster, policies, process.metrics)
        async with process, asyncio.TaskGroup() as tasks:
            # A watch ends only by a bug, and its exception ends the process: a blind router must not go on.
            watches = [tasks.create_task(source.run()), tasks.create_task(watch.run())]
            await stop.wait()
            process.admin.stopping = True
            for task in watches:
                task.cancel()
