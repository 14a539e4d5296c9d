"""What a client sees of the prefix cache, and that metrics say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.facts import facts
from tests.worker.rig import PROMPT, config, serving

DETAILS = facts("errors")["usage"]["prompt_tokens_details"]
SAME = PROMPT  # 430 tokens: 26 whole blocks, and the last token in the next


def cached(body: dict[str, Any]) -> int:
    """`cached_tokens` of an answer."""
    tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.fact("README 20")
async def test_cached_tokens_are_in_usage_only_with_their_flag_and_in_metrics_always() -> None:
    for shows in (False, True):
        async with serving(config(prompt_tokens_details=shows)) as (client,):
            for expected in (0, 416, 416):
                _, body = await client.complete(SAME, 2)
                if shows:
                    assert set(body["usage"]["prompt_tokens_details"]) == set(DETAILS)
                    assert cached(body) == expected
                else:
                    assert body["usage"]["prompt_tokens_details"] is None
            assert await client.metric("vllm:prefix_cache_hits_total") == 832
            assert await client.metric("vllm:prompt_tokens_cached_total") == 832
            assert await client.metric("vllm:prompt_tokens_cached_by_source_total", source="device") == 832
            assert await client.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 3 * 430 - 832
            assert await client.metric("vllm:request_prefill_kv_computed_tokens_sum") == 3 * 430 - 832


@pytest.mark.fact("README 12")
async def test_a_decode_worker_reports_what_the_prefill_worker_had() -> None:
    """And counts its own: what it had itself is not transferred tokens."""
    east = config("kv_producer", prompt_tokens_details=True)
    west = config("kv_consumer", prompt_tokens_details=True)
    async with serving(east, west) as (prefill, decode):
        seen = []
        for _ in range(2):
            params = await prefill.prefill(SAME)
            _, body = await decode.complete(SAME, 2, kv_transfer_params=params)
            seen.append((params["remote_prefill_cached_tokens"], cached(body)))
        assert seen == [(0, 0), (416, 416)]
        for source, tokens in (("external_kv_transfer", 430 + 14), ("local_cache_hit", 416), ("local_compute", 0)):
            assert await decode.metric("vllm:prompt_tokens_by_source_total", source=source) == tokens, source
        assert await decode.metric("vllm:external_prefix_cache_hits_total") == 430 + 14
        assert await decode.metric("vllm:prompt_tokens_cached_by_source_total", source="p2p") == 430 + 14
        assert await prefill.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 430 + 14


async def test_a_decode_worker_of_a_hybrid_model_computes_the_last_token() -> None:
    async with serving(config("kv_producer", attention="hybrid"), config("kv_consumer", attention="hybrid")) as (
        prefill,
        decode,
    ):
        await decode.complete(SAME, 2, kv_transfer_params=await prefill.prefill(SAME))
        for source, tokens in (("external_kv_transfer", 429), ("local_cache_hit", 0), ("local_compute", 1)):
            assert await decode.metric("vllm:prompt_tokens_by_source_total", source=source) == tokens, source


async def test_a_streams_usage_has_the_same() -> None:
    asked = {"prompt": SAME, "max_tokens": 1, "stream_options": {"include_usage": True}}
    async with serving(config(prompt_tokens_details=True)) as (client,):
        ends = [(await client.events("/v1/completions", asked))[-1] for _ in range(2)]
    assert [cached(end) for end in ends] == [0, 416]


async def test_salts_keep_tenants_apart() -> None:
    async with serving(config(prompt_tokens_details=True)) as (client,):
        assert [cached((await client.complete(SAME, 1, cache_salt=salt))[1]) for salt in "aab"] == [0, 416, 0]


@pytest.mark.fact("README 18")
async def test_the_forced_usage_is_in_every_event() -> None:
    async with serving(replace(config(), force_include_usage=True, time_scale=50)) as (client,):
        *chunks, last = await client.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 3})
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far == sorted(set(so_far))
    assert so_far[-1] == 3
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
