"""What a client sees of the prefix cache, and that metrics say the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prfaas.worker.events import EventsConfig
from tests.worker.rig import PROMPT, ManualClock, config, serving, until
from tests.worker.test_events import replay

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
                    assert cached(body) == expected
                else:
                    assert body["usage"]["prompt_tokens_details"] is None
            assert await client.metric("vllm:prefix_cache_hits_total") == 832
            assert await client.metric("vllm:prompt_tokens_cached_total") == 832
            assert await client.metric("vllm:prompt_tokens_cached_by_source_total", source="device") == 832
            assert await client.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 3 * 430 - 832
            assert await client.metric("vllm:request_prefill_kv_computed_tokens_sum") == 3 * 430 - 832


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


async def test_salts_keep_tenants_apart() -> None:
    async with serving(config(prompt_tokens_details=True)) as (client,):
        assert [cached((await client.complete(SAME, 1, cache_salt=salt))[1]) for salt in "aab"] == [0, 416, 0]


async def test_the_route_of_event_sources_says_where_they_are() -> None:
    on = EventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="t")
    async with serving(config(kv_events=on, event_host="127.0.0.1")) as (client,):
        async with client.session.get(f"{client.url}/kv_event_sources") as response:
            shown = json.loads(await response.text())
        assert shown["0"]["endpoint"].startswith("tcp://127.0.0.1:")
        assert (shown["0"]["topic"], shown["0"]["publisher"]) == ("t", "zmq")
        await client.post("/v1/completions", {"prompt": "word" * 20, "max_tokens": 1}, **{"X-Session-ID": "mine"})
        assert client.worker.engine.events is not None
        ((*_, payload),) = await replay(client.worker.engine.events, 0)
        assert msgspec.msgpack.decode(payload)[1][0]["session_id"] == "mine"
    async with serving(config()) as (client,), client.session.get(f"{client.url}/kv_event_sources") as response:
        assert await response.json() == {}


@pytest.mark.fact("README 7")
async def test_without_a_shutdown_timeout_a_drain_aborts_and_health_stays() -> None:
    clock = ManualClock()
    async with serving(replace(config(), time_scale=1), clock=clock) as (client,):
        running = asyncio.create_task(client.complete(SAME, 50))
        await until(lambda: client.worker.engine.unfinished, "in flight")
        await client.worker.engine.drain(0)
        status, body = await running
        assert (status, body["choices"][0]["finish_reason"]) == (200, "abort")
        status, body = await client.complete(SAME)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "abort"), "new requests too, while it drains"
        async with client.session.get(f"{client.url}/health") as response:
            assert response.status == 200
        assert await client.metric("vllm:request_success_total", finished_reason="abort") == 2
