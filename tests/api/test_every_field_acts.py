"""A field that is there works: whatever of a spec changes, something that the operator does changes with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from prfaas.api import labels
from prfaas.api.conditions import Reason
from prfaas.api.crd import object_schema
from prfaas.api.inter_cluster_link import InterClusterLink
from prfaas.api.kinds import KINDS
from prfaas.api.pd_cluster import PDCluster
from prfaas.api.pool import PoolSpec
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.api.schema import leaves
from prfaas.kube.kubeconfig import Credentials, write_kubeconfig
from prfaas.links.assess import assess
from prfaas.links.contact import NotConnected
from prfaas.links.peer import PeerSnapshot, peer_config
from prfaas.operator.policy import wanted_policy
from prfaas.workloads import model, wanted
from prfaas.workloads.engine import compatibility_key
from prfaas.workloads.meta import Owner
from prfaas.workloads.model import Fetcher, Place
from prfaas.workloads.router import RouterSettings
from tests.api.documents import EXAMPLES, Document, example

SETTINGS = RouterSettings(operator_image="operator", envoy_image="envoy", cluster_role="router")
ELSEWHERE = {
    "spec.network.line": "a column of `kubectl get`: test_kubectl.py",
    "spec.network.capacity": "a column of `kubectl get`: test_kubectl.py",
    "spec.network.external.[*]": "for people alone, as its description says",
    "spec.local.kind": "changes with remote.kind alone: below",
    "spec.remote.kind": "changes with local.kind alone: below",
    "spec.encryption.control": "changes with peer.source alone: below",
    "spec.encryption.requests": "one value so far",
    "spec.encryption.kv": "one value so far",
    "spec.peer.source.local": "what it excludes is tried instead; as a whole: tests of links",
    "spec.peer.source.kubeConfigSecretRef.name": "the reconcile: tests of the operator",
    "spec.peer.source.kubeConfigSecretRef.key": "the reconcile: tests of the operator",
    "spec.rollout.pairing": "the instance plan: tests of the operator, test_rollout.py",
    "spec.model.cache.persistentVolumeClaim.claimName": "what it excludes is tried instead: below",
    "spec.model.cache.ephemeral.sizeLimit": "what it excludes is tried instead: below",
    "spec.paused": "the reconcile: tests of the operator",
    "spec.engine.parallelism.tensor": "changes with parallelism.pipeline alone: below",
    "spec.engine.parallelism.data": "changes with parallelism.tensor alone: below",
    "spec.nodePool.accelerator": "a column of `kubectl get`: test_kubectl.py",
    "spec.remotePrefill.[].minThreshold": "a bound: test_rules.py",
    "spec.remotePrefill.[].maxThreshold": "a bound: test_rules.py",
    "spec.pool.prefill.min": "a bound: test_pools.py",
    "spec.pool.prefill.max": "a bound: test_pools.py",
    "spec.pool.decode.min": "a bound: test_pools.py",
    "spec.pool.decode.max": "a bound: test_pools.py",
}
"""Fields whose effect is not in what pure functions make of a spec, and where it is."""
KUBECONFIG = write_kubeconfig(Credentials("https://peer.example.com", token="secret"), name="peer", namespace="x")


def effects(document: Document) -> Any:
    """All that the operator makes of a spec: of a pool counts, objects, policy and the key that peers compare; of a
    link how its peer is read, and what is said about it."""
    cluster = KINDS[document["kind"]].model_validate(document)
    if isinstance(cluster, InterClusterLink):
        reading = peer_config(cluster.spec, KUBECONFIG.encode())
        lost = PeerSnapshot(NotConnected(Reason.UNREACHABLE, "", datetime(2026, 1, 2, tzinfo=UTC)))
        return reading, assess(cluster.spec, lost, None).findings
    owner = Owner.of(cluster)
    if isinstance(cluster, PrfaaSCluster):
        instances = {"full-0": labels.ROLE_PREFILL}
        objects = wanted.prfaas_cluster(owner, cluster.spec, instances) + jobs(owner, cluster.spec)
        return cluster.spec.instances, objects, compatibility_key(cluster.spec)
    assert isinstance(cluster, PDCluster)
    instances = {"full-0": labels.ROLE_PREFILL, "full-1": labels.ROLE_DECODE}
    policy = wanted_policy(cluster, None, 1)
    objects = wanted.pd_cluster(owner, cluster.spec, instances, SETTINGS, policy) + jobs(owner, cluster.spec)
    pool = cluster.spec.pool
    return pool.instances, pool.prefill_instances(), objects, compatibility_key(cluster.spec)


def jobs(owner: Owner, spec: PoolSpec) -> list[dict[str, Any]]:
    """What fetches the model to one node."""
    return [model.job(owner, spec, Place("node"), Fetcher("operator"))] if model.shared(spec.model.cache) else []


def other_values(value: Any, schema: dict[str, Any]) -> Iterator[Any]:
    """Values that might stand in a value's place."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, value * 2, value // 2)
    elif isinstance(value, dict):
        yield {**value, "hostNetwork": True}
    elif "enum" in schema:
        yield from (each for each in schema["enum"] if each != value)
    else:
        yield from (f"{value}x", "7m", "3s", "7", "7Gi")


def pairs_at(document: Document, place: tuple[Any, ...], schema: dict[str, Any]) -> Iterator[tuple[Document, Document]]:
    """Two valid documents that differ in the value at one place.

    Where no other value fits with what stands beside it, one thing beside it is left out of both.
    """
    parent = at(document, place[:-1])
    beside = [name for name in parent if name != place[-1]] if isinstance(parent, dict) else []
    for left_out in (None, *beside):
        before = copy.deepcopy(document)
        if left_out is not None:
            del at(before, place[:-1])[left_out]
        for value in other_values(at(document, place), schema):
            after = copy.deepcopy(before)
            at(after, place[:-1])[place[-1]] = value
            if valid(before) and valid(after):
                yield before, after


def at(document: Any, place: tuple[Any, ...]) -> Any:
    """What stands at a place."""
    for step in place:
        document = document[step]
    return document


def valid(document: Document) -> bool:
    """Whether our models accept it."""
    try:
        KINDS[document["kind"]].model_validate(document)
    except ValidationError:
        return False
    return True


def placed(document: Document) -> Document:
    """A full example as the API server would hand it out, without status."""
    metadata = {**document["metadata"], "namespace": "default", "uid": "uid"}
    return {**{name: value for name, value in document.items() if name != "status"}, "metadata": metadata}


def places(value: Any, path: tuple[str, ...], so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a schema path leads to in a document."""
    if not path:
        yield so_far
    elif path[0] == "[]":
        for index, item in enumerate(value):
            yield from places(item, path[1:], (*so_far, index))
    elif path[0] == "[*]":
        for key, item in value.items():
            yield from places(item, path[1:], (*so_far, key))
    elif path[0] in value:
        yield from places(value[path[0]], path[1:], (*so_far, path[0]))


def fields() -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Kind, path and schema of every field."""
    for kind in KINDS:
        for path, schema in leaves(object_schema(KINDS[kind])["properties"]["spec"], ("spec",)):
            yield kind, path, schema


FIELDS = [(kind, path, schema) for kind, path, schema in fields() if ".".join(path) not in ELSEWHERE]


@pytest.mark.parametrize(("kind", "path", "schema"), FIELDS, ids=[f"{kind} {'.'.join(p)}" for kind, p, _ in FIELDS])
def test_a_change_of_the_field_changes_something(kind: str, path: tuple[str, ...], schema: dict[str, Any]) -> None:
    pairs = []
    for document in map(placed, EXAMPLES[kind]):
        found = [next(pairs_at(document, place, schema), None) for place in places(document, path)]
        pairs += [pair for pair in found if pair is not None]

    assert pairs, "no other value fits anywhere"
    assert all(effects(before) != effects(after) for before, after in pairs)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"spec.local.kind": "PrfaaSCluster", "spec.remote.kind": "PDCluster"}),
        (
            {"spec.peer.source": {"local": {}}},
            {"spec.peer.source": {"local": {}}, "spec.encryption.control": "None"},
        ),
    ],
    ids=["kinds", "encryption.control"],
)
def test_a_change_of_fields_that_go_together_changes_something(before: Document, after: Document) -> None:
    names = {"metadata.namespace": "default", "metadata.uid": "uid"}

    assert effects(example("InterClusterLink", before | names)) != effects(example("InterClusterLink", after | names))


@pytest.mark.parametrize("kind", ["PrfaaSCluster", "PDCluster"])
def test_a_change_of_parallelism_changes_something(kind: str) -> None:
    parts = ({"tensor": 16}, {"tensor": 8, "pipeline": 2}, {"tensor": 8, "data": 2}, {"tensor": 4, "data": 4})
    names = {"metadata.namespace": "default", "metadata.uid": "uid", "spec.nodesPerInstance": 1}

    found = [effects(example(kind, {**names, "spec.engine.parallelism": part})) for part in parts]

    assert all(one != other for index, one in enumerate(found) for other in found[:index])


@pytest.mark.parametrize("kind", ["PrfaaSCluster", "PDCluster"])
def test_a_change_of_where_the_model_is_kept_changes_something(kind: str) -> None:
    caches: tuple[Document, ...] = (
        {"persistentVolumeClaim": {"claimName": "one"}},
        {"persistentVolumeClaim": {"claimName": "other"}},
        {"ephemeral": {}},
        {"ephemeral": {"sizeLimit": "200Gi"}},
        {"ephemeral": {"sizeLimit": 1000}},
    )
    names = {"metadata.namespace": "default", "metadata.uid": "uid"}

    found = [effects(example(kind, {**names, "spec.model.cache": cache})) for cache in caches]

    assert all(one != other for index, one in enumerate(found) for other in found[:index])
