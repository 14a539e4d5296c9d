"""What we render is what vLLM's own parser understands, and it understands what the spec meant.

A matrix of specs, and specs made up by hypothesis: each is rendered to pod templates, and the words behind the engine's
command go through vLLM's parser and configuration classes. What is expected is written here from the spec, not taken
from the code that renders.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from e2e.vllm_source import VllmParser
from prfaas.api import labels
from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.workloads.engine import CONTAINER, check
from prfaas.workloads.engines.base import roles_of
from prfaas.workloads.errors import SpecError
from prfaas.workloads.instance import child
from prfaas.workloads.meta import Object, Owner, pod_templates

pytestmark = pytest.mark.clients

KUBELET = {"LWS_LEADER_ADDRESS": "pool-0-0.pool-0.serving", "LWS_WORKER_INDEX": "1"}
"""What the kubelet puts into the words of a group's pods."""
CONNECTORS = {"Nixl": "NixlConnector", "Mooncake": "MooncakeConnector"}
ROLES = {labels.ROLE_PREFILL: "kv_producer", labels.ROLE_DECODE: "kv_consumer"}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": "bfloat16", "attentionBackend": "FLASH_ATTN", "blockSize": 32},
    "mla": {"attentionBackend": "FLASH_ATTN_MLA", "kvCacheDtype": "fp8", "blockSize": 64, "maxQueuedRequests": 64},
    "flashmla": {"attentionBackend": "FLASHMLA", "prefixCaching": False, "kvEvents": False, "maxQueuedTokens": 500_000},
    "args": {"args": ["--max-num-seqs", "256", "--enable-expert-parallel", "--gpu-memory-utilization=0.9"]},
}
ACCELERATORS: dict[str, dict[str, Any]] = {
    "H200": {"servedName": "chat"},
    "H20": {"maxModelLength": 131_072, "revision": "v1.0"},
}


def spec_of(kind: str, **spec: Any) -> PoolSpec:
    """A spec of a kind of pool with what it must have."""
    engine = {"image": "registry.example/vllm-openai:v0.33.0"} | spec.pop("engine", {})
    whole = {"model": {"name": "org/model"}, "gpusPerInstance": 8, "engine": engine} | spec
    if kind == "PrfaaSCluster":
        return PrfaaSClusterSpec.model_validate(whole)
    whole["pool"] = {"instances": 4}
    if engine.get("connector") == "Mooncake" or "tls" in engine:
        whole["router"] = {"replicas": 0}  # ours does not drive these
    return PDClusterSpec.model_validate(whole)


def matrix() -> Iterator[Any]:
    """Two kinds of pool, two accelerators, both connectors, both transports, one node and two, with TLS and without,
    and the shapes above."""
    for kind, accelerator, connector, transport, nodes, tls, shape in itertools.product(
        ("PrfaaSCluster", "PDCluster"), ACCELERATORS, CONNECTORS, ("TCP", "RDMA"), (1, 2), (False, True), SHAPES
    ):
        engine: dict[str, Any] = {"connector": connector, "transport": transport, **SHAPES[shape]}
        if transport == "TCP" and shape != "plain":
            engine["lanes"] = 8
        if connector == "Nixl" and shape == "mla":
            engine["kvLease"] = "90s"
        if tls:
            engine |= {"tls": {"secretName": "cert"}, "shutdownTimeout": "2m"}
        spec = {
            "model": {"name": "org/model", **ACCELERATORS[accelerator]},
            "nodePool": {"accelerator": accelerator},
            "gpusPerInstance": 8 * nodes,
            "nodesPerInstance": nodes,
            "engine": engine,
        }
        words = (kind, accelerator, connector, transport, f"{nodes} nodes", "TLS" if tls else "plain HTTP", shape)
        yield pytest.param(kind, spec, id=", ".join(words))


MATRIX = list(matrix())


def containers(spec: PoolSpec) -> Iterator[tuple[str, int, Object]]:
    """Role, rank of the node, and the engine's container, of every kind of pod that a spec leads to."""
    owner = Owner("PDCluster" if isinstance(spec, PDClusterSpec) else "PrfaaSCluster", "serving", "pool", "uid")
    for role in roles_of(spec):
        for rank, template in enumerate(pod_templates(child(owner, spec, "pool-0", role))):
            (container,) = (each for each in template["spec"]["containers"] if each["name"] == CONTAINER)
            yield role, rank, container


def engines(spec: PoolSpec) -> Iterator[tuple[str, int, list[str]]]:
    """Role, rank of the node, and the words behind `vllm serve`."""
    for role, rank, container in containers(spec):
        yield role, rank, [in_a_pod(word) for word in container["args"]]


def environment_in(container: Object) -> dict[str, str]:
    """The variables of a container; those that come from elsewhere have some value that they could have."""
    return {each["name"]: each.get("value", "10.0.0.7") for each in container["env"]}


def in_a_pod(word: str) -> str:
    for name, value in KUBELET.items():
        word = word.replace(f"$({name})", value)
    return word


def meant(spec: PoolSpec, role: str, rank: int) -> dict[str, Any]:
    """Options of vLLM -> values that the spec means, for all that it decides."""
    engine, shared = spec.engine, spec.engine.parallelism
    several = spec.nodes_per_instance > 1
    extra: dict[str, Any] = {"mooncake_protocol": engine.transport.lower()}
    if engine.connector == "Nixl":
        extra = {"kv_lease_duration": int((engine.kv_lease or "30s")[:-1])}
        extra |= {"num_threads": engine.lanes} if engine.lanes else {}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{labels.PORT_KV_EVENTS}"}
    return {
        "model_tag": spec.model.name,
        "served_model_name": [spec.model.served_name or spec.model.name],
        "revision": spec.model.revision,
        "port": engine.port,
        "max_model_len": spec.model.max_model_length,
        "tensor_parallel_size": spec.gpus_per_instance // (shared.pipeline * shared.data),
        "pipeline_parallel_size": shared.pipeline,
        "data_parallel_size": shared.data,
        "nnodes": spec.nodes_per_instance,
        "node_rank": rank,
        "master_addr": KUBELET["LWS_LEADER_ADDRESS"] if several else "127.0.0.1",
        "headless": rank > 0,
        "kv_transfer_config": {
            "kv_connector": CONNECTORS[engine.connector],
            "kv_role": ROLES[role],
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        },
        "kv_events_config": events if engine.kv_events else None,
        "enable_prefix_caching": engine.prefix_caching,
        "dtype": engine.dtype,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "attention_backend": engine.attention_backend,
        "block_size": engine.block_size or {"FLASHMLA": 64, "CUTLASS_MLA": 128}.get(engine.attention_backend or ""),
        "max_num_queued_reqs": engine.max_queued_requests,
        "max_num_queued_tokens": engine.max_queued_tokens,
        "ssl_keyfile": "/etc/prfaas/tls/tls.key" if engine.tls else None,
        "ssl_certfile": "/etc/prfaas/tls/tls.crt" if engine.tls else None,
        "shutdown_timeout": seconds(engine.shutdown_timeout),
        "kv_offloading_size": None,
        "uds": None,
    }


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def check_lines(spec: PoolSpec, vllm: VllmParser, more: dict[str, Any] | None = None) -> int:
    """Parses every line of a spec and compares; how many there were."""
    lines = 0
    for role, rank, words in engines(spec):
        parsed = vllm.parse(words)
        for option, value in (meant(spec, role, rank) | (more or {})).items():
            found = parsed[option]
            if isinstance(value, dict):
                found = {key: found[key] for key in value}
            assert found == value, f"{option} of {role}, node {rank}: {found!r} instead of {value!r}"
        assert parsed.configured is not None
        check_configured(spec, role, rank, parsed.configured)
        lines += 1
    return lines


def check_configured(spec: PoolSpec, role: str, rank: int, configured: dict[str, Any]) -> None:
    """What the engine starts with, after vLLM has put everything together."""
    transfer, layout = configured["kv_transfer_config"], configured["parallel_config"]
    assert (transfer["kv_connector"], transfer["kv_role"]) == (CONNECTORS[spec.engine.connector], ROLES[role])
    assert configured["attention_config"]["backend"] == spec.engine.attention_backend
    assert configured["cache_config"]["cache_dtype"] == spec.engine.kv_cache_dtype
    assert configured["cache_config"]["enable_prefix_caching"] == spec.engine.prefix_caching
    assert (layout["nnodes"], layout["node_rank"]) == (spec.nodes_per_instance, rank)
    gpus = layout["tensor_parallel_size"] * layout["pipeline_parallel_size"] * layout["data_parallel_size"]
    assert gpus == spec.gpus_per_instance


def test_a_model_on_disk_has_the_same_path_in_every_pool(vllm: VllmParser) -> None:
    model = {
        "name": "org/model",
        "revision": "v1.0",
        "source": "hf://org/model",
        "cache": {"hostPath": {"path": "/var/lib/models"}},
    }
    paths = set()
    for kind in ("PrfaaSCluster", "PDCluster"):
        for _, _, words in engines(spec_of(kind, model=model)):
            parsed = vllm.parse(words)
            paths.add(parsed["model_tag"])
            assert parsed["served_model_name"] == ["org/model"]
    (path,) = paths
    assert path.startswith("/models/")
    assert path.endswith("/v1.0")


def test_the_matrix_is_as_large_as_promised() -> None:
    assert len(MATRIX) >= 200


@pytest.mark.parametrize(("kind", "spec"), MATRIX)
def test_vllm_understands_what_the_spec_means(kind: str, spec: dict[str, Any], vllm: VllmParser) -> None:
    parsed = spec_of(kind, **spec)
    check(parsed)
    more: dict[str, Any] = {}
    if "args" in spec["engine"]:
        more = {"max_num_seqs": 256, "enable_expert_parallel": True, "gpu_memory_utilization": 0.9}
    assert check_lines(parsed, vllm, more) == len(roles_of(parsed)) * parsed.nodes_per_instance


@pytest.mark.parametrize(("kind", "spec"), MATRIX[::7])
def test_vllm_knows_every_variable_and_takes_it(kind: str, spec: dict[str, Any], vllm: VllmParser) -> None:
    for _, _, container in containers(spec_of(kind, **spec)):
        variables = environment_in(container)
        assert {name for name in variables if name.startswith("VLLM_")}
        words = [*map(in_a_pod, container["args"]), "--fail-on-environ-validation"]
        parsed = vllm.parse(words, variables)
        assert parsed.status == 0, parsed.error


def test_a_variable_that_vllm_does_not_know_would_be_seen(vllm: VllmParser) -> None:
    parsed = vllm.parse(["org/model", "--fail-on-environ-validation"], {"VLLM_NIXL_SIDE_CHANEL_HOST": "10.0.0.7"})
    assert (parsed.status, "VLLM_NIXL_SIDE_CHANEL_HOST" in parsed.error) == (1, True)


names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}(/[A-Za-z0-9._-]{1,20})?\Z")


@st.composite
def pools(draw: st.DrawFn) -> PoolSpec:
    """Any spec that the schema and the rules accept, as far as it shows on the command line."""
    connector = draw(st.sampled_from(sorted(CONNECTORS)))
    transport = draw(st.sampled_from(["TCP", "RDMA"]))
    prefix_caching = draw(st.booleans())
    kind = draw(st.sampled_from(["PrfaaSCluster", "PDCluster"]))
    nodes, tensor = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    data = draw(st.sampled_from([1, 1, 2])) if nodes == 1 else 1
    pipeline = draw(st.sampled_from([1, 1, 2])) if kind == "PrfaaSCluster" or connector == "Mooncake" else 1
    engine = {
        "connector": connector,
        "transport": transport,
        "lanes": draw(st.none() | st.integers(1, 64)) if transport == "TCP" else None,
        "attentionBackend": draw(st.sampled_from([None, "FLASH_ATTN", "FLASH_ATTN_MLA", "FLASHINFER", "CUTLASS_MLA"])),
        "kvCacheDtype": draw(st.sampled_from(["auto", "bfloat16", "fp8", "fp8_e4m3"])),
        "dtype": draw(st.sampled_from(["auto", "bfloat16", "float16", "half"])),
        "blockSize": draw(st.sampled_from([None, 16, 32, 64, 128])),
        "prefixCaching": prefix_caching,
        "kvEvents": prefix_caching and draw(st.booleans()),
        "kvLease": draw(st.none() | st.integers(30, 3600).map("{}s".format)) if connector == "Nixl" else None,
        "maxQueuedRequests": draw(st.none() | st.integers(1, 1_000_000)),
        "maxQueuedTokens": draw(st.none() | st.integers(1, 1_000_000_000)),
        "parallelism": {"pipeline": pipeline, "data": data},
        "port": draw(st.integers(1024, 5000)),
        "shutdownTimeout": draw(st.integers(0, 3600).map("{}s".format)),
    }
    model = {
        "name": draw(names),
        "servedName": draw(st.none() | names),
        "revision": draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._/-]{0,40}\Z")),
        "maxModelLength": draw(st.none() | st.integers(1, 10_000_000)),
    }
    spec = {
        "model": {key: value for key, value in model.items() if value is not None},
        "gpusPerInstance": nodes * tensor * pipeline * data,
        "nodesPerInstance": nodes,
        "engine": {key: value for key, value in engine.items() if value is not None},
    }
    made = spec_of(kind, **spec)
    try:
        check(made)
    except SpecError:
        assume(False)
    return made


@settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(spec=pools())
def test_vllm_understands_any_spec_that_the_rules_accept(spec: PoolSpec, vllm: VllmParser) -> None:
    assert check_lines(spec, vllm) >= 1
