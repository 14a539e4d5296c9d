"""Operators as processes, with the chart's rights: acting on events, taking over, ending."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.apiserver import ApiServer
from prfaas.kube.resources import CONFIG_MAP, DEPLOYMENT, JOB, LEASE, PRFAAS_CLUSTER, SERVICE
from prfaas.operator.prfaas_cluster import reconcile
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench, eventually
from tests.operator.process import Operator, install

pytestmark = pytest.mark.apiserver
KIND = "PrfaaSCluster"

Start = Callable[..., Operator]


@pytest.fixture
def bench(apiserver: ApiServer, client: Hand, namespace: str) -> Bench:
    """Used for its eyes and hands, not for its reconcile."""
    return Bench.create(apiserver, client, namespace, reconcile)


@pytest.fixture
def start(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Iterator[Start]:
    kubeconfig = install(apiserver, namespace)
    started: list[Operator] = []

    def begin(name: str = "first", *arguments: str) -> Operator:
        operator = Operator(namespace, tmp_path / name, kubeconfig, arguments)
        started.append(operator)
        operator.start()
        return operator

    yield begin
    for operator in started:
        operator.kill()
        print(f"{operator.home.name}:\n{operator.log()}")


async def children(bench: Bench, count: int) -> bool:
    return len(await bench.instances()) == count


async def test_a_fetch_that_ends_wakes_its_pool(bench: Bench, start: Start) -> None:
    operator = start("first", "--resync=3600")
    model = {
        "name": "org/model",
        "source": "hf://org/model",
        "cache": {"persistentVolumeClaim": {"claimName": "models"}},
    }
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER | {"model": model, "instances": 1})

    async def job() -> list[str]:
        return [*await bench.children(JOB)]

    async def waits_for_the_model_alone() -> bool:
        moved = await bench.play()
        status = (await bench.own(KIND, "east")).get("status") or {}
        reasons = {each["type"]: each["reason"] for each in status.get("conditions") or []}
        seen = await reconciles()
        await asyncio.sleep(1.0)  # a second without a reconcile: nothing but the Job is left to wake the pool
        idle = await reconciles() == seen
        return idle and not moved and status.get("readyInstances") == 1 and reasons.get("Ready") == "Fetching"

    async def reconciles() -> list[str]:
        _, metrics = await operator.probe("/metrics")
        return [line for line in metrics.splitlines() if line.startswith("prfaas_reconciles_total")]

    async def ready() -> bool:
        return (await bench.conditions(KIND, "east"))["Ready"][0] == "True"

    (name,) = await eventually(job, what="there is a fetch Job")
    await eventually(waits_for_the_model_alone, what="the pool waits for its model alone")
    await bench.finish_job(name)
    await eventually(ready, what="the pool is Ready")


async def becomes_ready(bench: Bench, kind: str, name: str) -> None:
    """Plays the cluster until the operator says Ready."""

    async def check() -> bool:
        await bench.play()
        conditions = await bench.conditions(kind, name)
        return conditions.get("Ready", ("",))[0] == "True"

    await eventually(check, what=f"{kind} {name} is Ready")


async def test_the_charts_rights_suffice_for_all_that_it_does(bench: Bench, start: Start) -> None:
    operator = start()
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER)
    await bench.place("PDCluster", "west", here.PD_CLUSTER | {"router": {"replicas": 0}})
    await becomes_ready(bench, KIND, "east")

    async def west_settled() -> bool:
        await bench.play()
        return (await bench.conditions("PDCluster", "west")).get("PodsPlaced") == ("True", "Placed")

    await eventually(west_settled)
    documents = await bench.client.list(CONFIG_MAP, f"{bench.namespace}-exchange")
    assert {obj["metadata"]["name"] for obj in documents.items} == {
        f"prfaascluster.{bench.namespace}.east",
        f"pdcluster.{bench.namespace}.west",
    }
    # By hand: deleted children come back, an edit is put right, by events alone.
    await bench.client.delete(DEPLOYMENT, "east-1", bench.namespace)
    await bench.client.delete(SERVICE, "west-router", bench.namespace)
    await bench.client.patch_merge(DEPLOYMENT, "east-0", bench.namespace, {"spec": {"replicas": 0}})

    async def repaired() -> bool:
        found = await bench.children()
        services = await bench.children(SERVICE)
        return "east-1" in found and "west-router" in services and found["east-0"]["spec"]["replicas"] == 1

    await eventually(repaired)
    refused = [line for line in operator.lines() if "orbidden" in line["message"] or line["level"] == "error"]
    assert refused == []


async def test_at_rest_it_is_quiet_and_a_restart_writes_nothing(bench: Bench, start: Start) -> None:
    first = start("first", "--resync=1")
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER)
    await becomes_ready(bench, KIND, "east")
    # The status is written before its events and its lines: only the next reconcile begins with all of them done.
    await _reconciled_again(first, 2)
    written = len(first.log().splitlines())
    mark = bench.server.audit.mark()
    await _reconciled_again(first, 3)
    assert bench.writes_since(mark) == []
    assert len(first.log().splitlines()) == written

    first.signal(signal.SIGTERM)
    assert await first.ended() == 0
    second = start("second")
    await eventually(second.leads)
    await second.ready()
    await eventually(lambda: _reconciled(second))
    assert bench.writes_since(mark) == []


async def _reconciled_again(operator: Operator, times: int) -> None:
    """Waits until the pool was reconciled so many times more."""

    async def count() -> float:
        text = (await operator.probe("/metrics"))[1]
        name = 'prfaas_reconciles_total{kind="PrfaaSCluster"'
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    before = await count()

    async def enough() -> bool:
        return await count() >= before + times

    await eventually(enough, what=f"{times} more reconciles")


async def _reconciled(operator: Operator) -> bool:
    return 'prfaas_reconciles_total{kind="PrfaaSCluster",outcome="ok"}' in (await operator.probe("/metrics"))[1]


async def test_a_killed_leader_is_followed_within_thirty_seconds_and_nothing_is_written_twice(
    bench: Bench, start: Start
) -> None:
    first = start("first")
    await eventually(first.leads)
    second = start("second")
    await second.ready()
    assert not await second.leads()
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER)
    await becomes_ready(bench, KIND, "east")
    epoch = (await bench.client.get(LEASE, "prfaas-operator", f"{bench.namespace}-system"))["spec"]["leaseTransitions"]

    first.signal(signal.SIGKILL)
    await first.ended()
    mark = bench.server.audit.mark()
    await bench.edit(KIND, "east", {"instances": 4})
    await eventually(lambda: children(bench, 4), seconds=30)
    lease = await bench.client.get(LEASE, "prfaas-operator", f"{bench.namespace}-system")
    assert lease["spec"]["leaseTransitions"] == epoch + 1
    made = [event for event in bench.writes_since(mark) if event.name == "east-3" and event.resource == "deployments"]
    assert len(made) == 1


async def test_a_leader_that_was_frozen_writes_nothing_and_ends(bench: Bench, start: Start) -> None:
    first = start("first")
    await eventually(first.leads)
    second = start("second")
    await second.ready()
    first.signal(signal.SIGSTOP)
    await eventually(second.leads, seconds=60)
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER)
    await eventually(lambda: children(bench, 3))
    first.signal(signal.SIGCONT)
    assert await first.ended() == 3
    assert "leadership lost" in first.log()
    lines = [event for event in bench.server.audit.events() if event.namespace == bench.namespace and event.is_write]
    created = [event.name for event in lines if event.resource == "deployments" and event.user != "admin"]
    assert sorted(name for name in created if name) == ["east-0", "east-1", "east-2"]


async def test_a_pool_deleted_while_nobody_acts_is_taken_back_at_the_next_start(bench: Bench, start: Start) -> None:
    first = start("first")
    for name in ("east", "north"):
        await bench.place(KIND, name, here.PRFAAS_CLUSTER | {"instances": 1})

    async def published() -> set[str]:
        documents = await bench.client.list(CONFIG_MAP, f"{bench.namespace}-exchange", labels="prfaas.io/origin")
        return {obj["metadata"]["name"].rpartition(".")[2] for obj in documents.items}

    async def holds(*names: str) -> bool:
        return await published() == {*names}

    await eventually(lambda: holds("east", "north"))
    first.signal(signal.SIGTERM)
    assert await first.ended() == 0
    await bench.client.delete(PRFAAS_CLUSTER, "east", bench.namespace)
    start("second")
    await eventually(lambda: holds("north"))


async def test_kopf_itself_writes_nothing(bench: Bench, start: Start) -> None:
    start()
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER)
    await becomes_ready(bench, KIND, "east")
    agents = {event.agent.split("/")[0] for event in bench.server.audit.writes(0, bench.namespace)}
    assert "prfaas-operator" in agents
    assert not any("kopf" in agent.lower() for agent in agents)
    metadata = (await bench.own(KIND, "east"))["metadata"]
    assert not metadata.get("annotations")
    assert not metadata.get("finalizers")


async def test_a_candidate_ends_when_told_and_leaves_the_lease_alone(bench: Bench, start: Start) -> None:
    first = start("first")
    await eventually(first.leads)
    second = start("second")
    await second.ready()
    second.signal(signal.SIGTERM)
    assert await second.ended() == 0
    assert await first.leads()
    lease = await bench.client.get(LEASE, "prfaas-operator", f"{bench.namespace}-system")
    assert lease["spec"]["holderIdentity"].startswith("first_")


async def test_a_poisoned_object_is_contained(bench: Bench, start: Start) -> None:
    """What the schema let through must not spread."""
    start()
    bad = here.PRFAAS_CLUSTER | {"podTemplate": {"spec": {"containers": "none"}}}
    await bench.place(KIND, "bad", bad)
    await bench.place(KIND, "good", here.PRFAAS_CLUSTER | {"instances": 1})
    await becomes_ready(bench, KIND, "good")

    async def stalled() -> bool:
        return (await bench.conditions(KIND, "bad")).get("Stalled", ("",))[0] == "True"

    await eventually(stalled)
    assert set(await bench.instances()) == {"good-0"}


async def test_without_our_kinds_it_says_what_to_install_and_ends(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Rights to nothing stand for an API server that it cannot use."""
    body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody", "namespace": namespace}}
    assert apiserver.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", body).status == 201
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = apiserver.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/nobody/token", request)
    operator = Operator(namespace, tmp_path / "nobody", apiserver.kubeconfig_for(answer.body["status"]["token"]))
    operator.start()
    try:
        assert await operator.ended() == 1
    finally:
        operator.kill()
    assert "the operator's rights do not suffice" in operator.lines()[-1]["message"]
