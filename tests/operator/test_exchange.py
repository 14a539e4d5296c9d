"""The exchange: what a document says of endpoints, and the sweep of what deleted pools have left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.api.exchange import PoolDocument, PublishedModel
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.kube.errors import Forbidden
from prfaas.kube.informer import Informer
from prfaas.kube.resources import CONFIG_MAP, Object, Resource
from prfaas.operator import exchange, secrets
from prfaas.operator.exchange import config_map, pool_document
from prfaas.operator.prfaas_cluster import reconcile
from prfaas.operator.secrets import SecretUsers
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench

EAST = PrfaaSCluster.model_validate(
    {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "PrfaaSCluster",
        "metadata": {"name": "east", "namespace": "llm", "uid": "u"},
        "spec": here.PRFAAS_CLUSTER,
    }
)


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [({"ready": True}, True), ({"ready": False}, False), ({}, True), (None, True)],
    ids=["ready", "not ready", "not said", "no conditions"],
)
def test_an_endpoint_of_which_nothing_is_said_is_ready(conditions: Object | None, ready: bool) -> None:
    endpoint: Object = {"addresses": ["10.0.0.1"], "targetRef": {"name": "east-0-x"}}
    if conditions is not None:
        endpoint["conditions"] = conditions
    (published,) = pool_document("east", EAST, [slice_of(endpoint)]).endpoints
    assert published.ready is ready
    assert published.compatibility_key == "k1"


def slice_of(*endpoints: Object) -> Object:
    marks = {"prfaas.io/compatibility-key": "k1"}
    return {"metadata": {"labels": marks}, "ports": [{"name": "http", "port": 8000}], "endpoints": list(endpoints)}


def left_behind(bench: Bench, name: str) -> Object:
    """The document of a pool that is not there any more."""
    document = PoolDocument(
        cluster_id="here",
        kind="PrfaaSCluster",
        namespace=bench.namespace,
        name=name,
        generation=1,
        model=PublishedModel(name="m", revision="main"),
        compatibility_key="k",
    )
    return config_map(bench.namespace, document)


async def documents(bench: Bench) -> set[str]:
    found = await bench.client.list(CONFIG_MAP, bench.namespace, labels="prfaas.io/origin")
    return {obj["metadata"]["name"].rpartition(".")[2] for obj in found.items}


@pytest.mark.apiserver
async def test_the_sweep_takes_what_deleted_pools_have_left_and_nothing_else(
    apiserver: ApiServer, client: Hand, namespace: str
) -> None:
    bench = Bench.create(apiserver, client, namespace, reconcile)
    await bench.place("PrfaaSCluster", "east", here.PRFAAS_CLUSTER)
    await bench.settle("PrfaaSCluster", "east")
    await client.create(left_behind(bench, "gone"))
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "prfaascluster.x.y", "namespace": namespace},
    }
    await client.create(foreign)
    await exchange.sweep(bench.world)
    assert await documents(bench) == {"east"}
    assert (await client.get(CONFIG_MAP, "prfaascluster.x.y", namespace))["metadata"]["name"]


@pytest.mark.apiserver
async def test_an_origin_that_may_not_be_read_keeps_its_document_and_no_others(
    apiserver: ApiServer,
    client: Hand,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench.create(apiserver, client, namespace, reconcile)
    for name in ("a", "b", "c"):
        await client.create(left_behind(bench, name))
    get = client.get

    async def guarded(resource: Resource, name: str, namespace: str | None = None) -> Object:
        if name == "b":
            raise Forbidden("may not get b")
        return await get(resource, name, namespace)

    monkeypatch.setattr(client, "get", guarded)
    await exchange.sweep(bench.world)
    assert await documents(bench) == {"b"}
    assert f"document prfaascluster.{namespace}.b not swept: Forbidden: may not get b" in caplog.text


class Refusing:
    """A client that may read nothing."""

    async def list(self, *_: Any, **__: Any) -> Any:
        raise Forbidden("may not list")


def secret_watch(client: Any) -> Informer:
    return secrets.watch(client, "system", SecretUsers(), lambda _: None)


def exchange_watch(client: Any) -> Informer:
    bench = Bench.create(None, client, "shop-window", reconcile)  # type: ignore[arg-type]  # nothing is asked of it
    return exchange.watch(bench.world)


@pytest.mark.parametrize(
    ("watch", "what"), [(secret_watch, "Secrets in system"), (exchange_watch, "ConfigMaps in shop-window")]
)
async def test_a_watch_without_rights_is_said(
    watch: Callable[[Any], Informer], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    informer = watch(Refusing())
    failing = asyncio.Event()
    informer.on_state(failing.set)
    running = asyncio.create_task(informer.run())
    await asyncio.wait_for(failing.wait(), 20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert f"{what} cannot be watched now, what is known of them stays: Forbidden: may not list" in caplog.text
