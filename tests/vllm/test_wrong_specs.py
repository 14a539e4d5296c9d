"""What our refusals say of vLLM is so: each wrong spec is rendered all the same, and vLLM's own code is asked."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.vllm_source import Parsed, VllmParser
from prfaas.api import labels
from prfaas.workloads.engine import container
from tests.vllm.test_rendered import environment_in, in_a_pod
from tests.workloads.pools import pool
from tests.workloads.test_engine_rules import WRONG

pytestmark = pytest.mark.clients


def asked(title: str, vllm: VllmParser, role: str = labels.ROLE_PREFILL) -> Parsed:
    """What vLLM makes of the engine's container that a wrong spec leads to."""
    (case,) = (each for each in WRONG if each["title"] == title)
    made: Any = container(pool(case.get("kind", "PrfaaSCluster"), case["spec"]).spec, role)
    words = [*made["command"], *made["args"]]
    return vllm.parse([in_a_pod(word) for word in words[words.index("serve") + 1 :]], environment_in(made))


@pytest.mark.parametrize(
    ("title", "status", "said"),
    [
        ("KV transfer that is no JSON, under a shortened name", 2, "--kv-transfer-config"),
        ("a dotted KV events flag", 2, "topic"),
        ("a flag of an earlier vLLM", 2, "unrecognized arguments: --swap-space"),
        ("a word without a flag", 2, "unrecognized arguments"),
        ("a backend that is none", 1, "Unknown attention backend"),
        ("a KV cache type that is none", 1, "Invalid kv_cache_dtype"),
        ("memory that moves", 1, "incompatible with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("a port that is an address", 1, "VLLM_PORT"),
    ],
)
def test_vllm_ends_with_an_error(title: str, status: int, said: str, vllm: VllmParser) -> None:
    parsed = asked(title, vllm)
    assert (parsed.status, said in parsed.error) == (status, True), parsed


@pytest.mark.fact("README 1")
def test_a_dotted_flag_takes_the_connector_away_without_a_word(vllm: VllmParser) -> None:
    parsed = asked("a dotted KV transfer flag", vllm)
    assert parsed["kv_transfer_config"]["kv_port"] == 15_000
    assert parsed["kv_transfer_config"]["kv_connector"] is None
    assert parsed["kv_transfer_config"]["kv_role"] is None


@pytest.mark.fact("README 2")
def test_cpu_offloading_replaces_connector_and_role_without_a_word(vllm: VllmParser) -> None:
    parsed = asked("CPU offloading", vllm)
    assert parsed["kv_transfer_config"]["kv_connector"] == "NixlConnector"
    assert parsed.configured is not None
    engine = parsed.configured["kv_transfer_config"]
    assert (engine["kv_connector"], engine["kv_role"]) == ("OffloadingConnector", "kv_both")


@pytest.mark.fact("README 4")
def test_a_list_flag_swallows_the_model(vllm: VllmParser) -> None:
    rendered = asked("a list flag before the model", vllm)
    assert rendered.status == 1, "with --served-model-name vllm notices that no model comes first"
    bare = vllm.parse(["--api-key", "secret", "example/model"])
    assert bare["api_key"] == ["secret", "example/model"]
    assert bare["model_tag"] is None


@pytest.mark.fact("README 4")
def test_a_file_of_flags_in_one_word_is_not_read(vllm: VllmParser) -> None:
    assert asked("a file of flags that is not read", vllm)["config"] is not None


@pytest.mark.fact("README 5")
def test_limits_that_nobody_sets(vllm: VllmParser) -> None:
    parsed = vllm.parse(["example/model"])
    assert parsed.configured is not None
    scheduler, cache = parsed.configured["scheduler_config"], parsed.configured["cache_config"]
    assert (scheduler["max_num_seqs"], scheduler["max_num_batched_tokens"]) == (1024, 8192)
    assert cache["gpu_memory_utilization"] == 0.92


@pytest.mark.fact("README 8")
def test_any_connector_refuses_memory_that_moves_but_not_with_vllms_own_allocator(vllm: VllmParser) -> None:
    moving = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    config = '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}'
    assert vllm.parse(["example/model"], moving).status == 0
    assert vllm.parse(["example/model", "--kv-transfer-config", config], moving).status == 1
    assert vllm.parse(["example/model", "--kv-transfer-config", config, "--enable-cumem-allocator"], moving).status == 0
