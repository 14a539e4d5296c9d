"""`prfaas status`: what a person sees while models are on their way, and what is said when nothing can be seen."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from e2e.apiserver import ApiServer
from prfaas.cli.main import main
from prfaas.cli.status_report import Fetch, PoolReport, as_table, gather, last_progress
from prfaas.operator import prfaas_cluster
from tests.hand import Hand
from tests.kube.fake_server import FakeServer, plain_client, serving
from tests.operator import bench as here
from tests.operator.bench import Bench

NOW = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
LABELS = {"prfaas.io/cluster": "east", "prfaas.io/kind": "prfaascluster"}
POOL: dict[str, Any] = {
    "apiVersion": "prfaas.io/v1alpha1",
    "kind": "PrfaaSCluster",
    "metadata": {"name": "east", "namespace": "llm"},
    "spec": {"model": {"name": "org/model", "source": "hf://org/model", "revision": "v2"}, "instances": 3},
    "status": {
        "readyInstances": 2,
        "warmUpSeconds": 240,
        "conditions": [{"type": "Ready", "status": "False", "reason": "Fetching", "message": "on its way"}],
    },
}
JOB: dict[str, Any] = {
    "metadata": {"name": "east-model-1", "namespace": "llm", "annotations": {"prfaas.io/node": "n1"}}
}
RUNNING = {"running": {"startedAt": "2026-01-02T11:00:00Z"}}
LINE = {
    "message": "fetching",
    "done": 3_000_000_000,
    "total": 12_000_000_000,
    "rate": 90_000_000,
    "file": "a.safetensors",
}
OLD = {**LINE, "done": 1_000_000_000}


def pod(name: str, state: dict[str, Any], created: str = "2026-01-02T11:00:00Z", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "llm", "labels": {**LABELS, **labels}, "creationTimestamp": created},
        "status": {"containerStatuses": [{"name": "fetch", "state": state}]},
    }


def of_job(name: str, state: dict[str, Any], created: str = "2026-01-02T11:00:00Z") -> dict[str, Any]:
    return pod(name, state, created, **{"batch.kubernetes.io/job-name": "east-model-1"})


class Cluster(FakeServer):
    """Lists by kind, and logs by pod; `logs[name, previous]`."""

    def __init__(self, lists: dict[str, list[dict[str, Any]]], logs: dict[tuple[str, bool], str]) -> None:
        super().__init__(list_answer=self.answer)
        self._lists, self._logs = lists, logs

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rsplit("/", 1)[1]
        if kind == "log":
            text = self._logs.get((request.path.split("/")[-2], "previous" in request.query))
            if text is None:
                status = {"kind": "Status", "code": 400, "message": "container is waiting to start"}
                return web.json_response(status, status=400)
            return web.Response(text=text)
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": self._lists.get(kind, [])})


async def reports(lists: dict[str, list[dict[str, Any]]], logs: dict[tuple[str, bool], str]) -> list[PoolReport]:
    async with (
        serving(Cluster({"prfaasclusters": [POOL], **lists}, logs)) as server,
        plain_client(server.url) as client,
    ):
        return await gather(client, None, NOW)


def log(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


async def test_how_far_a_fetch_is_comes_from_the_last_line_of_its_pod() -> None:
    lists = {"jobs": [JOB], "pods": [of_job("p", RUNNING)]}
    (report,) = await reports(lists, {("p", False): log(OLD, LINE, {"message": "something else"})})
    (fetch,) = report.fetches
    assert fetch == Fetch("node n1", "Fetching", "", 3_000_000_000, 12_000_000_000, 90_000_000, "a.safetensors")
    assert (fetch.percent, fetch.seconds_left) == (25, 100)
    table = as_table([report])
    assert "PrfaaSCluster llm/east: 2 of 3 prefill ready" in table
    assert "25 %" in table
    assert "3.00 of 12.00 GB" in table
    assert "90.0 MB/s" in table
    assert "1 min 40 s" in table
    assert "hf://org/model at v2" in table
    assert "240 s from start to ready" in table


async def test_a_pod_that_has_just_been_started_again_shows_how_far_it_was() -> None:
    lists = {"jobs": [JOB], "pods": [of_job("p", RUNNING)]}
    (report,) = await reports(lists, {("p", False): "", ("p", True): log(LINE)})
    assert report.fetches[0].done == 3_000_000_000


async def test_the_newest_pod_of_a_job_counts() -> None:
    pods = [of_job("new", RUNNING, "2026-01-02T11:30:00Z"), of_job("old", RUNNING)]
    (report,) = await reports({"jobs": [JOB], "pods": pods}, {("new", False): log(LINE), ("old", False): log(OLD)})
    assert report.fetches[0].done == 3_000_000_000


async def test_a_fetch_that_fails_shows_the_reason_and_no_rate() -> None:
    message = json.dumps({"reason": "Gated", "message": "org/model is gated"})
    state = {"terminated": {"exitCode": 1, "message": message}}
    (report,) = await reports({"jobs": [JOB], "pods": [of_job("p", state)]}, {})
    assert report.fetches[0].state == "Gated"
    assert "node n1: org/model is gated" in as_table([report])


async def test_a_job_that_is_done_is_cached_and_has_no_time_left() -> None:
    done = {**JOB, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    last = {**LINE, "done": LINE["total"]}
    lists = {"jobs": [done], "pods": [of_job("p", {"terminated": {"exitCode": 0}})]}
    (report,) = await reports(lists, {("p", False): log(last)})
    assert (report.fetches[0].state, report.fetches[0].percent, report.fetches[0].seconds_left) == ("Cached", 100, None)


async def test_instances_that_fetch_for_themselves_are_shown() -> None:
    own = {**POOL, "spec": {**POOL["spec"], "model": {**POOL["spec"]["model"], "cache": {"ephemeral": {}}}}}
    instance = pod("east-0-pod", {}, **{"prfaas.io/instance": "east-0"})
    instance["status"]["initContainerStatuses"] = [{"name": "model", "state": RUNNING}]
    lists = {"prfaasclusters": [own], "pods": [instance]}
    (report,) = await reports(lists, {("east-0-pod", False): log(LINE)})
    assert (report.fetches[0].place, report.fetches[0].percent) == ("instance east-0", 25)


async def test_a_pool_that_nobody_has_looked_at_yet_is_shown() -> None:
    new = {name: value for name, value in POOL.items() if name != "status"}
    (report,) = await reports({"prfaasclusters": [new]}, {})
    assert report.to_json()["conditions"] == []
    assert "warm-up" in as_table([report])


def test_lines_that_are_no_progress_are_passed_over() -> None:
    lines = ["not json", "[]", '{"done": "x", "total": 1}', json.dumps(LINE), '{"done": 1}', ""]
    assert last_progress(lines) == LINE
    assert last_progress([]) == {}


def test_no_pools() -> None:
    assert as_table([]) == "there are no pools"


# The command


@pytest.fixture
async def bench(apiserver: ApiServer, namespace: str) -> Bench:
    async with await Hand.from_kubeconfig_file(apiserver.kubeconfig) as client:
        bench = Bench.create(apiserver, client, namespace, prfaas_cluster.reconcile)
        model = {"name": "org/model", "source": "hf://org/model", "cache": {"hostPath": {"path": "/models"}}}
        await bench.place("PrfaaSCluster", "east", here.PRFAAS_CLUSTER | {"model": model})
        await bench.settle("PrfaaSCluster", "east")
        return bench


@pytest.mark.apiserver
def test_the_command_prints_a_table_and_json(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["status", "--kubeconfig", str(bench.server.kubeconfig), "-n", bench.namespace]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "ModelCached" in table
    assert "node node-1" in table
    assert main([*command, "-o", "json"]) == 0
    (pool,) = json.loads(capsys.readouterr().out)
    assert (pool["kind"], pool["name"], pool["instances"]["prefill"]["wanted"]) == ("PrfaaSCluster", "east", 3)
    assert [fetch["place"] for fetch in pool["fetches"]] == ["node node-1"]
    conditions = {each["type"]: each["reason"] for each in pool["conditions"]}
    assert conditions["ModelCached"] == "Fetching"


@pytest.mark.apiserver
def test_wrong_contexts_and_rights_are_told_in_one_line(
    apiserver: ApiServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--kubeconfig", str(apiserver.kubeconfig), "--context", "elsewhere"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "elsewhere" in said
    answer = apiserver.request(
        "POST",
        f"/api/v1/namespaces/{namespace}/serviceaccounts",
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody"}},
    )
    assert answer.status == 201, answer.message
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/nobody/token"
    token = apiserver.request("POST", path, request).body["status"]["token"]
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(apiserver.kubeconfig_for(token)))
    assert main(["status", "--kubeconfig", str(file)]) == 1
    said = capsys.readouterr().err
    assert "cannot list resource" in said
    assert "give -n NAMESPACE" in said
