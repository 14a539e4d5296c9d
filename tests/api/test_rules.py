"""Every rule, with an example that it accepts and one that it rejects, before our models and before the API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError

from e2e.apiserver import ApiServer
from prfaas.api.crd import object_schema
from prfaas.api.kinds import KINDS
from prfaas.api.model import ENDPOINT, HOST_PATH, SOURCE
from prfaas.api.schema import Schema
from tests.api.documents import REMOVE, collection, example


@dataclass(frozen=True)
class Case:
    """Changes to the full example of a kind that a rule accepts, and that it rejects with a message."""

    kind: str
    message: str
    accepted: Mapping[str, Any]
    rejected: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


LONG_NAME = "metadata.name may have at most 40 characters: names of children add to it"
ONE_SOURCE = "exactly one of secretKeyRef, configMapKeyRef and fieldRef is required"
MULTIPLE = (
    "gpusPerInstance must be a multiple of nodesPerInstance: every node of an instance has the same number of GPUs"
)
BAD_NAME = "should match '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'"
BAD_DURATION = "should match '^([0-9]{1,4}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?$'"
BAD_QUANTITY = r"should match '^[0-9]{1,18}(\.[0-9]{1,9})?([numkMGTPE]|[KMGTPE]i)?$'"
BAD_BANDWIDTH = r"should match '^[0-9]{1,15}(\.[0-9]{1,3})?[kMGT]?$'"


def of_every_kind() -> list[Case]:
    """Rules of every object."""
    return [Case(kind, LONG_NAME, {"metadata.name": "n" * 40}, {"metadata.name": "n" * 41}) for kind in KINDS]


def of_both_pools(kind: str) -> list[Case]:
    """Rules of every pool."""
    secret, config_map = {"name": "a", "key": "b"}, {"name": "c", "key": "d"}
    return [
        Case(kind, MULTIPLE, {"spec.gpusPerInstance": 18}, {"spec.gpusPerInstance": 17}),
        Case(
            kind,
            "value and valueFrom exclude each other",
            {"spec.engine.env.0": {"name": "NEITHER"}},
            {"spec.engine.env.0": {"name": "BOTH", "value": "", "valueFrom": {"secretKeyRef": secret}}},
        ),
        Case(
            kind,
            ONE_SOURCE,
            {"spec.engine.env.0": {"name": "ONE", "valueFrom": {"configMapKeyRef": config_map}}},
            {
                "spec.engine.env.0": {
                    "name": "TWO",
                    "valueFrom": {"configMapKeyRef": config_map, "secretKeyRef": secret},
                }
            },
        ),
        Case(
            kind,
            ONE_SOURCE,
            {"spec.engine.env.0": {"name": "ONE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}},
            {"spec.engine.env.0": {"name": "NONE", "valueFrom": {}}},
        ),
        Case(
            kind,
            "Duplicate value",
            {"spec.engine.env": [{"name": "A"}, {"name": "B"}]},
            {"spec.engine.env": [{"name": "A"}, {"name": "A"}]},
        ),
        Case(
            kind,
            "a toleration without key tolerates everything and needs operator Exists",
            {"spec.nodePool.tolerations.0": {"operator": "Exists"}},
            {"spec.nodePool.tolerations.0": {"value": "x"}},
        ),
        Case(
            kind,
            "a toleration with operator Exists takes no value",
            {"spec.nodePool.tolerations.0": {"key": "k", "operator": "Exists"}},
            {"spec.nodePool.tolerations.0": {"key": "k", "operator": "Exists", "value": "v"}},
        ),
        Case(
            kind,
            "tolerationSeconds needs effect NoExecute",
            {"spec.nodePool.tolerations.0": {"key": "k", "effect": "NoExecute", "tolerationSeconds": 0}},
            {"spec.nodePool.tolerations.0": {"key": "k", "tolerationSeconds": 0}},
        ),
        Case(kind, BAD_DURATION, {"spec.engine.startupDeadline": "90s"}, {"spec.engine.startupDeadline": "1.5h"}),
        *of_models(kind),
        *of_engines(kind),
        Case(
            kind,
            BAD_QUANTITY,
            {"spec.engine.resources.requests.cpu": "1500m"},
            {"spec.engine.resources.requests.cpu": "-1"},
        ),
    ]


def of_engines(kind: str) -> list[Case]:
    """Rules about engines and the network of their KV cache."""
    image = {"image": "registry.example/engine:1"}
    all_gpus = "engine.parallelism must use all GPUs of an instance: tensor * pipeline * data = gpusPerInstance"
    lease_of_nixl = "kvLease is a setting of vLLM's NIXL connector: leave it out for other engines and connectors"
    no_limits = (
        "SGLang has no queue limits where prefill and decode are apart: leave maxQueuedRequests and maxQueuedTokens out"
    )
    one_copy = (
        "engine.parallelism.data must be 1 where nodesPerInstance is above 1: only the first node answers requests"
    )
    with_secondary = "attachment and interface go with exposure Secondary, and only with it"
    second = {"exposure": "Secondary", "attachment": "line", "interface": "net1"}
    return [
        Case(
            kind,
            "kvEvents needs prefixCaching: the events are about the blocks of the prefix cache",
            {"spec.engine": {**image, "prefixCaching": False, "kvEvents": False}},
            {"spec.engine": {**image, "prefixCaching": False}},
        ),
        Case(
            kind,
            "kvLease must be at least 30s: three times the 10s after which routers leave a silent instance",
            {"spec.engine.kvLease": "30s"},
            {"spec.engine.kvLease": "29s"},
        ),
        Case(
            kind,
            lease_of_nixl,
            {"spec.engine": {**image, "kvLease": "1m"}},
            {"spec.engine": {**image, "kvLease": "1m", "connector": "Mooncake"}},
        ),
        Case(
            kind,
            lease_of_nixl,
            {"spec.engine": {**image, "kind": "SGLang"}},
            {"spec.engine": {**image, "kvLease": "1m", "kind": "SGLang"}},
        ),
        Case(
            kind,
            "lanes are TCP connections: leave them out for transport RDMA",
            {"spec.engine": {**image, "lanes": 4}},
            {"spec.engine": {**image, "lanes": 4, "transport": "RDMA"}},
        ),
        Case(
            kind,
            no_limits,
            {"spec.engine": {**image, "maxQueuedRequests": 4}},
            {"spec.engine": {**image, "maxQueuedRequests": 4, "kind": "SGLang"}},
        ),
        Case(
            kind,
            no_limits,
            {"spec.engine": {**image, "maxQueuedTokens": 4}},
            {"spec.engine": {**image, "maxQueuedTokens": 4, "kind": "SGLang"}},
        ),
        Case(
            kind,
            all_gpus,
            {"spec.engine.parallelism": {"tensor": 4, "pipeline": 4}},
            {"spec.engine.parallelism": {"tensor": 4, "pipeline": 2}},
        ),
        Case(kind, all_gpus, {"spec.engine.parallelism": {}}, {"spec.engine.parallelism": {"pipeline": 3}}),
        Case(
            kind,
            one_copy,
            {"spec.engine.parallelism": {"data": 2}, "spec.nodesPerInstance": 1},
            {"spec.engine.parallelism": {"data": 2}},
        ),
        Case(kind, with_secondary, {"spec.network": second}, {"spec.network": {**second, "exposure": "PodIP"}}),
        Case(kind, with_secondary, {"spec.network": {}}, {"spec.network": {"interface": "net1"}}),
        Case(
            kind,
            with_secondary,
            {"spec.network": {"exposure": "HostNetwork"}},
            {"spec.network": {"exposure": "Secondary", "attachment": "line"}},
        ),
        Case(
            kind,
            "should match '^[a-z0-9][a-z0-9_]*$'",
            {"spec.engine.kvCacheDtype": "fp8_e4m3"},
            {"spec.engine.kvCacheDtype": "FP8"},
        ),
        Case(
            kind,
            "should match '^[A-Za-z][A-Za-z0-9_]*$'",
            {"spec.engine.attentionBackend": "FLASH_ATTN_MLA"},
            {"spec.engine.attentionBackend": "FLASH-ATTN"},
        ),
        Case(
            kind,
            "should match '^[A-Za-z0-9][-A-Za-z0-9_.]*$'",
            {"spec.network.interface": "eth0.100"},
            {"spec.network.interface": "net/1"},
        ),
        Case(
            kind,
            "should match '^([a-z0-9][-a-z0-9]*/)?[a-z0-9][-a-z0-9.]*$'",
            {"spec.network.attachment": "line"},
            {"spec.network.attachment": "a/b/c"},
        ),
        Case(
            kind,
            "Duplicate value",
            {"spec.engine.imagePullSecrets": [{"name": "a"}]},
            {"spec.engine.imagePullSecrets": [{"name": "a"}, {"name": "a"}]},
        ),
        Case(
            kind,
            "Duplicate value",
            {"spec.nodePool.resourceClaims": [{"name": "a", "resourceClaimTemplateName": "t"}]},
            {"spec.nodePool.resourceClaims": [{"name": "a", "resourceClaimTemplateName": "t"}] * 2},
        ),
    ]


def of_models(kind: str) -> list[Case]:
    """Rules about where a model comes from and is kept."""
    model = {"name": "org/model"}
    cache: dict[str, Any] = {"ephemeral": {}}
    fetched = {**model, "source": "hf://org/model", "cache": cache}
    claim = {**model, "source": "pvc://models/org/model"}
    one_cache = "exactly one of persistentVolumeClaim, hostPath and ephemeral is required"
    needs_source = (
        "cache needs a source of hf:// or s3://: a claim is mounted as it is, "
        "and without source the model is in the image"
    )
    return [
        Case(
            kind,
            "a source of hf:// or s3:// needs cache: where the model is kept",
            {"spec.model": claim},
            {"spec.model": {**model, "source": "s3://models/org/model"}},
        ),
        Case(kind, needs_source, {"spec.model": fetched}, {"spec.model": {**model, "cache": cache}}),
        Case(kind, needs_source, {"spec.model": model}, {"spec.model": {**claim, "cache": cache}}),
        Case(
            kind,
            "secretRef needs a source of hf:// or s3://",
            {"spec.model": {**fetched, "secretRef": {"name": "token"}}},
            {"spec.model": {**claim, "secretRef": {"name": "token"}}},
        ),
        Case(
            kind,
            "endpoint needs a source of hf:// or s3://",
            {"spec.model": {**fetched, "endpoint": "http://10.0.0.1:9000/hf/"}},
            {"spec.model": {**model, "endpoint": "http://10.0.0.1:9000/hf/"}},
        ),
        Case(
            kind,
            one_cache,
            {"spec.model.cache": {"hostPath": {"path": "/models"}}},
            {"spec.model.cache": {"hostPath": {"path": "/models"}, "ephemeral": {}}},
        ),
        Case(
            kind,
            one_cache,
            {"spec.model.cache": {"persistentVolumeClaim": {"claimName": "models"}}},
            {"spec.model.cache": {}},
        ),
        *(
            Case(kind, f"should match '{SOURCE}'", {"spec.model.source": right}, {"spec.model.source": wrong})
            for right, wrong in (
                ("hf://Org-1/Model_7B.v2", "hf://model-without-org"),
                ("hf://org/model", "https://huggingface.co/org/model"),
                ("s3://models", "s3:///prefix"),
                ("s3://models/a/b=c/d/", "s3://models/a/../b"),
            )
        ),
        Case(
            kind,
            f"should match '{SOURCE}'",
            {"spec.model": claim},
            {"spec.model": {**model, "source": "pvc://models/../secrets"}},
        ),
        Case(
            kind,
            f"should match '{ENDPOINT}'",
            {"spec.model.endpoint": "http://store:9000"},
            {"spec.model.endpoint": "https://user:password@store.example.com"},
        ),
        Case(
            kind,
            f"should match '{HOST_PATH}'",
            {"spec.model.cache.hostPath.path": "/var/lib/models.d"},
            {"spec.model.cache.hostPath.path": "/var/lib/../../etc"},
        ),
    ]


PD = "PDCluster"
POOL_OF_PD = [
    Case(
        PD,
        "instances must be 0 (the pool is off) or at least prefill.min + decode.min",
        {"spec.pool.instances": 5},
        {"spec.pool.instances": 4},
    ),
    Case(
        PD,
        "instances must be 0 (the pool is off) or at least prefill.min + decode.min",
        {"spec.pool.instances": 0},
        {"spec.pool.instances": 1},
    ),
    Case(
        PD,
        "instances may not be above prefill.max + decode.max",
        {"spec.pool.instances": 10},
        {"spec.pool.instances": 11},
    ),
    Case(PD, "min may not be above max", {"spec.pool.prefill.max": 3}, {"spec.pool.prefill.max": 1}),
    Case(PD, "min may not be above max", {"spec.pool.decode.max": REMOVE}, {"spec.pool.decode.max": 2}),
    Case(
        PD,
        "initialPrefill may not be below prefill.min",
        {"spec.pool.initialPrefill": 2},
        {"spec.pool.initialPrefill": 1},
    ),
    Case(
        PD,
        "initialPrefill may not be above prefill.max",
        {"spec.pool.initialPrefill": 4},
        {"spec.pool.initialPrefill": 5},
    ),
    Case(
        PD,
        "initialThreshold may not be below minThreshold",
        {"spec.remotePrefill.0.minThreshold": 19400},
        {"spec.remotePrefill.0.minThreshold": 19401},
    ),
    Case(
        PD,
        "initialThreshold may not be above maxThreshold",
        {"spec.remotePrefill.0.maxThreshold": 19400},
        {"spec.remotePrefill.0.maxThreshold": 19399},
    ),
    Case(
        PD,
        "Duplicate value",
        {"spec.remotePrefill.1.linkRef": "to-south"},
        {"spec.remotePrefill.1.linkRef": "to-east"},
    ),
    Case(
        PD,
        "nodePort needs type NodePort",
        {"spec.router.service": {"type": "ClusterIP"}},
        {"spec.router.service": {"type": "ClusterIP", "nodePort": 30080}},
    ),
]

LINK = "InterClusterLink"
SECRET_REF = {"name": "east-peer", "key": "config"}
OF_LINK = [
    Case(
        LINK,
        "exactly one of kubeConfigSecretRef and local is required",
        {"spec.peer.source": {"local": {}}},
        {"spec.peer.source": {"local": {}, "kubeConfigSecretRef": SECRET_REF}},
    ),
    Case(
        LINK,
        "exactly one of kubeConfigSecretRef and local is required",
        {"spec.peer.source": {"kubeConfigSecretRef": SECRET_REF}},
        {"spec.peer.source": {}},
    ),
    Case(
        LINK,
        "a link joins a PrfaaSCluster and a PDCluster: local.kind and remote.kind must differ",
        {"spec.local.kind": "PrfaaSCluster", "spec.remote.kind": "PDCluster"},
        {"spec.local.kind": "PrfaaSCluster"},
    ),
    Case(
        LINK,
        "encryption.control may be None only with peer.source.local: another API server is read over TLS alone",
        {"spec.peer.source": {"local": {}}, "spec.encryption.control": "None"},
        {"spec.encryption.control": "None"},
    ),
    Case(
        LINK,
        "period must be at least 1s",
        {"spec.probe.period": "1s", "spec.probe.timeout": "1s"},
        {"spec.probe.period": "0s"},
    ),
    Case(
        LINK,
        "timeout must be at least 1s and not above period",
        {"spec.probe.timeout": "20s"},
        {"spec.probe.timeout": "21s"},
    ),
    Case(
        LINK,
        "timeout must be at least 1s and not above period",
        {"spec.probe.timeout": "1s"},
        {"spec.probe.timeout": "0s"},
    ),
    Case(LINK, BAD_NAME, {"spec.network.line": "metro-2"}, {"spec.network.line": "Metro 2"}),
    Case(LINK, BAD_BANDWIDTH, {"spec.network.capacity": "1.5G"}, {"spec.network.capacity": "100Gi"}),
]

CASES = [*of_every_kind(), *of_both_pools("PrfaaSCluster"), *of_both_pools(PD), *POOL_OF_PD, *OF_LINK]

UPDATES = [
    Case(
        "PrfaaSCluster",
        "nodesPerInstance cannot be changed",
        {"spec.gpusPerInstance": 32},
        {"spec.nodesPerInstance": 4},
    ),
    Case(PD, "nodesPerInstance cannot be changed", {"spec.gpusPerInstance": 32}, {"spec.nodesPerInstance": 1}),
    Case(
        LINK,
        "local cannot be changed: make another link",
        {"spec.network.capacity": "1G"},
        {"spec.local.name": "other"},
    ),
    Case(
        LINK, "remote cannot be changed: make another link", {"spec.paused": False}, {"spec.remote.namespace": "other"}
    ),
]
"""Rules about a change: both sides are updates of the full example."""

ENCRYPTION = ("control", "requests", "kv")


def rules_of(schema: Schema) -> set[str]:
    """Messages of every CEL rule of a schema."""
    found = {each["message"] for each in schema.get("x-kubernetes-validations", [])}
    children = [*schema.get("properties", {}).values()]
    children += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return found.union(*map(rules_of, children))


def test_every_rule_has_its_examples() -> None:
    written = {(kind, message) for kind, model in KINDS.items() for message in rules_of(object_schema(model))}
    tabled = {(case.kind, case.message) for case in (*CASES, *UPDATES)}

    assert written - tabled == set()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_follow_the_rule(case: Case) -> None:
    model = KINDS[case.kind]
    accepted, rejected = example(case.kind, case.accepted), example(case.kind, case.rejected)
    for document in (accepted, rejected):
        document["metadata"]["namespace"] = "default"

    model.model_validate(accepted)
    with pytest.raises(ValidationError) as caught:
        model.model_validate(rejected)

    # A pattern is pydantic's to report, in its own words.
    expected = "should match pattern" if case.message.startswith("should match") else case.message
    assert expected in str(caught.value)


@pytest.mark.apiserver
@pytest.mark.parametrize("case", CASES, ids=str)
def test_api_server_follows_the_rule(case: Case, apiserver: ApiServer) -> None:
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    path = collection(case.kind, "default")

    accepted = apiserver.request("POST", path, example(case.kind, case.accepted), query=query)
    rejected = apiserver.request("POST", path, example(case.kind, case.rejected), query=query)

    assert accepted.status == 201, accepted.message
    assert rejected.status == 422
    assert case.message in rejected.message


@pytest.mark.apiserver
@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_api_server_follows_the_rule_about_changes(case: Case, apiserver: ApiServer, namespace: str) -> None:
    before = example(case.kind)
    made = apiserver.request("POST", collection(case.kind, namespace), before)
    assert made.status == 201, made.message
    path = collection(case.kind, namespace, before["metadata"]["name"])
    version = {"metadata.resourceVersion": made.body["metadata"]["resourceVersion"]}

    rejected = apiserver.request("PUT", path, example(case.kind, {**case.rejected, **version}))
    accepted = apiserver.request("PUT", path, example(case.kind, {**case.accepted, **version}))

    assert rejected.status == 422
    assert case.message in rejected.message
    assert accepted.status == 200, accepted.message


@pytest.mark.apiserver
@pytest.mark.parametrize("part", ENCRYPTION)
def test_what_is_not_encrypted_must_be_written_out(part: str, apiserver: ApiServer) -> None:
    document = example(LINK, {f"spec.encryption.{part}": REMOVE})

    answer = apiserver.request("POST", collection(LINK, "default"), document, query={"dryRun": "All"})

    assert answer.status == 422
    assert f"spec.encryption.{part}: Required value" in answer.message
