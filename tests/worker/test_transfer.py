"""KV from a prefill to a decode worker, over HTTP and the KV port: the answer proves the transfer, or there is none."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.kv import pull, serve
from prfaas.worker.kv.params import blocks_digest
from prfaas.worker.kv.payload import Checksum, payload_chunks
from prfaas.worker.kv.wire import Connection, Kind, WireError
from prfaas.worker.oracle import answer, expected_text, last_token, prompt_state
from tests.worker.relay import Frames, relaying, unchanged
from tests.worker.rig import MODEL, ManualClock, config, facts, profile, serving, until

PROMPT = "Tell me about the sea, and take your time. " * 40
OTHER = "Tell me about the sky, and take your time. " * 40
"""As long as PROMPT, with the same last token."""
PREFILL, DECODE = config("kv_producer"), config("kv_consumer")


def failed(answer: tuple[int, dict[str, Any]]) -> bool:
    """Whether a request failed as one whose KV did not load."""
    status, body = answer
    return status == 500 and body == {
        "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    }


async def test_a_transferred_answer_is_the_expected_one() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv)
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert body["kv_transfer_params"] is None
        size = profile().kv.bytes(len(PROMPT) // 4)
        assert size < await west.metric("vllm:nixl_bytes_transferred_sum") < size + 1_000
        assert await west.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 429
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 1
        await until(lambda: east.worker.engine.pool.used == 0, "blocks freed by the notification")
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
        sent = await east.metric("prfaas_worker_kv_wire_bytes_total", direction="sent")
        assert sent <= await west.metric("prfaas_worker_kv_wire_bytes_total", direction="received")


async def test_computed_here_and_transferred_answers_are_equal() -> None:
    async with serving(PREFILL, config("kv_both")) as (east, west):
        _, here = await west.complete(PROMPT, 20)
        _, transferred = await west.complete(PROMPT, 20, kv_transfer_params=await east.prefill(PROMPT))
        assert here["choices"] == transferred["choices"]


async def test_chat_and_stop_strings_work_on_transferred_kv() -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30}
    async with serving(PREFILL, DECODE) as (east, west):
        _, whole = await east.post("/v1/chat/completions", body)
        text = whole["choices"][0]["message"]["content"]
        params = {"do_remote_decode": True}
        _, first = await east.post("/v1/chat/completions", {**body, "max_tokens": 1, "kv_transfer_params": params})
        stop = {"stop": text[40:44], "kv_transfer_params": first["kv_transfer_params"]}
        _, stopped = await west.post("/v1/chat/completions", body | stop)
        assert stopped["choices"][0]["message"]["content"] == text[: text.index(text[40:44])]
        assert stopped["choices"][0]["finish_reason"] == "stop"


async def test_the_prefill_answer_has_vllms_fields() -> None:
    vllm = facts("kv_transfer")
    async with serving(replace(PREFILL, tensor_parallel_size=8)) as (east,):
        _, body = await east.complete(PROMPT, 1, kv_transfer_params=dict.fromkeys(vllm["prefill_request"]))
        assert body["kv_transfer_params"] is None, "do_remote_decode is what asks for it"
        kv = await east.prefill(PROMPT)
    assert kv.keys() == vllm["prefill_response"].keys()
    assert kv["do_remote_prefill"] is True
    assert kv["do_remote_decode"] is False
    assert (kv["transfer_mode"], kv["remote_blocks_expiry_time"]) == ("pull", None)
    assert (kv["tp_size"], kv["dcp_size"], kv["pp_size"], kv["remote_registration_generation"]) == (8, 1, 1, 8)
    assert kv["remote_num_tokens"] == 430
    assert [len(group) for group in kv["remote_block_ids"]] == [27]
    assert kv["remote_port"] == east.worker.engine.kv_port


async def test_the_answer_comes_from_the_bytes_and_not_from_the_prompt() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        _, body = await west.complete(OTHER, 20, kv_transfer_params=kv)
        assert body["choices"][0]["text"] == expected_text(PROMPT, 20, model=MODEL)
        assert body["choices"][0]["text"] != expected_text(OTHER, 20, model=MODEL)


async def test_the_answer_depends_on_the_last_prompt_token() -> None:
    changed = PROMPT[:-4] + "end!"
    async with serving(PREFILL, DECODE) as (east, west):
        _, body = await west.complete(changed, 20, kv_transfer_params=await east.prefill(PROMPT))
        mixed = answer(prompt_state(MODEL, PROMPT.encode()), last_token(changed.encode()), 20).text
        assert body["choices"][0]["text"] == mixed != expected_text(changed, 20, model=MODEL)


async def test_kv_of_another_length_is_refused() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        assert failed(await west.complete(PROMPT + "more", kv_transfer_params=kv))


# Mutations: what is not the cache of this request never becomes an answer.


def flip(kind: Kind, body: bytes) -> Frames:
    """One bit changed."""
    return [(kind, bytes([body[0] ^ 1]) + body[1:] if kind is Kind.DATA else body)]


def drop_data(kind: Kind, body: bytes) -> Frames:
    """The payload left out, its checksum kept."""
    return [] if kind is Kind.DATA else [(kind, body)]


def truncate(kind: Kind, body: bytes) -> Frames:
    """The last byte left out."""
    return [(kind, body[:-1] if kind is Kind.DATA else body)]


def announce_less(kind: Kind, body: bytes) -> Frames:
    """A smaller payload, consistently announced."""
    if kind is Kind.START:
        return [(kind, json.dumps({"bytes": json.loads(body)["bytes"] - 1}).encode())]
    return truncate(kind, body)


def announce_more(kind: Kind, body: bytes) -> Frames:
    """Another size announced than comes."""
    return [(kind, json.dumps({"bytes": json.loads(body)["bytes"] + 1}).encode() if kind is Kind.START else body)]


def twice(kind: Kind, body: bytes) -> Frames:
    """The payload sent twice."""
    return [(kind, body)] * (2 if kind is Kind.DATA else 1)


def hang_up(kind: Kind, body: bytes) -> Frames | None:
    """The line ends before the payload."""
    return None if kind is Kind.DATA else [(kind, body)]


def forget_checksum(kind: Kind, body: bytes) -> Frames:
    """Another checksum."""
    return [(kind, bytes(32) if kind is Kind.CHECKSUM else body)]


@pytest.mark.parametrize(
    "mutation",
    [flip, drop_data, truncate, announce_less, announce_more, twice, hang_up, forget_checksum],
    ids=lambda m: m.__name__,
)
async def test_damaged_kv_fails_loudly(mutation: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        async with relaying(kv["remote_port"], to_decode=mutation) as relay:
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert await west.metric("vllm:request_success_total", finished_reason="error") == 1
        assert await west.metric("vllm:nixl_bytes_transferred_count") == 0
        assert west.worker.engine.pool.used == 0
        assert any("KV of request" in record.message for record in caplog.records)


async def test_swapped_kv_fails_loudly() -> None:
    """Somebody hands out the cache of another request: intact, of the same length, with its own checksum."""
    async with serving(PREFILL, DECODE) as (east, west):
        mine, others = await east.prefill(PROMPT), await east.prefill(OTHER)

        def swap(kind: Kind, body: bytes) -> Frames:
            fields = json.loads(body)
            if kind is Kind.PULL:
                fields["request"] = others["remote_request_id"]
                fields["blocks"] = blocks_digest(others["remote_block_ids"])
            return [(kind, json.dumps(fields).encode())]

        async with relaying(mine["remote_port"], to_prefill=swap) as relay:
            assert failed(await west.complete(PROMPT, kv_transfer_params=mine | {"remote_port": relay.port}))
            assert Kind.CHECKSUM in relay.seen, "the other cache did cross"


async def test_swapped_kv_with_a_forged_checksum_is_seen_by_the_client() -> None:
    """What no checksum can catch, the answer shows: it is another prompt's."""
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        request, tokens = kv["remote_request_id"], kv["remote_num_tokens"]
        size = profile().kv.bytes(tokens)
        payload = b"".join(payload_chunks(prompt_state(MODEL, OTHER.encode()), request, size))
        checksum = Checksum(kv["remote_engine_id"], request, tokens)
        checksum.update(payload)

        forged = [(Kind.DATA, payload)]

        def forge(kind: Kind, body: bytes) -> Frames:
            if kind is Kind.DATA:
                return [forged.pop()] if forged else []
            return [(kind, checksum.digest() if kind is Kind.CHECKSUM else body)]

        async with relaying(kv["remote_port"], to_decode=forge) as relay:
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv | {"remote_port": relay.port})
        assert status == 200
        assert body["choices"][0]["text"] == expected_text(OTHER, 20, model=MODEL)
        assert body["choices"][0]["text"] != expected_text(PROMPT, 20, model=MODEL)


async def test_reused_kv_fails_loudly() -> None:
    async with serving(PREFILL, DECODE, DECODE) as (east, west, another):
        kv = await east.prefill(PROMPT)
        assert (await west.complete(PROMPT, kv_transfer_params=kv))[0] == 200
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv))
        assert failed(await another.complete(PROMPT, kv_transfer_params=kv))
        assert (await west.complete(PROMPT))[0] == 200, "and the worker goes on"


async def test_reused_kv_in_a_stream_is_an_error_event() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        asked = {"prompt": PROMPT, "max_tokens": 3, "kv_transfer_params": kv}
        assert (await west.stream("/v1/completions", asked))[-1] == "[DONE]"
        events = await west.stream("/v1/completions", asked)
        assert [json.loads(events[0])["error"]["code"], *events[1:]] == [500, "[DONE]"]


async def test_kv_used_by_two_at_once_goes_to_one() -> None:
    async with serving(PREFILL, DECODE, DECODE) as (east, west, another):
        kv = await east.prefill(PROMPT)
        asked = [each.complete(PROMPT, kv_transfer_params=kv) for each in (west, another)]
        answers = await asyncio.gather(*asked)
        assert sorted(status for status, _ in answers) == [200, 500]


async def test_stale_kv_of_a_restarted_worker_fails_loudly() -> None:
    async with serving(DECODE) as (west,):
        async with serving(PREFILL) as (east,):
            kv = await east.prefill(PROMPT)
            port = east.worker.engine.kv_port
        transfer = PREFILL.kv_transfer
        assert transfer is not None
        reborn = replace(PREFILL, kv_transfer=replace(transfer, port=port, engine_id="another"))
        async with serving(reborn) as (east,):
            await east.prefill(PROMPT)
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv))
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv)), "and with nobody there at all"


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
        leases = east.worker.engine.leases
        for _ in range(15):
            clock.advance(5)
            await until(lambda: (leases.next_deadline() or 0) >= clock.now() + 20, "heartbeat")
        assert west.worker.engine.scheduler.fetch_stages() == (1, 0, 0), "still queued"
        assert await west.metric("vllm:num_requests_kv_fetch_by_stage", stage="waiting_to_start") == 1
        assert len(leases) == 1, "two and a half leases later"
        busy.cancel()
        done = asyncio.create_task(_play(clock))
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
                east.worker.engine.leases.end(kv["remote_request_id"], "expired")
            return unchanged(kind, body)

        async with relaying(kv["remote_port"], to_prefill=expire, to_decode=expire) as relay:
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))
            assert Kind.CHECKSUM not in relay.seen


async def test_a_reader_that_finishes_after_the_lease_is_counted() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)

        def expire_last(kind: Kind, body: bytes) -> Frames:
            if kind is Kind.DONE:
                east.worker.engine.leases.end(kv["remote_request_id"], "expired")
            return unchanged(kind, body)

        async with relaying(kv["remote_port"], to_prefill=expire_last) as relay:
            await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port})
            await until(lambda: Kind.DONE in relay.seen, "notification")
        for _ in range(500):
            if await east.metric("vllm:nixl_num_notifications_after_expiry_total"):
                break
        assert await east.metric("vllm:nixl_num_notifications_after_expiry_total") == 1


# Compatibility, roles, policies.


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "org/another"},
        {"kv_byte_scale": 0.5},
        {"kv_cache_dtype": "fp8"},
        {"attention_backend": "FLASHMLA"},
        {"dtype": "float16"},
        {"profile": profile(kv={"fixedBytes": 1, "bytesPerToken": 1})},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_workers_that_differ_in_what_must_be_equal_do_not_transfer(changes: dict[str, Any]) -> None:
    async with serving(PREFILL, replace(DECODE, **changes)) as (east, west):
        assert failed(await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))
        (lease,) = east.worker.engine.leases._leases.values()
        assert not lease.taken, "a failed handshake costs no lease"


async def test_tensor_parallelism_block_size_and_time_scale_may_differ() -> None:
    other = replace(DECODE, tensor_parallel_size=4, block_size=64, time_scale=500)
    async with serving(PREFILL, other) as (east, west):
        assert (await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))[0] == 200


async def test_a_prefill_worker_pulls_nothing_and_a_decode_worker_leases_nothing() -> None:
    async with serving(PREFILL, PREFILL, DECODE) as (east, more, west):
        assert failed(await more.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))
        assert failed(await west.complete(PROMPT, 1, kv_transfer_params={"do_remote_decode": True}))


async def test_without_a_connector_the_parameters_mean_nothing() -> None:
    async with serving(config()) as (plain,):
        status, body = await plain.complete(PROMPT, 1, kv_transfer_params={"do_remote_decode": True})
        assert (status, body["kv_transfer_params"]) == (200, None)


async def test_the_policy_recompute_prefills_here() -> None:
    west_config = config("kv_consumer", transfer={"recompute_on_failure": True})
    async with serving(PREFILL, west_config) as (east, west):
        kv = await east.prefill(PROMPT)
        async with relaying(kv["remote_port"], to_decode=flip) as relay:
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv | {"remote_port": relay.port})
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 430


@pytest.mark.parametrize("field", [*facts("kv_transfer")["decode_required"], "tp_size", "remote_num_tokens"])
async def test_a_descriptor_without_a_needed_field_fails_loudly(field: str) -> None:
    field = field.partition(" ")[0]
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        del kv[field]
        answer = await west.complete(PROMPT, kv_transfer_params=kv)
        if field == "do_remote_prefill":
            assert answer[0] == 200, "without it nothing is asked for, and the prompt is computed here"
        else:
            assert failed(answer)


# Who leaves early frees everything.


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


@pytest.mark.parametrize("when", ["before the transfer", "during the transfer"])
async def test_a_client_that_leaves_the_decode_leg_frees_both_sides(when: str) -> None:
    reached, told = asyncio.Event(), asyncio.Event()
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)

        def hold(kind: Kind, body: bytes) -> Frames:
            if kind is Kind.DATA or (kind is Kind.WELCOME and when == "before the transfer" and not told.is_set()):
                reached.set()
                return []
            return unchanged(kind, body) if kind is not Kind.CHECKSUM else []

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
        await until(lambda: not west.worker.engine._background, "release tried")
        assert await west.metric("vllm:nixl_num_failed_notifications_total") == 1


async def test_a_draining_decode_worker_frees_the_prefill_side() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        await west.worker.engine.drain(0)
        _, body = await west.complete(PROMPT, kv_transfer_params=kv)
        assert body["choices"][0]["finish_reason"] == "abort"
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side told")


# A line that is cut, a peer that says nothing.


@pytest.mark.parametrize("host", ["127.0.0.2", "no..such..host"])
async def test_a_host_that_cannot_be_reached_fails_loudly(host: str) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_host": host}))


@pytest.mark.parametrize("silent_from", [Kind.WELCOME, Kind.START, Kind.DATA, Kind.CHECKSUM])
async def test_a_transfer_that_stalls_fails_in_bounded_time(silent_from: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "HANDSHAKE_SECONDS", 0.2)
    async with serving(PREFILL, DECODE) as (east, west):
        engine = west.worker.engine
        monkeypatch.setattr(engine, "_puller", replace(engine._puller, stall_seconds=0.2))
        kv = await east.prefill(PROMPT)

        def fall_silent(kind: Kind, body: bytes) -> Frames:
            return [] if kind >= silent_from else [(kind, body)]

        async with relaying(kv["remote_port"], to_decode=fall_silent) as relay:
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1


async def test_a_reader_that_falls_silent_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SILENCE_SECONDS", 0.1)
    async with serving(config("kv_producer", lease=30)) as (east,):
        transfer = east.worker.config.kv_transfer
        assert transfer is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", east.worker.engine.kv_port)
        connection = Connection(reader, writer)
        connection.send_json(Kind.HELLO, engine=transfer.engine_id, compatibility=east.worker.config.compatibility)
        await connection.expect(Kind.WELCOME)
        with pytest.raises(WireError):
            await asyncio.wait_for(connection.expect(Kind.START), 5)
        connection.abort()


async def test_garbage_on_the_kv_port_harms_nobody() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x01\x00\x00\x00\x02[]", b"\x01\x00\x00\x00\x01{", b"\x01"):
            reader, writer = await asyncio.open_connection("127.0.0.1", kv["remote_port"])
            writer.write(garbage)
            writer.write_eof()
            assert b"root" not in await asyncio.wait_for(reader.read(), 5)
            writer.close()
        assert (await west.complete(PROMPT, kv_transfer_params=kv))[0] == 200


async def _play(clock: ManualClock) -> None:
    """Let the time run, a second per turn of the loop."""
    while True:
        clock.advance(1)
        await asyncio.sleep(0.001)
