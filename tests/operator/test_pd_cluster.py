"""PDCluster against a real API server: roles, router, policy, and what its status says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from e2e.apiserver import ApiServer
from prfaas.api.policy import RoutingPolicy, supersedes
from prfaas.kube.resources import CONFIG_MAP, DEPLOYMENT, POD, ROLE_BINDING, SERVICE, SERVICE_ACCOUNT, Object
from prfaas.operator.pd_cluster import reconcile
from prfaas.operator.routers import Routers
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench

pytestmark = pytest.mark.apiserver
KIND = "PDCluster"


class Picker:
    """A router's admin server with nothing behind it: holds a policy as a real one would."""

    def __init__(self) -> None:
        self.policy: RoutingPolicy | None = None
        self.puts: list[RoutingPolicy] = []
        self.tokens: set[str] = set()
        self.deaf = False
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/policy", self._get), web.put("/v1/policy", self._put)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _answer(self, status: int = 200) -> web.Response:
        members = ("pdClusterUID", "epoch", "version", "hash")
        wire = self.policy.to_wire() if self.policy else {}
        return web.json_response({member: wire.get(member) for member in members}, status=status)

    async def _get(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers["Authorization"])
        return self._answer(503 if self.policy is None else 200)

    async def _put(self, request: web.Request) -> web.Response:
        policy = RoutingPolicy.model_validate(await request.json())
        self.puts.append(policy)
        if self.deaf or not supersedes(policy, self.policy, policy.pd_cluster_uid):
            return self._answer(409)
        self.policy = policy
        return self._answer()


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    each = Picker()
    await each.start()
    yield each
    await each.stop()


@pytest.fixture
async def bench(
    apiserver: ApiServer, client: Hand, namespace: str, picker: Picker, tmp_path: Path
) -> AsyncIterator[Bench]:
    token = tmp_path / "token"
    token.write_text("secret\n")
    routers = Routers(token, port=picker.port)
    yield Bench.create(apiserver, client, namespace, reconcile, routers=routers)
    await routers.close()


async def placed(bench: Bench, **spec: Any) -> None:
    await bench.place(KIND, "west", here.PD_CLUSTER | spec)
    await bench.settle(KIND, "west")


async def committed(bench: Bench) -> RoutingPolicy:
    found = await bench.client.get(CONFIG_MAP, "west-routing-policy", bench.namespace)
    return RoutingPolicy.model_validate_json(found["data"]["policy.json"])


def remote(threshold: int) -> Object:
    return {"remotePrefill": [{"linkRef": "to-east", "initialThreshold": threshold}]}


async def test_a_placed_pool_gets_instances_of_both_roles_and_a_router(bench: Bench, picker: Picker) -> None:
    await placed(bench)
    assert await bench.instances() == {"west-0": "decode", "west-1": "decode", "west-2": "prefill"}
    for resource in (DEPLOYMENT, SERVICE, SERVICE_ACCOUNT, ROLE_BINDING):
        assert "west-router" in await bench.children(resource)
    conditions = await bench.conditions(KIND, "west")
    assert {name: status for name, (status, _) in conditions.items()} == {
        "Ready": "True",
        "Reconciling": "False",
        "Stalled": "False",
        "PodsPlaced": "True",
        "ModelCached": "True",
        "RouterReady": "True",
        "RouterSynced": "True",
        "RemotePrefillAvailable": "False",
    }
    status = (await bench.own(KIND, "west"))["status"]
    assert status["roles"]["prefill"] == {"desired": 1, "ready": 1, "updated": 1, "draining": 0}
    assert status["roles"]["decode"] == {"desired": 2, "ready": 2, "updated": 2, "draining": 0}
    assert picker.tokens == {"Bearer secret"}


async def test_reconciling_twice_writes_nothing(bench: Bench) -> None:
    await placed(bench, **remote(100))
    before, mark = await bench.versions(), bench.server.audit.mark()
    await bench.run(KIND, "west")
    assert bench.writes_since(mark) == []
    assert await bench.versions() == before


async def test_a_new_leader_writes_nothing_and_keeps_the_policy(bench: Bench) -> None:
    await placed(bench)
    before, mark = await committed(bench), bench.server.audit.mark()
    routers = bench.world.routers
    fresh = Bench.create(bench.server, bench.client, bench.namespace, reconcile, routers=routers, epoch=9)
    await fresh.run(KIND, "west")
    assert bench.writes_since(mark) == []
    assert await committed(bench) == before


async def test_more_prefill_converts_the_named_child_in_place(bench: Bench) -> None:
    await placed(bench)
    before = {name: obj["metadata"]["uid"] for name, obj in (await bench.children()).items()}
    await bench.edit(KIND, "west", {"pool": {"initialPrefill": 2}})
    await bench.settle(KIND, "west")
    assert await bench.instances() == {"west-0": "decode", "west-1": "prefill", "west-2": "prefill"}
    assert {name: obj["metadata"]["uid"] for name, obj in (await bench.children()).items()} == before
    template = (await bench.children())["west-1"]["spec"]["template"]
    assert template["metadata"]["labels"]["prfaas.io/role"] == "prefill"
    assert "kv_producer" in json.dumps(template["spec"]["containers"][0]["args"])


async def test_a_changed_threshold_is_a_new_version_that_every_router_acknowledges(
    bench: Bench, picker: Picker
) -> None:
    await placed(bench, **remote(100))
    first = await committed(bench)
    assert first.threshold("to-east") == 100
    await bench.edit(KIND, "west", remote(200))
    await bench.settle(KIND, "west")
    second = await committed(bench)
    assert (second.version, second.threshold("to-east")) == (first.version + 1, 200)
    assert picker.policy == second
    status = (await bench.own(KIND, "west"))["status"]["policy"]
    assert status["thresholds"] == [{"link": "to-east", "tokens": 200}]
    assert (status["routersAcknowledged"], status["routersTotal"]) == (1, 1)
    assert status["version"] == second.version


async def test_a_router_that_does_not_follow_is_counted_and_asked_again(bench: Bench, picker: Picker) -> None:
    await placed(bench, **remote(100))
    picker.deaf = True
    await bench.edit(KIND, "west", remote(200))
    await bench.settle(KIND, "west")
    assert (await bench.conditions(KIND, "west"))["RouterSynced"] == ("False", "PolicyPending")
    assert (await bench.own(KIND, "west"))["status"]["policy"]["routersAcknowledged"] == 0
    result = await bench.run(KIND, "west")
    assert result.again_after is not None
    picker.deaf = False
    await bench.settle(KIND, "west")
    assert (await bench.conditions(KIND, "west"))["RouterSynced"] == ("True", "Acknowledged")


async def test_a_policy_deleted_by_hand_comes_back_as_a_newer_one(bench: Bench, picker: Picker) -> None:
    await placed(bench)
    first = await committed(bench)
    await bench.client.delete(CONFIG_MAP, "west-routing-policy", bench.namespace)
    await bench.settle(KIND, "west")
    second = await committed(bench)
    assert second.order > first.order
    assert picker.policy == second


async def test_a_policy_edited_by_hand_is_replaced(bench: Bench) -> None:
    await placed(bench)
    first = await committed(bench)
    broken = {"data": {"policy.json": "{}"}}
    await bench.client.patch_merge(CONFIG_MAP, "west-routing-policy", bench.namespace, broken)
    await bench.settle(KIND, "west")
    second = await committed(bench)
    assert (second.hash, second.order > first.order) == (first.hash, True)


async def test_paused_neither_writes_children_nor_puts_policies(bench: Bench, picker: Picker) -> None:
    await placed(bench, **remote(100))
    puts = len(picker.puts)
    await bench.edit(KIND, "west", {"paused": True, "pool": {"instances": 5}, **remote(200)})
    mark = bench.server.audit.mark()
    await bench.settle(KIND, "west")
    assert {event.resource for event in bench.writes_since(mark)} <= {"pdclusters", "events"}
    assert len(picker.puts) == puts
    assert (await bench.conditions(KIND, "west"))["Reconciling"] == ("False", "Paused")


async def test_a_link_that_is_named_and_does_not_exist_keeps_the_pool_from_being_ready(bench: Bench) -> None:
    await placed(bench, **remote(100))
    conditions = await bench.conditions(KIND, "west")
    assert conditions["RemotePrefillAvailable"] == conditions["Ready"] == ("False", "LinkNotFound")
    assert await bench.message(KIND, "west", "Ready") == "there is no InterClusterLink to-east in this namespace"
    assert conditions["RouterReady"] == ("True", "Available"), "it serves nevertheless"
    await bench.edit(KIND, "west", {"remotePrefill": []})
    await bench.settle(KIND, "west")
    assert (await bench.conditions(KIND, "west"))["Ready"] == ("True", "AsSpecified")


async def test_roles_whose_kv_differs_stall_with_path_reason_and_remedy_and_keep_what_runs(bench: Bench) -> None:
    await placed(bench)
    before = await bench.children()
    await bench.edit(KIND, "west", {"roles": {"decode": {"args": ["--kv-cache-dtype", "fp8"]}}})
    await bench.settle(KIND, "west")
    conditions = await bench.conditions(KIND, "west")
    assert conditions["Stalled"] == ("True", "InvalidSpec")
    message = await bench.message(KIND, "west", "Stalled")
    assert message.startswith("spec.roles.decode.args: --kv-cache-dtype is 'auto' for prefill and 'fp8' for decode")
    assert "give it in spec.engine.args, for both" in message
    assert {name: obj["spec"] for name, obj in (await bench.children()).items()} == {
        name: obj["spec"] for name, obj in before.items()
    }


async def test_a_router_that_cannot_start_is_said_with_its_containers_words(bench: Bench) -> None:
    await placed(bench)
    waiting = {
        "reason": "ImagePullBackOff",
        "message": "Back-off: ErrImagePull: envoy:nowhere: not found",
    }
    status = {
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": "envoy",
                "image": "envoy:nowhere",
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"waiting": waiting},
            }
        ],
    }
    await bench.client.patch_merge(POD, "west-router-pod", bench.namespace, {"status": status}, subresource="status")
    await bench.play(unready=("west-router",))
    await bench.run(KIND, "west")
    conditions = await bench.conditions(KIND, "west")
    assert conditions["RouterReady"] == conditions["Ready"] == ("False", "Crashing")
    said = "router pod west-router-pod: ImagePullBackOff of container envoy: envoy:nowhere: not found"
    assert (await bench.message(KIND, "west", "RouterReady")).startswith(said)


async def test_a_pool_that_is_off_has_a_router_and_no_instances(bench: Bench) -> None:
    await placed(bench)
    await bench.edit(KIND, "west", {"pool": {"instances": 0}})
    await bench.settle(KIND, "west")
    assert await bench.instances() == {}
    assert "west-router" in await bench.children()
    assert (await bench.conditions(KIND, "west"))["PodsPlaced"] == ("True", "NoInstances")
