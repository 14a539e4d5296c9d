"""What `prfaas render` prints is what the operator's reconcile writes, to the last field."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.apiserver import ApiServer
from prfaas.api import labels
from prfaas.cli.main import main
from prfaas.kube.resources import INTER_CLUSTER_LINK, Key, Object, resource_of
from prfaas.operator import inter_cluster_link, pd_cluster, prfaas_cluster
from prfaas.operator.world import Result, World
from tests.hand import Hand
from tests.operator.bench import CHILDREN, PD_CLUSTER, PRFAAS_CLUSTER, Bench, settings

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
pytestmark = pytest.mark.apiserver

PD_WITH_LINK = PD_CLUSTER | {"remotePrefill": [{"linkRef": "east", "initialThreshold": 4_000}]}
FETCHED = {"name": "org/model", "source": "hf://org/model"}
CLAIM = {"cache": {"persistentVolumeClaim": {"claimName": "models"}}}
OWN = {"cache": {"ephemeral": {"sizeLimit": "10Gi"}}}


@pytest.fixture
async def client(apiserver: ApiServer) -> Any:
    async with await Hand.from_kubeconfig_file(apiserver.kubeconfig) as each:
        yield each


def installation(namespace: str) -> list[str]:
    """The flags of render that tell it of the operator of these tests."""
    config = settings(namespace)
    return [
        *("--cluster-id", config.cluster_id, "--exchange-namespace", config.exchange_namespace),
        *("--operator-namespace", namespace, "--image", config.routers.operator_image),
        *("--envoy-image", config.routers.envoy_image),
    ]


@pytest.mark.parametrize(
    ("kind", "spec", "reconcile"),
    [
        ("PrfaaSCluster", PRFAAS_CLUSTER, prfaas_cluster.reconcile),
        ("PDCluster", PD_WITH_LINK, pd_cluster.reconcile),
        ("PrfaaSCluster", PRFAAS_CLUSTER | {"model": FETCHED | CLAIM}, prfaas_cluster.reconcile),
        ("PDCluster", PD_CLUSTER | {"model": FETCHED | OWN}, pd_cluster.reconcile),
    ],
    ids=["prefill pool", "pd pool", "model on a claim", "model in the pods"],
)
async def test_the_reconcile_writes_what_render_prints(
    kind: str,
    spec: Object,
    reconcile: Callable[[World, Key], Awaitable[Result]],
    apiserver: ApiServer,
    client: Hand,
    namespace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = Bench.create(apiserver, client, namespace, reconcile)
    await bench.place(kind, "pool", spec)
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(await bench.own(kind, "pool")))
    assert main(["render", "-f", str(file), *installation(namespace)]) == 0
    printed: list[Object] = list(yaml.safe_load_all(capsys.readouterr().out))

    await bench.run(kind, "pool")
    written = [
        obj
        for resource in CHILDREN
        for obj in (await client.list(resource, namespace)).items
        if obj["metadata"].get("labels", {}).get(labels.LABEL_MANAGED_BY) == labels.MANAGED_BY
    ]
    assert name_and_hash(printed) == name_and_hash(written)

    # The hash could lie; applied once more under the operator's own name, what was printed changes no field.
    for obj in printed:
        resource = resource_of(obj)
        live = await client.get(resource, obj["metadata"]["name"], obj["metadata"]["namespace"])
        again = await client.apply(obj, field_manager=f"prfaas-{kind.lower()}", force=False)
        assert again["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"], obj["kind"]


def name_and_hash(objects: list[Object]) -> dict[tuple[str, str], str]:
    return {(obj["kind"], obj["metadata"]["name"]): obj["metadata"]["annotations"][labels.SPEC_HASH] for obj in objects}


async def test_a_link_without_its_peer_creates_nothing(apiserver: ApiServer, client: Hand, namespace: str) -> None:
    bench = Bench.create(apiserver, client, namespace, inter_cluster_link.reconcile)
    link = yaml.safe_load((SAMPLES / "west" / "link.yaml").read_text())
    await bench.place(INTER_CLUSTER_LINK.kind, "east", link["spec"])
    await bench.run(INTER_CLUSTER_LINK.kind, "east")
    for resource in CHILDREN:
        found = (await client.list(resource, namespace)).items
        assert [obj["metadata"]["name"] for obj in found if obj["kind"] != "ServiceAccount"] in (
            [],
            ["kube-root-ca.crt"],
        )
