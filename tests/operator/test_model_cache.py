"""ModelCached and its Jobs against a real API server: which there are, when they go, what is said, what waits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.kube.resources import JOB, POD, Object
from prfaas.operator import pd_cluster, prfaas_cluster
from prfaas.operator.fetches import LOST_SECONDS
from prfaas.operator.world import Result, World
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench, moment
from tests.operator.process import install

KIND = "PrfaaSCluster"
HOST = {"hostPath": {"path": "/var/lib/models"}}
CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
MODEL = {"name": "org/model", "source": "hf://org/model", "cache": HOST}


@pytest.fixture
def bench(apiserver: ApiServer, client: Hand, namespace: str) -> Bench:
    return Bench.create(apiserver, client, namespace, prfaas_cluster.reconcile)


async def placed(bench: Bench, model: Object = MODEL, **spec: Any) -> None:
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER | {"model": model} | spec)
    await bench.settle(KIND, "east")


async def jobs(bench: Bench) -> dict[str, Object]:
    return await bench.children(JOB)


async def by_node(bench: Bench) -> dict[str, Object]:
    return {job["metadata"]["annotations"]["prfaas.io/node"]: job for job in (await jobs(bench)).values()}


async def finish(bench: Bench, job: Object, ago: float = 0.0) -> None:
    await bench.finish_job(job["metadata"]["name"], ago)


async def finish_all(bench: Bench) -> None:
    for job in (await jobs(bench)).values():
        await finish(bench, job)


async def fetch_pod(bench: Bench, job: Object, state: Object, last: Object | None = None) -> None:
    """The pod of a Job, with its container in a state."""
    name, labels = job["metadata"]["name"], job["spec"]["template"]["metadata"]["labels"]
    container = {"name": "fetch", "image": "x", "imageID": "", "ready": False, "restartCount": 1}
    status = {"phase": "Running", "containerStatuses": [{**container, "state": state, "lastState": last or {}}]}
    ours = {name: value for name, value in labels.items() if not name.startswith(("batch.", "controller-", "job-"))}
    await bench.put_pod(f"{name}-pod", {**ours, "batch.kubernetes.io/job-name": name}, node="node-1", status=status)


async def cached(bench: Bench) -> tuple[str, str]:
    return (await bench.conditions(KIND, "east"))["ModelCached"]


async def ready(bench: Bench) -> tuple[str, str]:
    return (await bench.conditions(KIND, "east"))["Ready"]


def report(reason: str, message: str) -> Object:
    text = json.dumps({"reason": reason, "message": message})
    return {"terminated": {"exitCode": 1, "reason": "Error", "message": text}}


async def look(bench: Bench) -> Result:
    return await bench.run(KIND, "east")


# Which Jobs


@pytest.mark.apiserver
async def test_a_pool_without_source_has_no_job_and_says_why(bench: Bench) -> None:
    await placed(bench, {"name": "org/model"})
    assert await jobs(bench) == {}
    assert await cached(bench) == ("True", "InImage")
    assert (await ready(bench))[0] == "True"


@pytest.mark.apiserver
async def test_a_claim_that_is_mounted_as_it_is_has_no_job(bench: Bench) -> None:
    await placed(bench, {"name": "org/model", "source": "pvc://models/a"})
    assert await jobs(bench) == {}
    assert await cached(bench) == ("True", "OnClaim")


@pytest.mark.apiserver
async def test_each_node_with_an_instance_gets_a_job_and_ready_waits_for_them(bench: Bench) -> None:
    await placed(bench)
    assert list(await by_node(bench)) == ["node-1"]
    assert await cached(bench) == ("False", "Fetching")
    assert await ready(bench) == ("False", "Fetching")
    assert "`prfaas status`" in await bench.message(KIND, "east", "ModelCached")
    await finish_all(bench)
    await bench.settle(KIND, "east")
    assert await cached(bench) == ("True", "Cached")
    assert (await ready(bench))[0] == "True"


@pytest.mark.apiserver
async def test_a_claim_gets_one_job_before_any_instance(bench: Bench) -> None:
    await placed(bench, MODEL | {"cache": CLAIM}, instances=0)
    (job,) = (await jobs(bench)).values()
    volume = job["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]
    assert volume["claimName"] == "models"
    assert job["metadata"]["ownerReferences"][0]["kind"] == KIND
    await finish(bench, job)
    await bench.settle(KIND, "east")
    assert await cached(bench) == ("True", "Cached")


@pytest.mark.apiserver
async def test_an_instance_that_comes_to_another_node_has_the_model_brought_there(bench: Bench) -> None:
    await placed(bench)
    await finish_all(bench)
    await bench.settle(KIND, "east")
    labels = (await bench.children())["east-0"]["spec"]["template"]["metadata"]["labels"]
    await bench.put_pod("moved", labels, node="node-2")
    await look(bench)
    assert sorted(await by_node(bench)) == ["node-1", "node-2"]
    assert "node node-2" in await bench.message(KIND, "east", "ModelCached")


@pytest.mark.apiserver
async def test_reconciling_twice_writes_nothing_while_fetching_and_when_done(bench: Bench) -> None:
    await placed(bench)
    mark = bench.server.audit.mark()
    await look(bench)
    assert bench.writes_since(mark) == []
    await finish_all(bench)
    await bench.settle(KIND, "east")
    mark = bench.server.audit.mark()
    await look(bench)
    assert bench.writes_since(mark) == []


@pytest.mark.apiserver
async def test_a_job_deleted_by_hand_comes_back(bench: Bench) -> None:
    await placed(bench)
    (name,) = await jobs(bench)
    await bench.client.delete(JOB, name, bench.namespace)
    await look(bench)
    assert list(await jobs(bench)) == [name]


@pytest.mark.apiserver
async def test_a_pool_that_gives_up_its_cache_loses_its_jobs(bench: Bench) -> None:
    await placed(bench)
    await bench.edit(KIND, "east", {"model": {"source": None, "cache": None}})
    await bench.settle(KIND, "east")
    assert await jobs(bench) == {}
    assert await cached(bench) == ("True", "InImage")


@pytest.mark.apiserver
async def test_paused_makes_no_job(bench: Bench) -> None:
    await placed(bench, paused=True)
    assert await jobs(bench) == {}


@pytest.mark.apiserver
async def test_a_new_operator_and_a_new_secret_do_not_fetch_again_what_is_there(bench: Bench) -> None:
    await placed(bench)
    await finish_all(bench)
    await bench.settle(KIND, "east")
    before = await jobs(bench)
    routers = replace(bench.world.config.routers, operator_image="registry.example/prfaas:9")
    bench.world = replace(bench.world, config=replace(bench.world.config, routers=routers))
    await bench.edit(KIND, "east", {"model": {"secretRef": {"name": "token"}}})
    await bench.settle(KIND, "east")
    assert {name: job["metadata"]["uid"] for name, job in (await jobs(bench)).items()} == {
        name: job["metadata"]["uid"] for name, job in before.items()
    }
    assert await cached(bench) == ("True", "Cached")


@pytest.mark.apiserver
async def test_a_secret_that_is_put_right_starts_the_fetch_anew(bench: Bench) -> None:
    await placed(bench)
    before = set(await jobs(bench))
    await bench.edit(KIND, "east", {"model": {"secretRef": {"name": "token"}}})
    await bench.settle(KIND, "east")
    assert set(await jobs(bench)).isdisjoint(before)


# A new revision


@pytest.mark.apiserver
async def test_a_new_revision_is_fetched_before_any_instance_is_rolled(bench: Bench) -> None:
    await placed(bench)
    await finish_all(bench)
    await bench.settle(KIND, "east")
    old = {name: obj["spec"]["template"] for name, obj in (await bench.children()).items()}
    (before,) = await jobs(bench)
    await bench.edit(KIND, "east", {"model": {"revision": "v2"}})
    await bench.settle(KIND, "east")
    (now,) = (await jobs(bench)).items()
    assert now[0] != before
    assert "--revision=v2" in now[1]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert {name: obj["spec"]["template"] for name, obj in (await bench.children()).items()} == old
    assert await cached(bench) == ("False", "Fetching")
    await finish(bench, now[1])
    await bench.settle(KIND, "east")
    images = {
        obj["spec"]["template"]["spec"]["initContainers"][0]["command"][-1] for obj in (await bench.children()).values()
    }
    assert images == {"/models/org/model/v2/.prfaas-complete.json"}
    assert (await ready(bench))[0] == "True"


# What is said


@pytest.mark.apiserver
async def test_a_failure_is_said_in_the_fetchers_words_with_its_place_and_looked_at_again(bench: Bench) -> None:
    await placed(bench)
    (job,) = (await jobs(bench)).values()
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    await fetch_pod(bench, job, waiting, report("Gated", "org/model is gated: accept its terms"))
    result = await look(bench)
    assert await cached(bench) == ("False", "Gated")
    assert await bench.message(KIND, "east", "ModelCached") == "node node-1: org/model is gated: accept its terms"
    assert await ready(bench) == ("False", "Gated")
    assert result.again_after == 30.0
    mark = bench.server.audit.mark()
    await look(bench)
    assert bench.writes_since(mark) == []


@pytest.mark.apiserver
async def test_a_missing_secret_is_said(bench: Bench) -> None:
    await placed(bench)
    (job,) = (await jobs(bench)).values()
    state = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'}}
    await fetch_pod(bench, job, state)
    await look(bench)
    assert await cached(bench) == ("False", "Crashing")
    assert 'secret "token" not found' in await bench.message(KIND, "east", "ModelCached")


@pytest.mark.apiserver
async def test_instances_that_fetch_for_themselves_are_watched_themselves(bench: Bench) -> None:
    await placed(bench, MODEL | {"cache": {"ephemeral": {}}}, instances=1)
    assert await jobs(bench) == {}
    deployment = (await bench.children())["east-0"]
    (container,) = deployment["spec"]["template"]["spec"]["initContainers"]
    assert container["image"] == "registry.example/prfaas:0.1.0"
    status = {"name": "model", "image": "x", "imageID": "", "ready": False, "restartCount": 1}
    last = report("DiskFull", "no room for the model")
    failing = {**status, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last}
    await bench.client.patch_merge(
        POD, "east-0-pod", bench.namespace, {"status": {"initContainerStatuses": [failing]}}, subresource="status"
    )
    await look(bench)
    assert await cached(bench) == ("False", "DiskFull")
    assert (await bench.message(KIND, "east", "ModelCached")).startswith("instance east-0: no room")
    done = {**status, "ready": True, "state": {"terminated": {"exitCode": 0}}}
    await bench.client.patch_merge(
        POD, "east-0-pod", bench.namespace, {"status": {"initContainerStatuses": [done]}}, subresource="status"
    )
    await look(bench)
    assert await cached(bench) == ("True", "Cached")


# Lost


@pytest.mark.apiserver
async def test_a_model_that_is_waited_for_in_vain_is_fetched_again(bench: Bench) -> None:
    await placed(bench, instances=1)
    (job,) = (await jobs(bench)).values()
    await finish(bench, job, ago=600)
    await bench.settle(KIND, "east")
    template = (await bench.children())["east-0"]["spec"]["template"]

    async def waits(seconds: float) -> None:
        await bench.client.delete(POD, "east-0-pod", bench.namespace, grace_seconds=0)
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "east-0-pod",
                "namespace": bench.namespace,
                "labels": template["metadata"]["labels"],
            },
            "spec": {**template["spec"], "nodeName": "node-1"},
        }
        await bench.client.create(body)
        status = {"name": "model", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        state = {"running": {"startedAt": moment(seconds)}}
        patch = {"status": {"phase": "Pending", "initContainerStatuses": [{**status, "state": state}]}}
        await bench.client.patch_merge(POD, "east-0-pod", bench.namespace, patch, subresource="status")

    await waits(LOST_SECONDS - 60)
    assert (await look(bench)).again_after == LOST_SECONDS
    assert (await jobs(bench))[job["metadata"]["name"]]["metadata"]["uid"] == job["metadata"]["uid"]
    await waits(LOST_SECONDS + 1)
    assert (await look(bench)).again_after == 2.0
    assert await cached(bench) == ("False", "Fetching")
    await look(bench)
    (again,) = (await jobs(bench)).values()
    assert again["metadata"]["uid"] != job["metadata"]["uid"]


# The other kind of pool


@pytest.mark.apiserver
async def test_a_pd_pool_does_the_same(apiserver: ApiServer, client: Hand, namespace: str) -> None:
    bench = Bench.create(apiserver, client, namespace, pd_cluster.reconcile)
    await bench.place("PDCluster", "west", here.PD_CLUSTER | {"model": MODEL})
    await bench.settle("PDCluster", "west")
    assert (await bench.conditions("PDCluster", "west"))["ModelCached"] == ("False", "Fetching")
    assert list(await by_node(bench)) == ["node-1"]
    await finish_all(bench)
    await bench.settle("PDCluster", "west")
    assert (await bench.conditions("PDCluster", "west"))["ModelCached"] == ("True", "Cached")


@pytest.mark.apiserver
async def test_seconds_of_warming_up_are_kept(bench: Bench) -> None:
    await placed(bench, {"name": "org/model"}, instances=1)
    status = {
        "containerStatuses": [
            {
                "name": "engine",
                "image": "x",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": moment(95)}},
            }
        ],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": moment(5)}],
    }
    await bench.client.patch_merge(POD, "east-0-pod", bench.namespace, {"status": status}, subresource="status")
    await look(bench)
    assert (await bench.own(KIND, "east"))["status"]["warmUpSeconds"] == pytest.approx(90, abs=1)


# Nodes


@pytest.mark.apiserver
async def test_where_nodes_may_be_read_each_one_of_the_pool_is_filled(bench: Bench) -> None:
    name = f"spare-{bench.namespace}"
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"gpu": bench.namespace}},
        "status": {
            "allocatable": {"nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "x", "message": ""}],
        },
    }
    answer = bench.server.request("POST", "/api/v1/nodes", node)
    assert answer.status == 201, answer.message
    ready = {"spec": {"taints": None}}  # which admission gives to every node that is new
    bench.server.request("PATCH", f"/api/v1/nodes/{name}", ready, content_type="application/merge-patch+json")
    bench.world = replace(bench.world, config=replace(bench.world.config, read_nodes=True))
    await placed(bench, nodePool={"nodeSelector": {"gpu": bench.namespace}})
    assert sorted(await by_node(bench)) == ["node-1", name]


@pytest.mark.apiserver
async def test_without_the_right_to_list_nodes_those_of_instances_are_filled(
    bench: Bench, apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(install(apiserver, namespace)))
    async with await Hand.from_kubeconfig_file(file) as restricted:
        config = replace(bench.world.config, read_nodes=True, exchange_namespace=f"{namespace}-exchange")
        bench.world = World.create(
            restricted,
            config,
            1,
            now=bench.world.now,
            routers=bench.world.routers,
            peers=bench.world.peers,
            enqueue=bench.world.enqueue,
        )
        await placed(bench)
        assert list(await by_node(bench)) == ["node-1"]
