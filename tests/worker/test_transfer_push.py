"""NIXL push: both legs at once, the prefill worker writes; what is lost is lost as vLLM loses it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.kv.nixl_push import NixlPush
from prfaas.worker.kv.wire import Kind
from prfaas.worker.oracle import expected_text
from tests.facts import facts
from tests.worker.relay import flip, relaying
from tests.worker.rig import MODEL, PROMPT, Client, ManualClock, config, failed, profile, serving, until

PUSH = {"mode": "push"}
WRITER, TAKER = config("kv_producer", transfer=PUSH), config("kv_consumer", transfer=PUSH)
ASKED = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


def connector(client: Client) -> NixlPush:
    """The connector of a worker."""
    transfers = client.worker.engine.transfers
    assert isinstance(transfers, NixlPush)
    return transfers


def source(east: Client, request_id: str = "r") -> dict[str, Any]:
    """What a router gives the decode leg, which does not wait for the prefill's answer."""
    transfer = east.worker.config.kv_transfer
    assert transfer is not None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": transfer.engine_id,
        "remote_host": "127.0.0.1",
        "remote_port": connector(east).port,
        "tp_size": east.worker.config.tensor_parallel_size,
        "remote_request_id": request_id,
    }


async def leg(
    client: Client, params: dict[str, Any], tokens: int, request_id: str = "r", prompt: str = PROMPT
) -> tuple[int, dict[str, Any]]:
    """One leg, under the request id that both have."""
    body = {"prompt": prompt, "max_tokens": tokens, "kv_transfer_params": params}
    return await client.post("/v1/completions", body, **{"X-Request-Id": request_id})


@pytest.mark.parametrize("first", ["prefill", "decode", "both"])
async def test_whichever_leg_is_first_the_answer_is_the_expected_one(first: str) -> None:
    async with serving(WRITER, TAKER) as (east, west):
        if first == "prefill":
            prefill: Any = asyncio.create_task(leg(east, ASKED, 1))
            await prefill
            decode = asyncio.create_task(leg(west, source(east), 20))
        else:
            decode = asyncio.create_task(leg(west, source(east), 20))
            if first == "decode":
                await until(lambda: connector(east)._registered, "registered")
            prefill = asyncio.create_task(leg(east, ASKED, 1))
        status, body = await decode
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert body["kv_transfer_params"] is None
        assert (await prefill)[0] == 200
        await until(lambda: east.worker.engine.pool.used == 0, "blocks freed by the notification")
        await until(lambda: west.worker.engine.pool.used == 0, "decode side freed")
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
        size = profile().kv.bytes(430)
        assert size < await east.metric("vllm:nixl_bytes_transferred_sum") < size + 1_000, "measured by who moves them"
        assert await east.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert not connector(east)._registered
        assert not connector(west)._awaited


async def test_the_prefill_answer_has_the_fields_of_push() -> None:
    async with serving(WRITER) as (east,):
        _, body = await leg(east, ASKED, 1)
    kv = body["kv_transfer_params"]
    assert set(kv) == set(facts("kv_transfer")["nixl_push"]["leg_prefill_response"]["fields"])
    assert kv["transfer_mode"] == "push"


@pytest.mark.fact("README 13")
@pytest.mark.parametrize("field", facts("kv_transfer")["nixl_push"]["leg_decode_request"]["required"][1:])
async def test_a_decode_leg_without_a_required_field_kills_the_engine(field: str) -> None:
    async with serving(WRITER, TAKER) as (east, west):
        params = source(east)
        del params[field]
        assert failed(await leg(west, params, 20))
        assert west.worker.engine.dead.is_set()


async def test_ids_without_a_random_end_are_compared_as_they_are() -> None:
    """VLLM_DISABLE_REQUEST_ID_RANDOMIZATION: what looks like a random end is then the request's own."""
    plain = [replace(each, front=replace(each.front, random_request_ids=False)) for each in (WRITER, TAKER)]

    async def chat(client: Client, params: dict[str, Any], tokens: int, request_id: str) -> int:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "kv_transfer_params": params}
        return (await client.post("/v1/chat/completions", body, **{"X-Request-Id": request_id}))[0]

    async with serving(*plain) as (east, west):
        legs = []
        for name in ("deadbeef", "cafecafe"):
            legs += [chat(west, source(east, name), 20, name), chat(east, ASKED, 1, name)]
        assert await asyncio.wait_for(asyncio.gather(*legs), 20) == [200] * 4


async def test_block_ids_of_the_request_are_ignored() -> None:
    async with serving(WRITER, TAKER) as (east, west):
        legs = leg(east, ASKED, 1), leg(west, source(east) | {"remote_block_ids": "nonsense"}, 20)
        assert [status for status, _ in await asyncio.gather(*legs)] == [200, 200]


async def test_legs_with_different_request_ids_never_meet() -> None:
    async with serving(WRITER, TAKER) as (east, west):
        decode = asyncio.create_task(leg(west, source(east), 20, "one"))
        await until(lambda: connector(east)._registered, "registered")
        assert (await leg(east, ASKED, 1, "another"))[0] == 200
        assert connector(east).kept == 1
        assert not decode.done()
        decode.cancel()
        await until(lambda: not connector(east)._registered, "the client left, and the registration is gone")


async def test_a_writer_that_cannot_shake_hands_keeps_its_blocks_until_the_lease_ends() -> None:
    """Registered with a prefill worker that may not write: the decode worker is not told."""
    transfer = TAKER.kv_transfer
    assert transfer is not None
    other = replace(TAKER, dtype="float16", kv_transfer=replace(transfer, enforce_compatibility=False))
    async with serving(config("kv_producer", lease=300, transfer=PUSH), other) as (east, west):
        decode = asyncio.create_task(leg(west, source(east), 20))
        await until(lambda: connector(east)._registered, "registered")
        await leg(east, ASKED, 1)
        await until(lambda: east.worker.engine.pool.used == 0, "freed at the lease's end")
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        assert await east.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert not decode.done(), "the decode worker waits"
        decode.cancel()
        await until(lambda: west.worker.engine.pool.used == 0, "until its client leaves")


async def test_pull_and_push_do_not_shake_hands() -> None:
    async with serving(WRITER, config("kv_consumer")) as (east, west):
        _, body = await leg(east, ASKED, 1)
        assert failed(await leg(west, body["kv_transfer_params"], 20))
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1


async def test_a_registration_that_cannot_be_delivered_fails_the_request() -> None:
    async with serving(WRITER, TAKER) as (east, west):
        assert failed(await leg(west, source(east) | {"remote_host": "127.0.0.2"}, 20))
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert west.worker.engine.pool.used == 0


@pytest.mark.fact("6.1 row 5")
async def test_heartbeats_do_not_renew_the_lease_so_a_long_queue_loses_the_cache_loudly() -> None:
    clock = ManualClock()
    slow = {"time_scale": 1, "max_num_seqs": 1}
    writer = config("kv_producer", lease=30, transfer=PUSH, **slow)
    taker = config("kv_consumer", lease=30, transfer=PUSH, **slow)
    async with serving(writer, taker, clock=clock) as (east, west):
        busy = asyncio.create_task(west.complete("busy", 1_000))
        await until(lambda: west.worker.engine.scheduler.running, "batch full")
        waiting = asyncio.create_task(leg(west, source(east), 5))
        prefill = asyncio.create_task(leg(east, ASKED, 1))
        await until(lambda: east.worker.engine.scheduler.running, "prefill running")
        clock.advance(10)
        await prefill
        clock.advance(29)
        await asyncio.sleep(0)
        assert connector(east).kept == 1, "the decode worker still queues, and has registered nothing"
        clock.advance(2)
        await until(lambda: connector(east).kept == 0, "the lease ended on time")
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        busy.cancel()
        await until(lambda: connector(east)._registered, "registered, too late")
        assert not waiting.done(), "nobody writes, and nothing wrong is answered"
        waiting.cancel()
        await until(lambda: west.worker.engine.unfinished == 0, "gone with its client")


@pytest.mark.fact("6.1 row 6")
async def test_a_write_that_cannot_be_posted_leaves_the_decode_leg_to_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(WRITER, TAKER) as (east, west):
        decode = asyncio.create_task(leg(west, source(east), 20))
        await until(lambda: connector(east)._registered, "registered")
        await connector(west)._server.stop()
        assert (await leg(east, ASKED, 1))[0] == 200
        await until(lambda: "could not be written" in caplog.text, "the write failed, and that is said")
        assert await east.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert not decode.done(), "bounding this wait is the router's task"
        decode.cancel()
        await until(lambda: west.worker.engine.pool.used == 0, "blocks back")


@pytest.mark.fact("6.1 row 3")
@pytest.mark.parametrize("when", ["registered", "queued", "writing"])
async def test_blocks_of_an_aborted_decode_leg_come_back_on_both_sides(when: str) -> None:
    limit = {"max_num_seqs": 1} if when == "queued" else {}
    async with serving(WRITER, config("kv_consumer", transfer=PUSH, **limit)) as (east, west):
        busy = asyncio.create_task(west.complete("busy", 100_000)) if when == "queued" else None
        if busy is not None:
            await until(lambda: west.worker.engine.scheduler.running, "batch full")
        decode = asyncio.create_task(leg(west, source(east), 20))
        if when == "registered":
            await until(lambda: connector(east)._registered, "registered")
        elif when == "queued":
            await until(lambda: west.worker.engine.scheduler.deferred, "queued")
        else:
            await until(lambda: connector(east)._registered, "registered")
            held = asyncio.Event()
            transfers = connector(west)
            take_in = transfers._take_in

            async def hold(*given: Any) -> None:
                held.set()
                await asyncio.Event().wait()
                await take_in(*given)

            transfers._take_in = hold  # type: ignore[method-assign, assignment]  # a decode worker that is slow to take
            prefill = asyncio.create_task(leg(east, ASKED, 1))
            await held.wait()
            await prefill
        decode.cancel()
        await until(lambda: west.worker.engine.unfinished == (busy is not None), "decode leg gone")
        if busy is not None:
            busy.cancel()
        await until(lambda: west.worker.engine.pool.used == 0, "decode side free")
        await until(lambda: not connector(east)._registered and not connector(east)._writes, "prefill side told")
        if when == "writing":
            await until(lambda: east.worker.engine.pool.used == 0, "prefill side free")


async def test_a_lease_does_not_end_while_its_cache_is_written() -> None:
    async with serving(config("kv_producer", lease=60, transfer=PUSH), TAKER) as (east, west):
        begun, go_on = asyncio.Event(), asyncio.Event()
        transfers = connector(west)
        take_in = transfers._take_in

        async def slowly(*given: Any) -> None:
            begun.set()
            await go_on.wait()
            await take_in(*given)

        transfers._take_in = slowly  # type: ignore[method-assign, assignment]  # a decode worker that is slow to take
        decode = asyncio.create_task(leg(west, source(east), 20))
        await until(lambda: connector(east)._registered, "registered")
        await leg(east, ASKED, 1)
        await begun.wait()
        end = asyncio.get_running_loop().time() + 0.2
        await until(lambda: asyncio.get_running_loop().time() > end, "three leases later")
        assert connector(east).kept == 1
        go_on.set()
        assert (await decode)[0] == 200
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_nobody_writes_for_long_and_the_watchdog_says_so(caplog: pytest.LogCaptureFixture) -> None:
    quick = PUSH | {"push_registration_seconds": 50}
    taker, writer = config("kv_consumer", transfer=quick), config("kv_producer", transfer=quick)
    async with serving(writer, taker) as (east, west):
        decode = asyncio.create_task(leg(west, source(east), 20))
        await until(lambda: "not expected any more" in caplog.text, "watchdog")
        await until(lambda: not connector(east)._registered, "registration dropped")
        assert not decode.done(), "the request itself is not failed by it"
        decode.cancel()
        await until(lambda: west.worker.engine.unfinished == 0, "gone with its client")


async def test_damaged_bytes_that_are_written_fail_loudly() -> None:
    async with serving(WRITER, TAKER) as (east, west):
        async with relaying(connector(west).port, to_prefill=flip) as relay:
            connector(west).port = relay.port
            legs = leg(west, source(east), 20), leg(east, ASKED, 1)
            decoded, prefilled = await asyncio.gather(*legs)
        assert failed(decoded)
        assert prefilled[0] == 200
        assert Kind.CHECKSUM in relay.seen


async def test_a_large_cache_is_written_on_several_lanes() -> None:
    large = profile(kv={"fixedBytes": 3_000_000, "bytesPerToken": 0})
    async with serving(replace(WRITER, profile=large), replace(TAKER, profile=large)) as (east, west):
        async with relaying(connector(west).port) as relay:
            connector(west).port = relay.port
            legs = leg(west, source(east), 20), leg(east, ASKED, 1)
            (status, body), _ = [*await asyncio.gather(*legs)]
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert relay.seen.count(Kind.LANE) == 3
