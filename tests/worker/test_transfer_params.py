"""kv_transfer_params that are not right: what vLLM does with them, which is not always to say so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.kv.nixl_pull import NixlPull
from prfaas.worker.kv.wire import Kind
from prfaas.worker.oracle import expected_text
from tests.worker.relay import relaying
from tests.worker.rig import (
    DECODE,
    MODEL,
    PREFILL,
    PROMPT,
    Client,
    config,
    failed,
    serving,
    until,
)

WHERE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


async def health(client: Client) -> int:
    """What a probe sees."""
    async with client.session.get(f"{client.url}/health") as response:
        return response.status


@pytest.mark.fact("README 13")
@pytest.mark.parametrize("blocks", [None, []], ids=["missing", "empty"])
async def test_a_decode_leg_without_block_ids_kills_the_engine(blocks: list[int] | None) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        running = asyncio.create_task(west.complete("a long answer", 10_000))
        await until(lambda: west.worker.engine.unfinished, "running")
        kv = await east.prefill(PROMPT) | {"remote_block_ids": blocks}
        if blocks is None:
            del kv["remote_block_ids"]
        assert await health(west) == 200
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv))
        assert failed(await running), "what ran dies with it"
        assert await health(west) == 503
        assert failed(await west.complete("and whatever comes")), "until the watchdog ends the process"
        assert (await east.complete("the other engine"))[0] == 200


@pytest.mark.fact("README 13")
@pytest.mark.parametrize("field", WHERE)
async def test_a_decode_leg_without_where_to_read_waits_for_ever(field: str) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        del kv[field]
        leg = asyncio.create_task(west.complete(PROMPT, kv_transfer_params=kv))
        await until(lambda: west.worker.engine.scheduler.deferred, "it waits")
        (generation,) = west.worker.engine._generations.values()
        assert generation.fetch is not None
        assert (await west.complete("others are served"))[0] == 200
        assert not generation.fetch.done()
        assert not leg.done()
        leg.cancel()
        await until(lambda: west.worker.engine.unfinished == 0, "the client left: gone")
        assert west.worker.engine.pool.used == 0


@pytest.mark.parametrize("field", ["remote_num_tokens", "dcp_size", "pp_size", "remote_registration_generation"])
async def test_fields_that_vllm_does_not_need_may_be_missing(field: str) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        del kv[field]
        status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv)
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))


async def test_without_do_remote_prefill_nothing_is_asked_for() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        del kv["do_remote_prefill"]
        assert (await west.complete(PROMPT, kv_transfer_params=kv))[0] == 200
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 430


@pytest.mark.parametrize("tp_size", [1, 8])
async def test_without_tp_size_one_rank_is_assumed_and_no_heartbeat_sent(tp_size: int) -> None:
    async with serving(replace(PREFILL, tensor_parallel_size=tp_size), DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        del kv["tp_size"]
        async with relaying(kv["remote_port"]) as relay:
            answer = await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port})
            assert Kind.PULL in relay.seen
            assert Kind.HEARTBEAT not in relay.seen[: relay.seen.index(Kind.PULL)]
        assert failed(answer) == (tp_size == 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_block_ids", "all"),
        ("remote_block_ids", [[-1]]),
        ("remote_port", 70_000),
        ("remote_port", "5600"),
        ("remote_host", 7),
        ("remote_engine_id", ""),
        ("tp_size", 0),
        ("remote_num_tokens", 431),
    ],
)
async def test_fields_of_another_kind_fail_the_request(field: str, value: Any) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        assert failed(await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT) | {field: value}))
        assert await health(west) == 200


@pytest.mark.fact("README 12")
async def test_the_internal_id_and_the_cached_tokens_travel_in_the_prefill_answer() -> None:
    prefill, decode = (replace(each, prompt_tokens_details=True) for each in (PREFILL, DECODE))
    async with serving(prefill, decode) as (east, west):
        await east.complete(PROMPT, 1)
        status, body = await east.post(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
            **{"X-Request-Id": "abc"},
        )
        kv = body["kv_transfer_params"]
        assert status == 200
        assert len(kv) == 15
        assert body["id"] == "cmpl-abc"
        base, _, suffix = kv["remote_request_id"].rpartition("-")
        assert base == "cmpl-abc-0"
        assert len(suffix) == 8
        assert int(suffix, 16) >= 0
        cached = kv["remote_prefill_cached_tokens"]
        assert cached == 416, "the whole blocks of 430 tokens"
        _, answer = await west.complete(PROMPT, kv_transfer_params=kv)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_a_prefill_of_more_than_one_token_says_nothing_of_cached_tokens() -> None:
    async with serving(PREFILL) as (east,):
        _, body = await east.complete(PROMPT, 2, kv_transfer_params={"do_remote_decode": True})
        assert len(body["kv_transfer_params"]) == 14
        assert "remote_prefill_cached_tokens" not in body["kv_transfer_params"]


# The handshake.


@pytest.mark.fact("README 14")
async def test_a_tp_size_that_is_too_large_ends_the_listener_for_later_peers() -> None:
    async with serving(PREFILL, DECODE, DECODE) as (east, west, later):
        assert (await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))[0] == 200
        for client in (west, later):
            assert isinstance(client.worker.engine.transfers, NixlPull)
            client.worker.engine.transfers._peers.seconds = 0.2
        wrong = await east.prefill(PROMPT) | {"tp_size": 2}
        assert failed(await later.complete(PROMPT, kv_transfer_params=wrong))
        right = await east.prefill(PROMPT)
        assert failed(await later.complete(PROMPT, kv_transfer_params=right)), "no handshake is answered any more"
        known = await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT))
        assert known[0] == 200, "who has shaken hands goes on"
        assert await health(east) == 200, "and no probe sees it"


async def test_a_handshake_that_is_no_message_ends_the_listener_too() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        reader, writer = await asyncio.open_connection("127.0.0.1", kv["remote_port"])
        writer.write(b"\x01\x00\x00\x00\x02[]")
        assert isinstance(east.worker.engine.transfers, NixlPull)
        server = east.worker.engine.transfers._server
        await until(lambda: not server.answers, "listener ended")
        writer.close()
        await reader.read()
        assert isinstance(west.worker.engine.transfers, NixlPull)
        west.worker.engine.transfers._peers.seconds = 0.2
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv))


async def test_a_handshake_that_fails_counts_once_for_all_that_wait_for_it() -> None:
    async with serving(PREFILL, replace(DECODE, dtype="float16")) as (east, west):
        legs = [await east.prefill(PROMPT) for _ in range(3)]
        async with relaying(legs[0]["remote_port"]) as relay:
            asked = [west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}) for kv in legs]
            assert all(failed(answer) for answer in await asyncio.gather(*asked))
            assert relay.seen == [Kind.HELLO, Kind.WELCOME]
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1


async def test_a_handshake_that_need_not_fit_is_a_setting() -> None:
    transfer = DECODE.kv_transfer
    assert transfer is not None
    lax = replace(DECODE, dtype="float16", kv_transfer=replace(transfer, enforce_compatibility=False))
    async with serving(PREFILL, lax) as (east, west):
        assert (await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))[0] == 200


@pytest.mark.parametrize(("engine_ttl", "shaken"), [(3_600_000, 1), (0, 1), (0.001, 2)])
async def test_hands_are_shaken_once_per_engine_and_again_when_it_was_forgotten(engine_ttl: float, shaken: int) -> None:
    async with serving(PREFILL, config("kv_consumer", transfer={"engine_ttl": engine_ttl})) as (east, west):
        first = await east.prefill(PROMPT)
        async with relaying(first["remote_port"]) as relay:
            for kv in (first, await east.prefill(PROMPT)):
                assert (await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))[0] == 200
            assert relay.seen.count(Kind.HELLO) == shaken
