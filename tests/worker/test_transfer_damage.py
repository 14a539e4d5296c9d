"""KV that is not this request's, not whole, or does not come: it never becomes an answer, and says so."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.kv import nixl_pull
from prfaas.worker.kv.nixl_pull import NixlPull
from prfaas.worker.kv.params import blocks_digest
from prfaas.worker.kv.payload import PayloadWriter, checksum
from prfaas.worker.kv.wire import Connection, Kind, WireError, connect
from prfaas.worker.oracle import expected_text, prompt_state
from tests.worker.relay import Frames, flip, relaying
from tests.worker.rig import (
    DECODE,
    MODEL,
    OTHER,
    PREFILL,
    PROMPT,
    config,
    failed,
    profile,
    serving,
)


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
        writer = PayloadWriter(prompt_state(MODEL, OTHER.encode()), request, size)
        forged = [(Kind.DATA, index.to_bytes(4, "big") + chunk) for index, chunk in enumerate(writer)]
        sum_of_forged = checksum(kv["remote_engine_id"], request, tokens, bytes(writer.hashes))

        def forge(kind: Kind, body: bytes) -> Frames:
            if kind is Kind.DATA:
                return [forged.pop(0)] if forged else []
            return [(kind, sum_of_forged if kind is Kind.CHECKSUM else body)]

        async with relaying(kv["remote_port"], to_decode=forge) as relay:
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv | {"remote_port": relay.port})
        assert status == 200
        assert body["choices"][0]["text"] == expected_text(OTHER, 20, model=MODEL)
        assert body["choices"][0]["text"] != expected_text(PROMPT, 20, model=MODEL)


@pytest.mark.fact("6.1 row 10a")
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
            port = east.worker.engine.transfers.port
        transfer = PREFILL.kv_transfer
        assert transfer is not None
        reborn = replace(PREFILL, kv_transfer=replace(transfer, port=port, engine_id="another"))
        async with serving(reborn) as (east,):
            await east.prefill(PROMPT)
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv))
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv)), "and with nobody there at all"


# A line that is cut, a peer that says nothing.


@pytest.mark.parametrize("host", ["127.0.0.2", "no..such..host"])
async def test_a_host_that_cannot_be_reached_fails_loudly(host: str) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_host": host}))


@pytest.mark.parametrize("silent_from", [Kind.WELCOME, Kind.START, Kind.DATA, Kind.CHECKSUM])
async def test_a_transfer_that_stalls_fails_in_bounded_time(silent_from: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        engine = west.worker.engine
        assert isinstance(engine.transfers, NixlPull)
        monkeypatch.setattr(engine.transfers._peers, "seconds", 0.2)
        puller = engine.transfers._puller
        quick = replace(puller, reader=replace(puller.reader, stall_seconds=0.2))
        monkeypatch.setattr(engine.transfers, "_puller", quick)
        kv = await east.prefill(PROMPT)

        def fall_silent(kind: Kind, body: bytes) -> Frames:
            return [] if kind >= silent_from else [(kind, body)]

        async with relaying(kv["remote_port"], to_decode=fall_silent) as relay:
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1


async def test_a_reader_that_falls_silent_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_pull, "SILENCE_SECONDS", 0.1)
    async with serving(config("kv_producer", lease=30)) as (east,):
        transfer = east.worker.config.kv_transfer
        assert transfer is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", east.worker.engine.transfers.port)
        connection = Connection(reader, writer)
        connection.send_json(Kind.OPEN, engine=transfer.engine_id)
        with pytest.raises(WireError):
            await asyncio.wait_for(connection.expect(Kind.START), 5)
        connection.abort()


async def test_garbage_on_the_kv_port_harms_nobody() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x03\x00\x00\x00\x02[]", b"\x03\x00\x00\x00\x01{", b"\x01"):
            reader, writer = await asyncio.open_connection("127.0.0.1", kv["remote_port"])
            writer.write(garbage)
            writer.write_eof()
            assert b"root" not in await asyncio.wait_for(reader.read(), 5)
            writer.close()
        assert (await west.complete(PROMPT, kv_transfer_params=kv))[0] == 200


async def test_a_connection_that_ended_with_something_to_send_may_be_aborted() -> None:
    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            pass
        writer.close()
        await writer.wait_closed()
        read_all.set()

    read_all = asyncio.Event()
    server = await asyncio.start_server(read, "127.0.0.1", 0)
    async with server:
        connection = await connect("127.0.0.1", server.sockets[0].getsockname()[1], 5)
        for _ in range(20):
            connection.send(Kind.DATA, bytes(1_000_000))
        await connection.close()
        connection.abort()
        await read_all.wait()


async def test_a_short_count_of_lanes_uses_what_there_is() -> None:
    """Further connections that cannot be had do not matter: the first one carries everything."""
    large = replace(PREFILL, kv_byte_scale=20.0), replace(DECODE, kv_byte_scale=20.0)
    async with serving(*large) as (east, west):
        kv = await east.prefill(PROMPT)

        def refuse_lanes(kind: Kind, body: bytes) -> Frames:
            return [(Kind.LANE, b'{"token": "unknown"}')] if kind is Kind.LANE else [(kind, body)]

        async with relaying(kv["remote_port"], to_prefill=refuse_lanes) as relay:
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv | {"remote_port": relay.port})
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert relay.seen.count(Kind.LANE) == 3
