"""Metrics are vLLM's: every name, label and bucket is in its list."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prfaas.worker.metrics import token_buckets
from tests.worker.rig import ManualClock, config, facts, serving, until

LISTED = {metric["name"]: metric for metric in facts("metrics")["metrics"]}
PROMPT = "word" * 1_000
NOT_HERE = {
    # series of features that this worker does not have
    "vllm:corrupted_requests",
    "vllm:watermark_requests",
    "vllm:lora_requests_info",
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
    "vllm:prompt_tokens_cached_by_source",
    "vllm:estimated_flops_per_gpu_total",
    "vllm:estimated_read_bytes_per_gpu_total",
    "vllm:estimated_write_bytes_per_gpu_total",
    "http_requests_total",
    "http_request_size_bytes",
    "http_response_size_bytes",
    "http_request_duration_highr_seconds",
    "http_request_duration_seconds",
}


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", None])
async def test_names_labels_and_buckets_are_vllms(role: str | None) -> None:
    async with serving(config(role)) as (client,):  # type: ignore[arg-type]  # one of the roles
        await client.complete(PROMPT, 3)
        async with client.session.get(f"{client.url}/metrics") as response:
            text = await response.text()
    shown = set()
    for family in text_string_to_metric_families(text):
        if family.name.startswith("prfaas_worker_") or family.name.endswith("_created"):
            continue
        vllm = LISTED[family.name]
        shown.add(family.name)
        assert family.type == vllm["type"], family.name
        bounds = set()
        for sample in family.samples:
            labels = set(sample.labels) - {"le"}
            if vllm["name"] != "vllm:cache_config_info":
                assert labels == set(vllm["labels"]), sample
            for label, values in vllm.get("label_values", {}).items():
                assert sample.labels[label] in values
            if "le" in sample.labels:
                bounds.add(float(sample.labels["le"]))
        if isinstance(vllm.get("buckets"), list):
            assert bounds == {*map(float, vllm["buckets"]), float("inf")}, family.name
    expected = {
        name
        for name, metric in LISTED.items()
        if metric["exists_when"].startswith("always")
        or ("Nixl" in metric["exists_when"] and role)
        or ("kv_consumer" in metric["exists_when"] and role == "kv_consumer")
    }
    assert shown == expected - NOT_HERE


def test_token_buckets_are_a_1_2_5_series() -> None:
    assert token_buckets(131_072) == (
        *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000),
        *(10_000, 20_000, 50_000, 100_000),
    )


async def test_times_of_one_request() -> None:
    """rig.profile at time scale 10: prefill of 1,000 tokens 0.2 s, steps of 0.01 s."""
    clock = ManualClock()
    async with serving(replace(config(), time_scale=10), clock=clock) as (client,):
        first = asyncio.create_task(client.complete(PROMPT, 3))
        await until(lambda: client.worker.engine.scheduler.running == 1, "prefilling")
        second = asyncio.create_task(client.complete(PROMPT, 1))
        await until(lambda: client.worker.engine.scheduler.waiting == 1, "queued")
        assert await client.metric("vllm:num_requests_running") == 1
        assert await client.metric("vllm:num_requests_waiting") == 1
        assert await client.metric("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
        assert await client.metric("vllm:kv_cache_usage_perc") > 0
        clock.advance(0.5)
        await asyncio.gather(first, second)
        sums = {
            "vllm:request_queue_time_seconds_sum": 0.2,  # the second waited for the first
            "vllm:request_prefill_time_seconds_sum": 0.4,
            "vllm:request_decode_time_seconds_sum": 0.02,
            "vllm:request_inference_time_seconds_sum": 0.42,
            "vllm:inter_token_latency_seconds_sum": 0.02,
            "vllm:inter_token_latency_seconds_count": 2,
            "vllm:request_time_per_output_token_seconds_sum": 0.01,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:prompt_tokens_total": 2_000,
            "vllm:generation_tokens_total": 4,
            "vllm:request_prompt_tokens_sum": 2_000,
            "vllm:request_generation_tokens_sum": 4,
            "vllm:request_params_max_tokens_sum": 4,
            "vllm:request_prefill_kv_computed_tokens_sum": 2_000,
        }
        for name, value in sums.items():
            assert await client.metric(name) == pytest.approx(value), name
        assert await client.metric("vllm:request_success_total", finished_reason="length") == 2
        assert await client.metric("vllm:kv_cache_usage_perc") == 0
