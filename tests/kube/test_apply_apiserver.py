"""Applying against a real API server: nothing written when nothing differs, drift repaired, nothing taken over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.api.labels import CLUSTER, LABEL_MANAGED_BY, MANAGED_BY
from prfaas.kube.apply import Applier, Outcome, plan
from prfaas.kube.errors import Conflict, Invalid, NameTaken, NotFound
from prfaas.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Key,
    Object,
    resource_of,
)
from tests.hand import Hand

pytestmark = pytest.mark.apiserver

OWNER = {LABEL_MANAGED_BY: MANAGED_BY, CLUSTER: "pool"}
KINDS = (CONFIG_MAP, SERVICE, DEPLOYMENT, POD_DISRUPTION_BUDGET, ENDPOINT_SLICE)


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[Hand]:
    async with await Hand.from_kubeconfig_file(apiserver.kubeconfig) as client:
        yield client


def obj(namespace: str, api_version: str, kind: str, name: str, **rest: Any) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": {**OWNER, **rest.pop("labels", {})}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}


def children(namespace: str) -> list[Object]:
    """A bit of everything that servers default, round, reorder or drop."""
    container = {
        "name": "engine",
        "image": "engine:1",
        "args": ["serve", "--port", "8000"],
        "env": [
            {"name": "EMPTY", "value": ""},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "ports": [{"name": "http", "containerPort": 8000}],
        "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": "1000m", "memory": "1024Mi"}, "requests": {"cpu": "0.5"}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "initialDelaySeconds": 0},
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "readOnly": False}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod_spec = {
        "automountServiceAccountToken": False,
        "hostNetwork": False,
        "containers": [container],
        "nodeSelector": {},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "0.5Gi"}}],
    }
    selector = {"prfaas.io/instance": "pool-0"}
    return [
        obj(namespace, "v1", "ConfigMap", "config", data={"a": "1", "empty": ""}),
        obj(
            namespace,
            "v1",
            "Service",
            "service",
            spec={
                "clusterIP": "None",
                "selector": selector,
                "ports": [{"name": "http", "port": 80, "targetPort": 8000}],
                "publishNotReadyAddresses": False,
            },
        ),
        obj(
            namespace,
            "apps/v1",
            "Deployment",
            "pool-0",
            spec={
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": selector},
                "template": {"metadata": {"labels": selector}, "spec": pod_spec},
            },
        ),
        obj(
            namespace,
            "policy/v1",
            "PodDisruptionBudget",
            "budget",
            spec={"maxUnavailable": "25%", "selector": {"matchLabels": selector}},
        ),
        obj(
            namespace,
            "discovery.k8s.io/v1",
            "EndpointSlice",
            "slice",
            addressType="IPv4",
            endpoints=[{"addresses": ["10.1.0.4"], "conditions": {"ready": False}}],
            ports=[{"name": "http", "port": 8000}],
        ),
    ]


async def current(client: Hand, namespace: str) -> list[Object]:
    labels = ",".join(f"{name}={value}" for name, value in OWNER.items())
    return [item for kind in KINDS for item in (await client.list(kind, namespace, labels=labels)).items]


async def reconcile(client: Hand, namespace: str, wanted: list[Object], applier: Applier | None = None) -> Outcome:
    applier = applier or Applier(client, field_manager="prfaas-test")
    return await applier.execute(plan(await current(client, namespace), wanted), owner=OWNER)


def versions(objects: list[Object]) -> dict[str, str]:
    return {o["kind"]: o["metadata"]["resourceVersion"] for o in objects}


async def test_the_second_reconcile_sends_no_write_even_from_a_new_process(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    first = await reconcile(client, namespace, children(namespace))
    assert not first.failed
    assert [key.name for key in first.created] == ["config", "service", "pool-0", "budget", "slice"]
    before = versions(await current(client, namespace))
    mark = apiserver.audit.mark()
    second = await reconcile(client, namespace, children(namespace))
    assert (second.created, second.applied, second.deleted, second.failed) == ([], [], [], {})
    assert apiserver.audit.writes(mark, namespace) == []
    assert versions(await current(client, namespace)) == before


EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "config": ("ConfigMap", {"data": {"a": "edited"}}),
    "service": ("Service", {"spec": {"selector": {"prfaas.io/instance": "other"}}}),
    "pool-0": ("Deployment", {"spec": {"template": {"spec": {"automountServiceAccountToken": None}}}}),
    "budget": ("PodDisruptionBudget", {"spec": {"maxUnavailable": 3}}),
    "slice": ("EndpointSlice", {"endpoints": [{"addresses": ["10.1.0.9"]}]}),
}


@pytest.mark.parametrize("name", EDITS)
async def test_an_edit_by_hand_is_repaired_by_one_write(
    client: Hand, apiserver: ApiServer, namespace: str, name: str
) -> None:
    await reconcile(client, namespace, children(namespace))
    kind, edit = EDITS[name]
    target = next(o for o in children(namespace) if o["kind"] == kind)
    await client.patch_merge(resource_of(target), name, namespace, edit, field_manager="hand")
    mark = apiserver.audit.mark()
    outcome = await reconcile(client, namespace, children(namespace))
    assert not outcome.failed
    assert [key.name for key in outcome.applied] == [name]
    assert len(apiserver.audit.writes(mark, namespace)) == 1
    again = await reconcile(client, namespace, children(namespace))
    assert again.applied == []


async def test_what_others_add_is_left_alone(client: Hand, namespace: str) -> None:
    await reconcile(client, namespace, children(namespace))
    extra = {"metadata": {"annotations": {"team": "x"}, "labels": {"team": "x"}}, "data": {"more": "1"}}
    await client.patch_merge(CONFIG_MAP, "config", namespace, extra, field_manager="hand")
    outcome = await reconcile(client, namespace, children(namespace))
    assert outcome.applied == []
    assert (await client.get(CONFIG_MAP, "config", namespace))["data"]["more"] == "1"


async def test_a_field_no_longer_wanted_goes_and_a_child_no_longer_wanted_too(client: Hand, namespace: str) -> None:
    await reconcile(client, namespace, children(namespace))
    fewer = [o for o in children(namespace) if o["kind"] != "Service"]
    fewer[0]["data"] = {"a": "1"}
    outcome = await reconcile(client, namespace, fewer)
    assert [key.name for key in outcome.applied] == ["config"]
    assert [key.name for key in outcome.deleted] == ["service"]
    assert (await client.get(CONFIG_MAP, "config", namespace))["data"] == {"a": "1"}
    with pytest.raises(NotFound):
        await client.get(SERVICE, "service", namespace)


async def test_a_foreign_object_of_our_name_is_neither_taken_over_nor_deleted_and_the_rest_is_made(
    client: Hand, namespace: str
) -> None:
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "config", "namespace": namespace}}
    before = await client.create({**foreign, "data": {"theirs": "1"}})
    outcome = await reconcile(client, namespace, children(namespace))
    key = Key("v1", "ConfigMap", namespace, "config")
    assert type(outcome.failed.pop(key)) is NameTaken
    assert not outcome.failed
    assert len(outcome.created) == 4
    assert await client.get(CONFIG_MAP, "config", namespace) == before
    await reconcile(client, namespace, [])
    assert await client.get(CONFIG_MAP, "config", namespace) == before


async def test_a_stale_cache_does_not_make_a_child_twice(client: Hand, namespace: str) -> None:
    wanted = children(namespace)[:1]
    await reconcile(client, namespace, wanted)
    before = versions(await current(client, namespace))
    applier = Applier(client, field_manager="prfaas-test")
    outcome = await applier.execute(plan([], wanted), owner=OWNER)  # as if the informer had not seen it yet
    assert not outcome.failed
    assert versions(await current(client, namespace)) == before


async def test_a_child_deleted_since_it_was_seen_is_not_resurrected_by_an_apply(client: Hand, namespace: str) -> None:
    await reconcile(client, namespace, children(namespace)[:1])
    seen = await current(client, namespace)
    await client.delete(CONFIG_MAP, "config", namespace)
    changed = children(namespace)[:1]
    changed[0]["data"] = {"a": "2"}
    outcome = await Applier(client, field_manager="prfaas-test").execute(plan(seen, changed), owner=OWNER)
    assert isinstance(next(iter(outcome.failed.values())), Conflict)
    with pytest.raises(NotFound):
        await client.get(CONFIG_MAP, "config", namespace)


async def test_one_bad_child_does_not_stop_the_others(client: Hand, namespace: str) -> None:
    wanted = children(namespace)
    wanted[0]["data"] = {"not a key!": "x"}
    outcome = await reconcile(client, namespace, wanted)
    assert [type(error) for error in outcome.failed.values()] == [Invalid]
    assert len(outcome.created) == 4
    assert set(outcome.after([])) == set(outcome.created)


async def test_content_stored_in_another_form_costs_one_idle_request_per_process(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    wanted = children(namespace)[2:3]
    container = wanted[0]["spec"]["template"]["spec"]["containers"][0]
    container["stdinOnce"] = False  # dropped by the server, which nothing here knows
    applier = Applier(client, field_manager="prfaas-test")
    await reconcile(client, namespace, wanted, applier)
    mark = apiserver.audit.mark()
    for _ in range(3):
        outcome = await reconcile(client, namespace, wanted, applier)
        assert not outcome.failed
    assert apiserver.audit.writes(mark, namespace) == []
    await reconcile(client, namespace, wanted)
    assert len(apiserver.audit.writes(mark, namespace)) == 1


async def test_ensure_makes_repairs_and_then_rests(client: Hand, apiserver: ApiServer, namespace: str) -> None:
    applier = Applier(client, field_manager="prfaas-test")
    wanted = children(namespace)[0]
    await applier.ensure(wanted, owner=OWNER)
    await client.patch_merge(CONFIG_MAP, "config", namespace, {"data": {"a": "9"}}, field_manager="hand")
    assert (await applier.ensure(wanted, owner=OWNER))["data"]["a"] == "1"
    mark = apiserver.audit.mark()
    await applier.ensure(wanted, owner=OWNER)
    assert apiserver.audit.writes(mark, namespace) == []


async def test_a_status_is_written_once_whole_and_only_to_the_object_it_is_about(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    applier = Applier(client, field_manager="prfaas-test")
    budget = obj(namespace, "policy/v1", "PodDisruptionBudget", "b", spec={"maxUnavailable": 1})
    live = await applier.ensure(budget, owner=OWNER)
    status = {"currentHealthy": 1, "desiredHealthy": 1, "disruptionsAllowed": 0, "expectedPods": 2}
    written = await applier.write_status(live, status)
    assert written is not None
    assert written["spec"] == live["spec"]
    assert written["metadata"]["generation"] == live["metadata"]["generation"]
    mark = apiserver.audit.mark()
    assert await applier.write_status(written, written["status"]) is None
    assert apiserver.audit.writes(mark, namespace) == []
    await client.delete(POD_DISRUPTION_BUDGET, "b", namespace)
    await applier.ensure(budget, owner=OWNER)
    with pytest.raises(Conflict):
        await applier.write_status(live, {**status, "currentHealthy": 2})
