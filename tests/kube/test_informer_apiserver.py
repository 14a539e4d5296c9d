"""The informer through a real outage: a restarted API server, whose watch cache no longer knows our version."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from e2e.apiserver import ApiServer
from prfaas.kube.client import KubeClient
from prfaas.kube.election import ElectionTimes, Elector, LeadershipLost
from prfaas.kube.errors import Gone, Unreachable
from prfaas.kube.informer import Informer, WatchTimes
from prfaas.kube.resources import CONFIG_MAP, LEASE
from tests.kube.test_informer import until

pytestmark = pytest.mark.apiserver


async def test_the_copy_survives_a_restart_of_the_api_server(apiserver: ApiServer, namespace: str) -> None:
    def config_map(name: str) -> dict[str, object]:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}

    async with await KubeClient.from_kubeconfig_file(apiserver.kubeconfig) as client:
        informer = Informer(client, CONFIG_MAP, namespace=namespace, times=WatchTimes(longest_retry=1))
        task = asyncio.create_task(informer.run())
        start = (await client.list(CONFIG_MAP, namespace)).resource_version
        await client.create(config_map("before"))
        await until(lambda: (namespace, "before") in informer.items)
        await asyncio.to_thread(apiserver.stop)
        try:
            await until(lambda: isinstance(informer.error, Unreachable))
            assert (namespace, "before") in informer.items
        finally:
            apiserver.start()  # not in a thread: the server is tied to the life of the thread that starts it
        with pytest.raises(Gone):  # so the copy could heal only by a new list
            async with aclosing(client.watch(CONFIG_MAP, namespace, resource_version=start)) as events:
                await anext(events)
        await client.delete(CONFIG_MAP, "before", namespace)
        await client.create(config_map("after"))
        await until(lambda: set(informer.items) == {(namespace, "after")} and informer.error is None)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_two_electors_hand_over_on_a_real_lease(apiserver: ApiServer, namespace: str) -> None:
    times = ElectionTimes(lease_duration=15, renew_deadline=10, retry_period=0.1)
    epochs: list[tuple[str, int]] = []

    async with await KubeClient.from_kubeconfig_file(apiserver.kubeconfig) as client:

        def elector(who: str) -> Elector:
            return Elector(client, namespace=namespace, name="op", identity=who, times=times)

        first_leads = asyncio.Event()
        let_go = asyncio.Event()

        async def first(epoch: int) -> None:
            epochs.append(("a", epoch))
            first_leads.set()
            await let_go.wait()

        async def second(epoch: int) -> None:
            epochs.append(("b", epoch))

        a = asyncio.create_task(elector("a").run(first))
        await asyncio.wait_for(first_leads.wait(), 20)
        b = asyncio.create_task(elector("b").run(second))
        lease = Informer(client, LEASE, namespace=namespace)
        versions: set[str] = set()
        lease.on_change(lambda change: versions.add((change.new or {})["metadata"]["resourceVersion"]))
        watching = asyncio.create_task(lease.run())
        await until(lambda: len(versions) > 2)  # it renews
        watching.cancel()
        assert epochs == [("a", 1)]
        let_go.set()
        await asyncio.wait_for(asyncio.gather(a, b), 20)
        assert epochs == [("a", 1), ("b", 2)]
        assert (await client.get(LEASE, "op", namespace))["spec"]["holderIdentity"] == ""


async def test_a_leader_whose_api_server_hangs_ends_before_another_can_begin(
    apiserver: ApiServer, namespace: str
) -> None:
    times = ElectionTimes(lease_duration=8, renew_deadline=5, retry_period=0.3)
    loop = asyncio.get_running_loop()
    began: dict[str, float] = {}
    ended: dict[str, float] = {}

    async with await KubeClient.from_kubeconfig_file(apiserver.kubeconfig) as client:

        def elector(who: str) -> Elector:
            return Elector(client, namespace=namespace, name="op", identity=who, times=times)

        async def first(epoch: int) -> None:
            began["a"] = loop.time()
            try:
                await asyncio.Event().wait()
            finally:
                ended["a"] = loop.time()

        async def second(epoch: int) -> None:
            began["b"] = loop.time()
            assert epoch == 2

        a = asyncio.create_task(elector("a").run(first))
        await until(lambda: "a" in began)
        b = asyncio.create_task(elector("b").run(second))
        with apiserver.hung():
            with pytest.raises(LeadershipLost):
                await asyncio.wait_for(a, 20)
            assert "b" not in began
        await asyncio.wait_for(b, 20)
        assert ended["a"] < began["b"]
