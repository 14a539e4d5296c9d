"""What a prefill worker holds for a transfer is freed: by its end, by the lease's end, by whoever leaves early."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.kv.nixl_pull import NixlPull
from prfaas.worker.kv.wire import Kind
from prfaas.worker.oracle import expected_text
from tests.worker.relay import Frames, relaying, unchanged
from tests.worker.rig import (
    DECODE,
    MODEL,
    PREFILL,
    PROMPT,
    ManualClock,
    config,
    failed,
    profile,
    serving,
    until,
)


async def play(clock: ManualClock) -> None:
    """Let the time run, a second per turn of the loop."""
    while True:
        clock.advance(1)
        await asyncio.sleep(0.001)


@pytest.mark.fact("6.1 row 9")
async def test_expired_kv_is_freed_counted_and_refused() -> None:
    clock = ManualClock()
    east_config = replace(config("kv_producer", lease=30), time_scale=1)
    async with serving(DECODE) as (west,), serving(east_config, clock=clock) as (east,):
        leg = asyncio.create_task(east.prefill(PROMPT))
        await until(lambda: east.worker.engine.scheduler.running, "prefill running")
        clock.advance(10)
        kv = await leg
        assert east.worker.engine.pool.used == 27
        clock.advance(29)
        await until(lambda: clock.next_deadline() == clock.now() + 1, "lease about to end")
        assert east.worker.engine.pool.used == 27
        clock.advance(1)
        await until(lambda: east.worker.engine.pool.used == 0, "lease ended")
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv))


async def test_a_long_queue_at_the_decode_worker_does_not_cost_the_lease() -> None:
    """Heartbeats renew while the request waits for a slot."""
    clock = ManualClock()
    east_config = replace(config("kv_producer", lease=30), time_scale=1)
    west_config = replace(config("kv_both", lease=30), time_scale=1, max_num_seqs=1)
    async with serving(east_config, west_config, clock=clock) as (east, west):
        leg = asyncio.create_task(east.prefill(PROMPT))
        await until(lambda: east.worker.engine.scheduler.running, "prefill running")
        clock.advance(10)
        kv = await leg
        busy = asyncio.create_task(west.complete("busy", 1_000))
        await until(lambda: west.worker.engine.scheduler.running, "batch full")
        waiting = asyncio.create_task(west.complete(PROMPT, 5, kv_transfer_params=kv))
        leases = east.worker.engine.transfers.leases
        for _ in range(15):
            clock.advance(5)
            await until(lambda: (leases.next_deadline() or 0) >= clock.now() + 20, "heartbeat")
        assert west.worker.engine.scheduler.fetch_stages() == (1, 0, 0), "still queued"
        assert await west.metric("vllm:num_requests_kv_fetch_by_stage", stage="waiting_to_start") == 1
        assert len(leases) == 1, "two and a half leases later"
        busy.cancel()
        done = asyncio.create_task(play(clock))
        status, body = await waiting
        done.cancel()
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 5, model=MODEL))


@pytest.mark.parametrize("at", [Kind.PULL, Kind.DATA])
async def test_a_lease_that_ends_during_its_transfer_gives_no_cache(at: Kind) -> None:
    """Between the reader's request and the first byte, or with more to come than any socket buffer holds."""
    large = profile(kv={"fixedBytes": 24_000_000, "bytesPerToken": 0})
    async with serving(replace(PREFILL, profile=large), replace(DECODE, profile=large)) as (east, west):
        kv = await east.prefill(PROMPT)

        def expire(kind: Kind, body: bytes) -> Frames:
            if kind is at:
                east.worker.engine.transfers.leases.end(kv["remote_request_id"], "expired")
            return unchanged(kind, body)

        async with relaying(kv["remote_port"], to_prefill=expire, to_decode=expire) as relay:
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))
            assert Kind.CHECKSUM not in relay.seen


async def test_a_reader_that_finishes_after_the_lease_is_counted() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)

        def expire_last(kind: Kind, body: bytes) -> Frames:
            if kind is Kind.DONE:
                east.worker.engine.transfers.leases.end(kv["remote_request_id"], "expired")
            return unchanged(kind, body)

        async with relaying(kv["remote_port"], to_prefill=expire_last) as relay:
            await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port})
            await until(lambda: Kind.DONE in relay.seen, "notification")
        for _ in range(500):
            if await east.metric("vllm:nixl_num_notifications_after_expiry_total"):
                break
        assert await east.metric("vllm:nixl_num_notifications_after_expiry_total") == 1


# Who leaves early frees everything.


@pytest.mark.fact("6.2 row 11")
async def test_a_client_that_leaves_during_the_prefill_leg_frees_it() -> None:
    clock = ManualClock()
    async with serving(replace(PREFILL, time_scale=1), clock=clock) as (east,):
        legs = [asyncio.create_task(east.prefill(PROMPT)) for _ in range(2)]
        scheduler = east.worker.engine.scheduler
        await until(lambda: (scheduler.running, scheduler.waiting) == (1, 1), "one prefills, one is queued")
        for leg in legs:
            leg.cancel()
        await until(lambda: (scheduler.running, scheduler.waiting) == (0, 0), "both gone")
        assert east.worker.engine.pool.used == 0
        assert await east.metric("vllm:request_success_total", finished_reason="abort") == 2


@pytest.mark.parametrize("when", ["before the first byte", "during the transfer"])
async def test_a_client_that_leaves_the_decode_leg_frees_both_sides(when: str) -> None:
    reached, told = asyncio.Event(), asyncio.Event()
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)

        def hold(kind: Kind, body: bytes) -> Frames:
            begins = kind is Kind.START and when == "before the first byte" and not told.is_set()
            if begins or kind in (Kind.DATA, Kind.END, Kind.CHECKSUM):
                reached.set()
                return []
            return unchanged(kind, body)

        async with relaying(kv["remote_port"], to_decode=hold) as relay:
            leg = asyncio.create_task(west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))
            await asyncio.wait_for(reached.wait(), 5)
            (generation,) = west.worker.engine._generations.values()
            assert generation.fetch is not None
            told.set()
            leg.cancel()
            await until(lambda: west.worker.engine.unfinished == 0, "decode side gone")
            await until(generation.fetch.done, "transfer given up")
            await until(lambda: east.worker.engine.pool.used == 0, "prefill side told")
        assert west.worker.engine.pool.used == 0
        assert await west.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


@pytest.mark.fact("6.1 row 1")
@pytest.mark.parametrize(
    ("changes", "status"),
    [({"prompt": ""}, 400), ({"model": "no-such"}, 404), ({"max_tokens": -1}, 400)],
    ids=["validation", "model", "limit"],
)
async def test_a_refused_decode_request_frees_the_prefill_side(changes: dict[str, Any], status: int) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        asked = {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": kv} | changes
        assert (await west.post("/v1/completions", asked))[0] == status
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side told")


async def test_a_decode_request_beyond_the_queue_limit_frees_the_prefill_side() -> None:
    async with serving(PREFILL, replace(DECODE, max_queued_requests=0)) as (east, west):
        kv = await east.prefill(PROMPT)
        assert (await west.complete(PROMPT, kv_transfer_params=kv))[0] == 503
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side told")


async def test_a_release_that_cannot_be_delivered_is_counted() -> None:
    async with serving(DECODE) as (west,):
        async with serving(PREFILL) as (east,):
            kv = await east.prefill(PROMPT)
        await west.post("/v1/completions", {"prompt": "", "kv_transfer_params": kv})
        transfers = west.worker.engine.transfers
        assert isinstance(transfers, NixlPull)
        await until(lambda: not transfers._background, "release tried")
        assert await west.metric("vllm:nixl_num_failed_notifications_total") == 1


async def test_a_draining_decode_worker_frees_the_prefill_side() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        await west.worker.engine.drain(0)
        _, body = await west.complete(PROMPT, kv_transfer_params=kv)
        assert body["choices"][0]["finish_reason"] == "abort"
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side told")
