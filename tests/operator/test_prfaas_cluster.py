"""PrfaaSCluster against a real API server: place, edit, drift, pause, delete, and what its status says."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.kube.errors import NotFound
from prfaas.kube.resources import CONFIG_MAP, DEPLOYMENT, POD, POD_DISRUPTION_BUDGET, PRFAAS_CLUSTER, SERVICE
from prfaas.operator.prfaas_cluster import reconcile
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench

pytestmark = pytest.mark.apiserver
KIND = "PrfaaSCluster"
NO_GPUS = "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's node affinity/selector."


@pytest.fixture
def bench(apiserver: ApiServer, client: Hand, namespace: str) -> Bench:
    return Bench.create(apiserver, client, namespace, reconcile)


async def placed(bench: Bench, **spec: Any) -> None:
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER | spec)
    await bench.settle(KIND, "east")


async def test_a_placed_pool_gets_one_child_per_instance_and_becomes_ready(bench: Bench) -> None:
    await placed(bench)
    assert await bench.instances() == {"east-0": "prefill", "east-1": "prefill", "east-2": "prefill"}
    conditions = await bench.conditions(KIND, "east")
    assert conditions["Ready"] == ("True", "AsSpecified")
    assert conditions["PodsPlaced"] == ("True", "Placed")
    assert conditions["Exported"] == ("True", "Published")
    assert conditions["Stalled"][0] == conditions["Reconciling"][0] == "False"
    status = (await bench.own(KIND, "east"))["status"]
    assert (status["instances"], status["readyInstances"], status["updatedInstances"]) == (3, 3, 3)


async def test_reconciling_twice_writes_nothing(bench: Bench) -> None:
    await placed(bench)
    before, mark = await bench.versions(), bench.server.audit.mark()
    await bench.run(KIND, "east")
    assert bench.writes_since(mark) == []
    assert await bench.versions() == before


async def test_a_restarted_operator_writes_nothing(bench: Bench) -> None:
    await placed(bench)
    mark = bench.server.audit.mark()
    fresh = Bench.create(bench.server, bench.client, bench.namespace, reconcile, epoch=2)
    await fresh.run(KIND, "east")
    assert bench.writes_since(mark) == []


async def test_a_child_deleted_by_hand_comes_back(bench: Bench) -> None:
    await placed(bench)
    await bench.client.delete(DEPLOYMENT, "east-1", bench.namespace)
    (service,) = await bench.children(SERVICE)
    await bench.client.delete(SERVICE, service, bench.namespace)
    await bench.settle(KIND, "east")
    assert "east-1" in await bench.children()
    assert service in await bench.children(SERVICE)


async def test_a_child_edited_by_hand_is_put_right_and_what_others_added_stays(bench: Bench) -> None:
    await placed(bench)
    hand = {"metadata": {"labels": {"team": "search"}}, "spec": {"replicas": 0}}
    await bench.client.patch_merge(DEPLOYMENT, "east-1", bench.namespace, hand)
    await bench.run(KIND, "east")
    deployment = (await bench.children())["east-1"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["metadata"]["labels"]["team"] == "search"


async def test_the_chosen_instance_goes_although_another_is_not_ready(bench: Bench) -> None:
    await placed(bench)
    kept = {name: obj["metadata"]["uid"] for name, obj in (await bench.children()).items() if name != "east-1"}
    mark_it = {"metadata": {"annotations": {"prfaas.io/remove": "true"}}}
    await bench.client.patch_merge(DEPLOYMENT, "east-1", bench.namespace, mark_it)
    await bench.play(unready=("east-0",))
    await bench.edit(KIND, "east", {"instances": 2})
    await bench.run(KIND, "east")
    assert {name: obj["metadata"]["uid"] for name, obj in (await bench.children()).items()} == kept


async def test_a_new_image_is_rolled_one_instance_at_a_time(bench: Bench) -> None:
    await placed(bench)
    await bench.edit(KIND, "east", {"engine": {"image": "registry.example/vllm:0.34.0"}})

    def images(children: dict[str, Any]) -> list[str]:
        return sorted(
            obj["spec"]["template"]["spec"]["containers"][0]["image"].rsplit(":", 1)[1] for obj in children.values()
        )

    await bench.run(KIND, "east")
    await bench.run(KIND, "east")
    assert images(await bench.children()) == ["0.33.0", "0.33.0", "0.34.0"]
    conditions = await bench.conditions(KIND, "east")
    assert conditions["Ready"] == ("True", "AsSpecified"), "two of three serve: as many as the budget leaves"
    assert conditions["Reconciling"] == ("True", "RollingOut")
    assert await bench.message(KIND, "east", "Reconciling") == "not ready yet: east-0"
    await bench.settle(KIND, "east")
    assert images(await bench.children()) == ["0.34.0"] * 3


async def test_paused_stops_all_writes_to_children_and_says_so(bench: Bench) -> None:
    await placed(bench)
    await bench.edit(KIND, "east", {"paused": True, "instances": 5})
    await bench.client.delete(DEPLOYMENT, "east-0", bench.namespace)
    mark = bench.server.audit.mark()
    await bench.settle(KIND, "east")
    written = {event.resource for event in bench.writes_since(mark)} - {"pods"}
    assert written <= {"prfaasclusters", "events"}
    assert set(await bench.instances()) == {"east-1", "east-2"}
    assert (await bench.conditions(KIND, "east"))["Reconciling"] == ("False", "Paused")
    await bench.edit(KIND, "east", {"paused": False})
    await bench.settle(KIND, "east")
    assert len(await bench.instances()) == 5


async def test_deleting_the_pool_takes_its_document_back_and_marks_nothing_else(bench: Bench) -> None:
    await placed(bench)
    assert "prfaascluster" in next(iter(await bench.children(CONFIG_MAP)))
    owners = [obj["metadata"]["ownerReferences"] for obj in (await bench.children()).values()]
    uid = (await bench.own(KIND, "east"))["metadata"]["uid"]
    assert all([reference["uid"] for reference in each] == [uid] for each in owners)
    await bench.client.delete(PRFAAS_CLUSTER, "east", bench.namespace)
    mark = bench.server.audit.mark()
    await bench.run(KIND, "east")
    assert [(event.verb, event.resource) for event in bench.writes_since(mark)] == [("delete", "configmaps")]
    with pytest.raises(NotFound):
        await bench.own(KIND, "east")


async def test_a_recreated_pool_waits_for_the_children_of_the_old_one_to_go(bench: Bench) -> None:
    await placed(bench)
    await bench.client.delete(PRFAAS_CLUSTER, "east", bench.namespace)
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER | {"instances": 1})
    result = await bench.run(KIND, "east")
    assert result.again_after is not None
    assert await bench.instances() == dict.fromkeys(("east-0", "east-1", "east-2", "east-3"), "prefill")
    for name in ("east-0", "east-1", "east-2"):
        await bench.client.delete(DEPLOYMENT, name, bench.namespace)
    for service in await bench.children(SERVICE):
        await bench.client.delete(SERVICE, service, bench.namespace)
    await bench.settle(KIND, "east")
    assert set(await bench.instances()) == {"east-3"}


async def test_a_bad_override_stalls_with_path_reason_and_remedy_and_keeps_what_runs(bench: Bench) -> None:
    await placed(bench)
    before = await bench.children()
    await bench.edit(KIND, "east", {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}})
    await bench.run(KIND, "east")
    assert (await bench.conditions(KIND, "east"))["Stalled"] == ("True", "InvalidSpec")
    message = await bench.message(KIND, "east", "Stalled")
    assert "spec.podTemplate.spec.containers[0]: needs 'name'" in message
    assert "write it as in a Pod's spec" in message
    assert await bench.children() == before
    assert (await bench.own(KIND, "east"))["status"]["readyInstances"] == 3


async def test_an_override_that_the_api_server_refuses_stalls_with_its_words(bench: Bench) -> None:
    await placed(bench)
    before = {name: obj["spec"] for name, obj in (await bench.children()).items()}
    await bench.edit(KIND, "east", {"podTemplate": {"spec": {"dnsPolicy": "Nowhere"}}})
    await bench.run(KIND, "east")
    assert (await bench.conditions(KIND, "east"))["Stalled"] == ("True", "InvalidSpec")
    assert "dnsPolicy" in await bench.message(KIND, "east", "Stalled")
    assert {name: obj["spec"] for name, obj in (await bench.children()).items()} == before
    await bench.edit(KIND, "east", {"podTemplate": None})
    await bench.settle(KIND, "east")
    assert (await bench.conditions(KIND, "east"))["Stalled"] == ("False", "AsSpecified")


async def test_a_name_that_somebody_else_has_is_never_taken_over(bench: Bench) -> None:
    foreign = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "east-prefill", "namespace": bench.namespace},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "b"}}},
    }
    before = await bench.client.create(foreign)
    await placed(bench)
    assert (await bench.conditions(KIND, "east"))["Stalled"] == ("True", "NameConflict")
    assert "east-prefill" in await bench.message(KIND, "east", "Stalled")
    after = await bench.client.get(POD_DISRUPTION_BUDGET, "east-prefill", bench.namespace)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_no_room_is_said_with_what_is_missing(bench: Bench) -> None:
    await placed(bench)
    labels = (await bench.children())["east-1"]["spec"]["template"]["metadata"]["labels"]
    await bench.client.delete(POD, "east-1-pod", bench.namespace, grace_seconds=0)
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_GPUS}
    await bench.put_pod("east-1-again", labels, node=None, status={"phase": "Pending", "conditions": [refused]})
    await bench.run(KIND, "east")
    assert (await bench.conditions(KIND, "east"))["PodsPlaced"] == ("False", "Unschedulable")
    message = await bench.message(KIND, "east", "PodsPlaced")
    assert message == (
        "no room for east-1: no node with gpu=h200 has 8 nvidia.com/gpu free; "
        "add nodes to the pool or lower the number of instances"
    )


async def test_a_pod_that_a_dead_kubelet_never_gives_up_is_removed(bench: Bench) -> None:
    await placed(bench)
    await bench.client.delete(POD, "east-2-pod", bench.namespace)
    result = await bench.run(KIND, "east")
    assert result.again_after is not None
    assert 50 < result.again_after < 65
    assert (await bench.own(KIND, "east"))["status"]["drainingInstances"] == 1
    bench.world = replace(bench.world, now=lambda: datetime.now(UTC) + timedelta(seconds=90))
    await bench.run(KIND, "east")
    with pytest.raises(NotFound):
        await bench.client.get(POD, "east-2-pod", bench.namespace)


async def test_transitions_make_one_event_each(bench: Bench) -> None:
    await placed(bench)
    found = bench.server.request("GET", f"/apis/events.k8s.io/v1/namespaces/{bench.namespace}/events").body["items"]
    notes = [event["note"] for event in found]
    assert "Ready is True: AsSpecified" in notes
    assert len(notes) == len(set(notes))
