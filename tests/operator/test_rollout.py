"""A new key goes through two pools that a link joins, on a real API server: what routers see is whole at every step.

This file is kubelet, Deployment controller and EndpointSlice controller: its slices have the Services' labels, as
Kubernetes' own have. After every reconcile the router's own reading of them decides about requests.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.api import labels
from prfaas.api.policy import LinkThreshold, RoutingPolicy
from prfaas.kube.resources import DEPLOYMENT, ENDPOINT_SLICE, POD, SERVICE, Key, Object
from prfaas.links.registry import PeerRegistry
from prfaas.operator import inter_cluster_link, pd_cluster, prfaas_cluster
from prfaas.operator.routers import Routers
from prfaas.operator.world import Result, World
from prfaas.router.endpoints import read_pools
from prfaas.routing.decision import Decision, Reason, decide
from prfaas.routing.prompt import Prompt
from prfaas.routing.world import Load, Pools
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench, eventually
from tests.operator.process import Operator, install
from tests.operator.test_pd_cluster import Picker

pytestmark = pytest.mark.apiserver

EAST, WEST = ("PrfaaSCluster", "east"), ("PDCluster", "west")
LINKS = (("InterClusterLink", "to-east"), ("InterClusterLink", "to-west"))
RECONCILES = {
    "PrfaaSCluster": prfaas_cluster.reconcile,
    "PDCluster": pd_cluster.reconcile,
    "InterClusterLink": inter_cluster_link.reconcile,
}
FP8 = {"engine": {"args": ["--kv-cache-dtype", "fp8"]}}
"""Changes the key."""
REVISION = {"model": {"revision": "r2"}}
"""So does this."""
MAIN = {"model": {"revision": "main"}}
POLICY = RoutingPolicy.build(
    pd_cluster_uid="u", epoch=1, version=1, model="m", thresholds=(LinkThreshold(link="to-east", tokens=1000),)
)


async def reconcile(world: World, key: Key) -> Result:
    return await RECONCILES[key.kind](world, key)


def link(exchange: str, local: tuple[str, str], remote: tuple[str, str], namespace: str) -> Object:
    return {
        "local": {"kind": local[0], "name": local[1]},
        "remote": {"kind": remote[0], "namespace": namespace, "name": remote[1]},
        "peer": {"clusterID": "here", "exchangeNamespace": exchange, "source": {"local": {}}},
        "network": {"line": "east-west", "capacity": "100G"},
        "encryption": {"control": "MutualTLS", "requests": "None", "kv": "None"},
        "probe": {"period": "1s", "timeout": "1s", "failureThreshold": 1},
    }


@dataclass
class Stage:
    """Both pools, the links between them, and the part of the cluster."""

    bench: Bench
    peers: PeerRegistry

    async def seen(self, kind: str, name: str) -> tuple[str, str]:
        """(status, reason) of Reconciling, after checking that the pool has stayed Ready."""
        conditions = await self.bench.conditions(kind, name)
        assert conditions["Ready"] == ("True", "AsSpecified")
        return conditions["Reconciling"]

    async def groups(self, kind: str, name: str) -> dict[str, tuple[int, int]]:
        """Key -> prefill and decode instances that are ready, from the status."""
        found = (await self.bench.own(kind, name))["status"]["groups"]
        return {group["compatibilityKey"]: (group["prefillReady"], group["decodeReady"]) for group in found}

    async def key(self, kind: str, name: str) -> str:
        """The key that a pool's spec asks for."""
        found: str = (await self.bench.own(kind, name))["status"]["compatibilityKey"]
        return found

    async def slices(self) -> None:
        """What the EndpointSlice controller makes of our Services, with an instance that is being replaced left out."""
        bench, space = self.bench, self.bench.namespace
        deployments = (await bench.client.list(DEPLOYMENT, space)).items
        settled = {
            item["metadata"]["name"]
            for item in deployments
            if (item.get("status") or {}).get("observedGeneration") == item["metadata"]["generation"]
        }
        pods = (await bench.client.list(POD, space)).items
        services = [item for item in (await bench.client.list(SERVICE, space)).items if item["spec"].get("selector")]
        listed = (await bench.client.list(ENDPOINT_SLICE, space, labels=f"{MANAGED_BY}={CONTROLLER}")).items
        there = {item["metadata"]["name"]: item for item in listed}
        for service in services:
            metadata, selector = service["metadata"], service["spec"]["selector"]
            name = f"{metadata['name']}-slice"
            members = [
                pod
                for pod in pods
                if selector.items() <= pod["metadata"]["labels"].items()
                and pod["metadata"]["labels"].get(labels.INSTANCE) in settled
            ]
            body = {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": name,
                    "namespace": space,
                    "labels": {
                        **metadata["labels"],
                        labels.SERVICE_NAME: metadata["name"],
                        MANAGED_BY: CONTROLLER,
                    },
                },
                "addressType": "IPv4",
                "ports": [{"name": "http", "port": 8000}],
                "endpoints": [endpoint(pod) for pod in members],
            }
            live = there.pop(name, None)
            if live is None or [*addresses(live)] != [*addresses(body)]:
                await bench.client.apply(body, field_manager="endpointslice-controller")
        for name in there:
            await bench.client.delete(ENDPOINT_SLICE, name, space)

    async def pools(self) -> Pools:
        """What west's routers know."""
        ours = f"{labels.LABEL_PART_OF}={labels.PART_OF}"
        found = await self.bench.client.list(ENDPOINT_SLICE, self.bench.namespace, labels=ours)
        return read_pools(found.items, "west")

    async def requests_are_served(self) -> set[Reason]:
        """Routes a hundred requests as a router would: why each went where it went. None is refused, none is mixed."""
        pools, reasons = await self.pools(), set()
        for number in range(50):
            for tokens in (10, 5000):
                found = decide(Prompt(tokens), POLICY, pools, Load(), key=f"r{number}")
                assert isinstance(found, Decision), str(found)
                assert found.key
                if found.prefill is not None:
                    assert found.prefill.compatibility_key == found.decode.compatibility_key
                reasons.add(found.reason)
        return reasons

    async def round(self) -> bool:
        """Every object is reconciled, and the cluster follows; returns whether anything moved."""
        bench = self.bench
        mark = bench.server.audit.mark()
        for kind, name in (WEST, LINKS[0], EAST, LINKS[1]):
            await bench.run(kind, name)
            await self.slices()
            await self.requests_are_served()
        moved = await bench.play()
        await self.slices()
        return moved or bool(bench.server.audit.writes(mark, bench.namespace))

    async def settle(self) -> None:
        """Rounds until nothing moves, and what each end publishes is what the other has read."""

        async def still() -> bool:
            return not await self.round() and await self.read()

        await eventually(still, seconds=120, what="the pools settle")

    async def read(self) -> bool:
        """Whether each link shows what its peer has."""
        for own, peer in zip(LINKS, (EAST, WEST), strict=True):
            status = (await self.bench.own(*own)).get("status") or {}
            other = (await self.bench.own(*peer)).get("status") or {}
            shown = status.get("peer") or {}
            if (shown.get("groups"), shown.get("compatibilityKey")) != (other["groups"], other["compatibilityKey"]):
                return False
        return True


MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
CONTROLLER = "endpointslice-controller.k8s.io"


def endpoint(pod: Object) -> Object:
    number = zlib.crc32(pod["metadata"]["uid"].encode())
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 127 or 1}"
    return {
        "addresses": [address],
        "conditions": {"ready": True},
        "targetRef": {"kind": "Pod", "name": pod["metadata"]["name"]},
    }


def addresses(piece: Object) -> list[str]:
    return sorted(each["addresses"][0] for each in piece.get("endpoints") or [])


@pytest.fixture
async def stage(apiserver: ApiServer, client: Hand, namespace: str, tmp_path: Path) -> AsyncIterator[Stage]:
    """Two prefill instances in east, one prefill and two decode instances in west, all Ready."""
    picker, token = Picker(), tmp_path / "token"
    token.write_text("secret")
    await picker.start()
    routers = Routers(token, port=picker.port)
    async with PeerRegistry(client, lambda _: None) as peers:
        bench = Bench.create(apiserver, client, namespace, reconcile, peers=peers, routers=routers)
        stage = Stage(bench, peers)
        remote = {"remotePrefill": [{"linkRef": "to-east", "initialThreshold": 1000}]}
        await bench.place(*EAST, here.PRFAAS_CLUSTER | {"instances": 2})
        await bench.place(*WEST, here.PD_CLUSTER | remote)
        await bench.place(*LINKS[0], link(namespace, WEST, EAST, namespace))
        await bench.place(*LINKS[1], link(namespace, EAST, WEST, namespace))
        for each in (EAST, WEST):
            await bench.run(*each)
        await bench.play()
        await stage.slices()
        await stage.settle()
        assert await stage.requests_are_served() == {Reason.SHORT, Reason.LONG}
        yield stage
    await routers.close()
    await picker.stop()


async def services(bench: Bench) -> set[str]:
    """Keys for which there are Services."""
    found = await bench.children(SERVICE)
    return {obj["metadata"]["labels"].get(labels.COMPATIBILITY_KEY) for obj in found.values()} - {None}


async def test_the_pd_pool_goes_first_waits_for_its_peer_and_both_end_on_the_new_key(stage: Stage) -> None:
    bench, old = stage.bench, await stage.key(*WEST)
    await bench.edit(*WEST, FP8)
    await stage.settle()
    new = await stage.key(*WEST)
    assert new != old
    # One old decode instance stays for long prompts, as east has only the old key.
    assert await stage.groups(*WEST) == {old: (0, 1), new: (1, 1)}
    assert await services(bench) == {old, new}
    assert await stage.requests_are_served() == {Reason.SHORT, Reason.LONG}
    assert await stage.seen(*WEST) == ("True", "WaitingForPeer")
    assert "link to-east" in await bench.message(*WEST, "Reconciling")
    assert (await bench.conditions(*LINKS[0]))["Compatible"] == ("True", "Matched")
    assert f"only here {new}" in await bench.message(*LINKS[0], "Compatible")
    pods = (await bench.client.list(POD, bench.namespace, labels=labels.INSTANCE)).items
    assert {pod["metadata"]["labels"][labels.COMPATIBILITY_KEY] for pod in pods} == {old, new}

    await bench.edit(*EAST, FP8)
    await stage.settle()
    for pool, counts in ((WEST, (1, 2)), (EAST, (2, 0))):
        assert await stage.groups(*pool) == {new: counts}
        assert await stage.seen(*pool) == ("False", "AsSpecified")
    assert await services(bench) == {new}
    assert await bench.message(*LINKS[0], "Compatible") == ""
    assert await stage.requests_are_served() == {Reason.SHORT, Reason.LONG}


async def test_the_prefill_pool_goes_first_keeps_an_old_instance_and_may_go_back(stage: Stage) -> None:
    bench, old = stage.bench, await stage.key(*EAST)
    await bench.edit(*EAST, REVISION)
    await stage.settle()
    new = await stage.key(*EAST)
    assert await stage.groups(*EAST) == {old: (1, 0), new: (1, 0)}
    assert await stage.seen(*EAST) == ("True", "WaitingForPeer")
    assert "link to-west" in await bench.message(*EAST, "Reconciling")
    assert (await bench.conditions(*LINKS[0]))["Compatible"] == ("True", "Matched")
    # What no instance of west can pair with is not mirrored.
    keys = {each.compatibility_key for each in (await stage.pools()).remote["to-east"]}
    assert keys == {old}

    await bench.edit(*WEST, REVISION)
    for _ in range(3):
        await stage.round()
    await bench.edit(*WEST, MAIN)
    await bench.edit(*EAST, MAIN)
    await stage.settle()
    for pool, counts in ((WEST, (1, 2)), (EAST, (2, 0))):
        assert await stage.groups(*pool) == {old: counts}
        assert await stage.seen(*pool) == ("False", "AsSpecified")
    assert await services(bench) == {old}


async def test_events_alone_carry_a_key_through_both_ends(
    apiserver: ApiServer, client: Hand, namespace: str, tmp_path: Path
) -> None:
    """An operator as it runs in a cluster, whose resync is far away: each step wakes whoever can take the next."""
    async with PeerRegistry(client, lambda _: None) as peers:
        bench = Bench.create(apiserver, client, namespace, reconcile, peers=peers)
        stage = Stage(bench, peers)
        operator = Operator(namespace, tmp_path / "operator", install(apiserver, namespace))
        operator.start()
        try:
            remote = {"remotePrefill": [{"linkRef": "to-east", "initialThreshold": 1000}]}
            await bench.place(*EAST, here.PRFAAS_CLUSTER | {"instances": 2})
            await bench.place(*WEST, here.PD_CLUSTER | {"router": {"replicas": 0}} | remote)
            for own, (local, other) in zip(LINKS, ((WEST, EAST), (EAST, WEST)), strict=True):
                await bench.place(*own, link(f"{namespace}-exchange", local, other, namespace))

            async def whole(east: list[str], west: list[str]) -> bool:
                await bench.play()
                await stage.slices()
                ready = {}
                for pool in (EAST, WEST):
                    status = (await bench.own(*pool)).get("status") or {}
                    ready[pool] = [
                        f"{group['prefillReady']}+{group['decodeReady']}" for group in status.get("groups") or []
                    ]
                return sorted(ready[EAST]) == east and sorted(ready[WEST]) == west

            await eventually(lambda: whole(["2+0"], ["1+2"]), what="all is ready")
            await bench.edit(*WEST, FP8)
            await eventually(lambda: whole(["2+0"], ["0+1", "1+1"]), what="west waits for east")
            await bench.edit(*EAST, FP8)
            await eventually(lambda: whole(["2+0"], ["1+2"]), what="both have gone over")
            assert await stage.key(*EAST) == await stage.key(*WEST)
            assert set(await stage.groups(*WEST)) == {await stage.key(*WEST)}
        finally:
            operator.kill()
            print(operator.log())


async def test_an_independent_pool_waits_for_nobody(stage: Stage) -> None:
    independent: dict[str, Any] = {"rollout": {"pairing": "Independent"}}
    await stage.bench.edit(*EAST, FP8 | independent)
    await stage.settle()
    new = await stage.key(*EAST)
    assert await stage.groups(*EAST) == {new: (2, 0)}
    assert (await stage.bench.conditions(*LINKS[0]))["Compatible"] == ("False", "KeyMismatch")
    assert await stage.requests_are_served() == {Reason.SHORT, Reason.REMOTE_UNAVAILABLE}
