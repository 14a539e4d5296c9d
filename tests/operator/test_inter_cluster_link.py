"""InterClusterLink against a real API server, both ends in it: mirror, refuse, keep, pause, delete."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from e2e.apiserver import ApiServer
from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.kube.resources import CONFIG_MAP, ENDPOINT_SLICE, INTER_CLUSTER_LINK, PRFAAS_CLUSTER, SECRET, SERVICE, Key
from prfaas.links.registry import PeerRegistry
from prfaas.operator import inter_cluster_link, pd_cluster, prfaas_cluster
from prfaas.operator.world import Result, World, key_for
from prfaas.workloads.engine import compatibility_key
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench, eventually

pytestmark = pytest.mark.apiserver
KIND = "InterClusterLink"


def link(namespace: str, **peer: Any) -> dict[str, Any]:
    return {
        "local": {"kind": "PDCluster", "name": "west"},
        "remote": {"kind": "PrfaaSCluster", "namespace": namespace, "name": "east"},
        "peer": {"clusterID": "here", "exchangeNamespace": namespace, "source": {"local": {}}} | peer,
        "network": {"line": "east-west", "capacity": "100G"},
        "encryption": {"control": "MutualTLS", "requests": "None", "kv": "None"},
        "probe": {"period": "1s", "timeout": "1s", "failureThreshold": 1},
    }


async def reconcile(world: World, key: Key) -> Result:
    """Each kind by its own."""
    of = {
        "PrfaaSCluster": prfaas_cluster.reconcile,
        "PDCluster": pd_cluster.reconcile,
        KIND: inter_cluster_link.reconcile,
    }
    return await of[key.kind](world, key)


@pytest.fixture
async def bench(apiserver: ApiServer, client: Hand, namespace: str) -> AsyncIterator[Bench]:
    """Both pools are there, and east publishes two instances."""
    async with PeerRegistry(client, lambda _: None) as peers:
        each = Bench.create(apiserver, client, namespace, reconcile, peers=peers)
        await each.place("PrfaaSCluster", "east", here.PRFAAS_CLUSTER | {"instances": 2})
        await each.place("PDCluster", "west", here.PD_CLUSTER | {"router": {"replicas": 0}})
        await publish(each, {"east-0-pod": "10.1.0.1", "east-1-pod": "10.1.0.2"})
        await each.settle("PDCluster", "west")
        yield each


async def publish(bench: Bench, addresses: dict[str, str], *, unready: str = "") -> None:
    """What the endpoints controller would show of east's pods; then east publishes it."""
    spec = (await bench.own("PrfaaSCluster", "east"))["spec"]
    key = compatibility_key(PrfaaSClusterSpec.model_validate(spec))
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "east-prefill-x",
            "namespace": bench.namespace,
            # Those of the Service, which Kubernetes copies.
            "labels": {
                "prfaas.io/cluster": "east",
                "prfaas.io/kind": "prfaascluster",
                "prfaas.io/role": "prefill",
                "prfaas.io/compatibility-key": key,
            },
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}, {"name": "kv", "port": 5600}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": name != unready},
                "targetRef": {"kind": "Pod", "name": name},
            }
            for name, address in addresses.items()
        ],
    }
    await bench.client.apply(body, field_manager="endpoints")
    await bench.settle("PrfaaSCluster", "east")


async def joined(bench: Bench, **peer: Any) -> None:
    """Places the link and reconciles it until it is Ready."""
    await bench.place(KIND, "to-east", link(bench.namespace, **peer))
    await until(bench, "Ready", "True")


async def until(bench: Bench, condition: str, status: str) -> None:
    async def check() -> bool:
        await bench.run(KIND, "to-east")
        return (await bench.conditions(KIND, "to-east")).get(condition, ("",))[0] == status

    await eventually(check, what=f"{condition} is {status}")


async def mirrored(bench: Bench) -> dict[str, bool]:
    """Address -> ready, in the mirror's slices."""
    selector = "kubernetes.io/service-name=to-east-remote-prefill"
    slices = (await bench.client.list(ENDPOINT_SLICE, bench.namespace, labels=selector)).items
    return {
        endpoint["addresses"][0]: endpoint["conditions"]["ready"] for each in slices for endpoint in each["endpoints"]
    }


async def test_the_peers_prefill_endpoints_are_mirrored(bench: Bench) -> None:
    await joined(bench)
    assert await mirrored(bench) == {"10.1.0.1": True, "10.1.0.2": True}
    service = await bench.client.get(SERVICE, "to-east-remote-prefill", bench.namespace)
    assert "selector" not in service["spec"]
    status = (await bench.own(KIND, "to-east"))["status"]
    assert (status["endpoints"], status["peer"]["clusterID"]) == (2, "here")
    assert (await bench.conditions(KIND, "to-east"))["Encrypted"] == ("False", "DeclaredNone")


async def test_reconciling_twice_writes_nothing(bench: Bench) -> None:
    await joined(bench)
    await bench.settle(KIND, "to-east")
    before, mark = await bench.versions(), bench.server.audit.mark()
    await bench.run(KIND, "to-east")
    assert bench.writes_since(mark) == []
    assert await bench.versions() == before


async def test_a_restarted_operator_writes_nothing_before_and_after_it_knows_the_peer(bench: Bench) -> None:
    await joined(bench)
    mark = bench.server.audit.mark()
    async with PeerRegistry(bench.client, lambda _: None) as peers:
        fresh = Bench.create(bench.server, bench.client, bench.namespace, reconcile, peers=peers, epoch=2)
        await fresh.run(KIND, "to-east")
        key = key_for(KIND, bench.namespace, "to-east")

        async def read() -> bool:
            return peers.snapshot(key).read

        await eventually(read)
        await fresh.run(KIND, "to-east")
        assert bench.writes_since(mark) == []


async def test_a_change_at_the_peer_is_followed(bench: Bench) -> None:
    await joined(bench)
    await publish(bench, {"east-0-pod": "10.1.0.9"})

    async def followed() -> bool:
        await bench.run(KIND, "to-east")
        return await mirrored(bench) == {"10.1.0.9": True}

    await eventually(followed)


async def test_the_pd_pool_is_told_and_says_that_remote_prefill_is_there(bench: Bench) -> None:
    await bench.edit("PDCluster", "west", {"remotePrefill": [{"linkRef": "to-east", "initialThreshold": 100}]})
    await joined(bench)
    assert key_for("PDCluster", bench.namespace, "west") in bench.enqueued
    await bench.settle("PDCluster", "west")
    assert (await bench.conditions("PDCluster", "west"))["RemotePrefillAvailable"] == ("True", "Available")


async def test_an_instance_that_becomes_ready_at_the_peer_has_the_pool_looked_at(bench: Bench) -> None:
    await bench.edit("PDCluster", "west", {"remotePrefill": [{"linkRef": "to-east", "initialThreshold": 100}]})
    both = {"east-0-pod": "10.1.0.1", "east-1-pod": "10.1.0.2"}
    await publish(bench, both, unready="east-1-pod")
    await joined(bench)
    await bench.settle(KIND, "to-east")
    before = (await bench.own(KIND, "to-east"))["status"]
    await publish(bench, both)

    async def followed() -> bool:
        bench.enqueued.clear()
        await bench.run(KIND, "to-east")
        return await mirrored(bench) == {"10.1.0.1": True, "10.1.0.2": True}

    await eventually(followed)
    assert (await bench.own(KIND, "to-east"))["status"] == before, "the slices alone tell"
    assert key_for("PDCluster", bench.namespace, "west") in bench.enqueued


async def test_another_model_is_not_mirrored(bench: Bench) -> None:
    await joined(bench)
    alone = {"model": {"name": "another/model"}, "rollout": {"pairing": "Independent"}}
    await bench.edit("PDCluster", "west", alone)
    await bench.settle("PDCluster", "west")
    await until(bench, "Compatible", "False")
    assert await mirrored(bench) == {}
    conditions = await bench.conditions(KIND, "to-east")
    assert conditions["Compatible"] == ("False", "ModelMismatch")
    assert conditions["Ready"] == ("False", "ModelMismatch")


async def test_a_pool_that_is_gone_at_the_other_end_withdraws_the_endpoints(bench: Bench) -> None:
    await joined(bench)
    await bench.client.delete(PRFAAS_CLUSTER, "east", bench.namespace)
    await bench.run("PrfaaSCluster", "east")
    await until(bench, "Compatible", "False")
    assert (await bench.conditions(KIND, "to-east"))["Compatible"] == ("False", "RemoteNotPublished")
    assert await mirrored(bench) == {}


async def test_a_pool_that_is_not_there_at_this_end_is_named(bench: Bench) -> None:
    spec = link(bench.namespace) | {"local": {"kind": "PDCluster", "name": "nowhere"}}
    await bench.place(KIND, "to-east", spec)
    await until(bench, "Accepted", "False")
    assert "nowhere" in await bench.message(KIND, "to-east", "Accepted")


async def test_paused_leaves_the_mirror_as_it_is(bench: Bench) -> None:
    await joined(bench)
    await bench.edit(KIND, "to-east", {"paused": True})
    await publish(bench, {"east-0-pod": "10.1.0.9"})

    async def seen() -> bool:
        await bench.run(KIND, "to-east")
        key = key_for(KIND, bench.namespace, "to-east")
        document = bench.world.peers.snapshot(key).config_map
        return document is not None and "10.1.0.9" in document["data"]["document.json"]

    await eventually(seen)
    await bench.run(KIND, "to-east")
    assert await mirrored(bench) == {"10.1.0.1": True, "10.1.0.2": True}
    assert (await bench.conditions(KIND, "to-east"))["Reconciling"] == ("False", "Paused")


async def test_a_deleted_link_stops_reading_and_leaves_its_children_to_the_cluster(bench: Bench) -> None:
    await joined(bench)
    uid = (await bench.own(KIND, "to-east"))["metadata"]["uid"]
    service = await bench.client.get(SERVICE, "to-east-remote-prefill", bench.namespace)
    assert [reference["uid"] for reference in service["metadata"]["ownerReferences"]] == [uid]
    await bench.edit("PDCluster", "west", {"remotePrefill": [{"linkRef": "to-east", "initialThreshold": 100}]})
    await bench.client.delete(INTER_CLUSTER_LINK, "to-east", bench.namespace)
    bench.enqueued.clear()
    mark = bench.server.audit.mark()
    await bench.run(KIND, "to-east")
    assert bench.writes_since(mark) == []
    pools = {key_for("PDCluster", bench.namespace, "west"), key_for("PrfaaSCluster", bench.namespace, "east")}
    assert set(bench.enqueued) == pools, "who names the link is told, and who may be its end"
    assert not bench.world.peers.snapshot(key_for(KIND, bench.namespace, "to-east")).read


async def test_with_a_kubeconfig_the_secret_decides(bench: Bench) -> None:
    source = {"kubeConfigSecretRef": {"name": "peer", "key": "kubeconfig"}}
    await bench.place(KIND, "to-east", link(bench.namespace, source=source))
    await until(bench, "CredentialsValid", "False")
    assert (await bench.conditions(KIND, "to-east"))["CredentialsValid"] == ("False", "SecretNotFound")

    def secret(document: dict[str, Any]) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "peer", "namespace": bench.namespace},
            "data": {"kubeconfig": base64.b64encode(yaml.safe_dump(document).encode()).decode()},
        }

    good = bench.server.kubeconfig_for("admin")
    cluster = good["clusters"][0]["cluster"]
    ca = base64.b64encode(bench.server.ca_file.read_bytes()).decode()
    good["clusters"][0]["cluster"] = {"server": cluster["server"], "certificate-authority-data": ca}
    await bench.client.create(secret(good))
    await until(bench, "Ready", "True")
    assert await mirrored(bench) == {"10.1.0.1": True, "10.1.0.2": True}

    claims = base64.urlsafe_b64encode(b'{"exp": 1893456000}').decode().rstrip("=")
    assert "credentialsExpireAt" not in (await bench.own(KIND, "to-east"))["status"]
    good["users"][0]["user"] = {"token": f"e30.{claims}.unknown"}
    await bench.client.apply(secret(good), field_manager="test")
    await until(bench, "CredentialsValid", "False")
    assert (await bench.conditions(KIND, "to-east"))["CredentialsValid"] == ("False", "Unauthorized")
    assert (await bench.own(KIND, "to-east"))["status"]["credentialsExpireAt"] == "2030-01-01T00:00:00Z"
    assert (await bench.conditions(KIND, "to-east"))["EndpointsMirrored"] == ("Unknown", "LastKnown")
    assert await mirrored(bench) == {"10.1.0.1": True, "10.1.0.2": True}, "the last known endpoints stay"

    await bench.client.delete(SECRET, "peer", bench.namespace)
    await bench.run(KIND, "to-east")
    assert await mirrored(bench) == {"10.1.0.1": True, "10.1.0.2": True}


async def test_what_could_not_be_written_is_not_said_to_be_mirrored(bench: Bench) -> None:
    (published,) = (await bench.own("PrfaaSCluster", "east"))["status"]["groups"]
    name = f"to-east-remote-prefill-{published['compatibilityKey'][:10]}-ipv4-8000-0"
    foreign = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": bench.namespace},
        "addressType": "IPv4",
        "endpoints": [],
    }
    await bench.client.create(foreign)
    await bench.place(KIND, "to-east", link(bench.namespace))
    await until(bench, "EndpointsMirrored", "False")
    assert (await bench.conditions(KIND, "to-east"))["EndpointsMirrored"] == ("False", "APIError")
    assert name in await bench.message(KIND, "to-east", "EndpointsMirrored")
    assert (await bench.own(KIND, "to-east"))["status"]["endpoints"] == 0

    await bench.client.delete(ENDPOINT_SLICE, name, bench.namespace)
    await until(bench, "EndpointsMirrored", "True")
    assert (await bench.own(KIND, "to-east"))["status"]["endpoints"] == 2


async def test_a_document_that_is_nonsense_is_said_and_mirrors_nothing(bench: Bench) -> None:
    await joined(bench)
    name = f"prfaascluster.{bench.namespace}.east"
    await bench.client.patch_merge(CONFIG_MAP, name, bench.namespace, {"data": {"document.json": "[1"}})
    await until(bench, "Compatible", "False")
    assert (await bench.conditions(KIND, "to-east"))["Compatible"] == ("False", "DocumentInvalid")
