"""Rules about pools, each with an example that it accepts and one that it rejects: the table of `test_rules.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.api.model import ENDPOINT, HOST_PATH, SOURCE
from tests.api.documents import REMOVE


@dataclass(frozen=True)
class Case:
    """Changes to the full example of a kind that a rule accepts, and that it rejects with a message."""

    kind: str
    message: str
    accepted: Mapping[str, Any]
    rejected: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


ONE_SOURCE = "exactly one of secretKeyRef, configMapKeyRef and fieldRef is required"
MULTIPLE = (
    "gpusPerInstance must be a multiple of nodesPerInstance: every node of an instance has the same number of GPUs"
)
BAD_NAME = "should match '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'"
BAD_DURATION = "should match '^([0-9]{1,4}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?$'"
BAD_QUANTITY = r"should match '^[0-9]{1,18}(\.[0-9]{1,9})?([numkMGTPE]|[KMGTPE]i)?$'"
BAD_BANDWIDTH = r"should match '^[0-9]{1,15}(\.[0-9]{1,3})?[kMGT]?$'"


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
