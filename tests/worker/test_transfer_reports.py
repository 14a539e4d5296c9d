"""Public reports of blocks that stay, loads that stay, answers that break off: what the worker does instead.

The others of these reports are beside the tests of what they are about; tests/data/facts.yaml lists them all.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from prfaas.worker.kv.lanes import Cache, Outgoing
from prfaas.worker.kv.nixl_pull import NixlPull
from prfaas.worker.kv.wire import Connection, Kind, connect
from prfaas.worker.oracle import expected_text
from tests.worker.relay import Frames, relaying, unchanged
from tests.worker.rig import DECODE, MODEL, PREFILL, PROMPT, Client, config, failed, serving, until


def connector(client: Client) -> NixlPull:
    """The connector of a worker."""
    transfers = client.worker.engine.transfers
    assert isinstance(transfers, NixlPull)
    return transfers


@pytest.mark.fact("6.1 row 7")
async def test_a_prefill_worker_may_be_replaced_at_the_same_address() -> None:
    async with serving(DECODE) as (west,):
        port = 0
        for engine in ("first", "second", "third"):
            transfer = PREFILL.kv_transfer
            assert transfer is not None
            reborn = replace(PREFILL, kv_transfer=replace(transfer, port=port, engine_id=engine))
            async with serving(reborn) as (east,):
                kv = await east.prefill(PROMPT)
                status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv)
                assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
                port = connector(east).port
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 0


@pytest.mark.fact("6.1 row 8")
async def test_a_prefill_leg_with_blocks_of_an_earlier_turn_reads_none_of_them() -> None:
    """Reading back from a decode worker is off, as by default: coordinates that may be stale are not followed."""
    async with serving(PREFILL, config("kv_both")) as (east, west):
        stale = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": "west",
            "remote_block_ids": [[0, 1, 2]],
            "remote_host": "127.0.0.1",
            "remote_port": connector(west).port,
            "remote_request_id": "cmpl-earlier-0-00000000",
            "remote_num_tokens": 430,
            "remote_blocks_expiry_time": 1.0,
        }
        _, first = await east.complete(PROMPT, 1, kv_transfer_params=stale)
        status, body = await west.complete(PROMPT, 20, kv_transfer_params=first["kv_transfer_params"])
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert await east.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 430
        assert await east.metric("prfaas_worker_kv_wire_bytes_total", direction="received") == 0


@pytest.mark.fact("6.1 row 10c")
async def test_an_abort_before_scheduling_with_the_prefill_worker_gone_harms_nobody() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent, serving(PREFILL, config("kv_consumer", max_num_seqs=1)) as (east, west):
        connector(west)._peers.seconds = 0.2
        gone = {"remote_port": silent.sockets[0].getsockname()[1]}
        kv = await east.prefill(PROMPT) | gone
        busy = asyncio.create_task(west.complete("busy", 100_000))
        await until(lambda: west.worker.engine.scheduler.running, "batch full")
        leg = asyncio.create_task(west.complete(PROMPT, kv_transfer_params=kv))
        await until(lambda: connector(west)._peers._under_way, "queued, and nobody answers its handshake")
        leg.cancel()
        busy.cancel()
        await until(lambda: west.worker.engine.unfinished == 0, "both gone")
        await until(lambda: not connector(west)._background, "the notice was tried")
        assert await west.metric("vllm:nixl_num_failed_notifications_total") == 1
        assert (await west.complete("and it goes on"))[0] == 200
        assert west.worker.engine.pool.used == 0


async def test_an_abort_before_scheduling_frees_the_prefill_side() -> None:
    async with serving(PREFILL, config("kv_consumer", max_num_seqs=1)) as (east, west):
        kv = await east.prefill(PROMPT)
        busy = asyncio.create_task(west.complete("busy", 100_000))
        await until(lambda: west.worker.engine.scheduler.running, "batch full")
        leg = asyncio.create_task(west.complete(PROMPT, kv_transfer_params=kv))
        await until(lambda: west.worker.engine.scheduler.fetch_stages() == (1, 0, 0), "waiting to start")
        leg.cancel()
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side told")
        busy.cancel()


@pytest.mark.fact("6.1 row 10d")
@pytest.mark.parametrize("kind", [Kind.DONE, Kind.RELEASE])
async def test_notices_carry_the_prefill_workers_request_id_whatever_the_parallelism(kind: Kind) -> None:
    named: list[str] = []

    def listen(seen: Kind, body: bytes) -> Frames:
        if seen is kind:
            named.append(json.loads(body)["request"])
        return unchanged(seen, body)

    wide, narrow = replace(PREFILL, tensor_parallel_size=8), replace(DECODE, tensor_parallel_size=2)
    async with serving(wide, narrow) as (east, west):
        kv = await east.prefill(PROMPT)
        async with relaying(kv["remote_port"], to_prefill=listen) as relay:
            prompt = PROMPT if kind is Kind.DONE else ""
            await west.complete(prompt, kv_transfer_params=kv | {"remote_port": relay.port})
            await until(lambda: east.worker.engine.pool.used == 0, "freed")
    assert named == [kv["remote_request_id"]]


@pytest.mark.fact("6.1 row 10e")
async def test_refused_requests_leave_nothing_behind() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        engine, transfers = west.worker.engine, connector(west)
        for _ in range(20):
            kv = await east.prefill(PROMPT)
            assert (await west.complete("", kv_transfer_params=kv))[0] == 400
        await until(lambda: not transfers._background, "all told")
        assert (engine.unfinished, engine.pool.used) == (0, 0)
        assert not transfers._faulty
        assert not transfers._peers._under_way
        assert len(transfers._peers._known) == 1
        assert east.worker.engine.pool.used == 0
        assert not connector(east)._server.transfers


@pytest.mark.fact("6.2 row 14")
async def test_the_load_of_a_prefill_leg_ends_with_it() -> None:
    async with serving(replace(PREFILL, load_tracking=True), replace(DECODE, load_tracking=True)) as (east, west):

        async def load(client: Client) -> int:
            async with client.session.get(f"{client.url}/load") as response:
                found: int = (await response.json())["server_load"]
                return found

        kv = await east.prefill(PROMPT)
        decode = asyncio.create_task(west.complete(PROMPT, 10_000, kv_transfer_params=kv))
        await until(lambda: west.worker.engine.scheduler.running, "decoding")
        assert (await load(east), await load(west)) == (0, 1)
        assert await east.metric("vllm:num_requests_running") == 0
        decode.cancel()


@pytest.mark.fact("6.2 row 15")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_on_transferred_kv_is_whole(path: str) -> None:
    chat = path.endswith("chat/completions")
    body = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    async with serving(PREFILL, DECODE) as (east, west):
        _, first = await east.post(path, body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
        asked = body | {"max_tokens": 50, "kv_transfer_params": first["kv_transfer_params"]}
        *events, done = await west.stream(path, asked)
        assert done == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        text = "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)
        _, whole = await east.post(path, body | {"max_tokens": 50})
        right = whole["choices"][0]
        assert text == (right["message"]["content"] if chat else right["text"])
        assert choices[-1]["finish_reason"] == "length"


# Of vLLM's own list of failures.


async def test_a_prefill_that_is_aborted_answers_without_parameters() -> None:
    async with serving(replace(PREFILL, time_scale=1)) as (east,):
        leg = asyncio.create_task(east.complete(PROMPT, 1, kv_transfer_params={"do_remote_decode": True}))
        await until(lambda: east.worker.engine.scheduler.running, "prefill running")
        await east.worker.engine.drain(0)
        _, body = await leg
        assert body["choices"][0]["finish_reason"] == "abort"
        assert body["kv_transfer_params"] is None
        assert east.worker.engine.pool.used == 0


async def test_a_prefill_worker_that_cannot_be_told_frees_when_the_lease_ends() -> None:
    def hang_up(kind: Kind, body: bytes) -> Frames | None:
        return None if kind is Kind.DONE else [(kind, body)]

    async with serving(config("kv_producer", lease=300), DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        async with relaying(kv["remote_port"], to_prefill=hang_up) as relay:
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv | {"remote_port": relay.port})
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        await until(lambda: east.worker.engine.pool.used == 0, "lease ended")
        await until(lambda: not connector(west)._background, "given up")
        assert await west.metric("vllm:nixl_num_failed_notifications_total") == 1
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 1


async def test_a_lane_that_breaks_fails_the_transfer_and_frees_the_request() -> None:
    large = replace(config("kv_producer"), kv_byte_scale=20.0), replace(DECODE, kv_byte_scale=20.0)
    lanes = 0

    def break_a_lane(kind: Kind, body: bytes) -> Frames | None:
        nonlocal lanes
        if kind is Kind.LANE:
            lanes += 1
            return None if lanes == 2 else [(kind, body)]
        return [(kind, body)]

    async with serving(*large) as (east, west):
        kv = await east.prefill(PROMPT)
        async with relaying(kv["remote_port"], to_prefill=break_a_lane) as relay:
            assert failed(await west.complete(PROMPT, kv_transfer_params=kv | {"remote_port": relay.port}))
        assert lanes == 3
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1


async def test_a_writer_ends_its_transfer_only_when_every_lane_was_read() -> None:
    read, may_close = asyncio.Event(), asyncio.Event()
    kinds: list[Kind] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        while (frame := await connection.receive()) is not None:
            kinds.append(frame[0])
            if frame[0] is Kind.LANE:
                while await connection.expect_one_of(Kind.DATA, Kind.END) != (Kind.END, b""):
                    pass
                read.set()
                await may_close.wait()
                break
        await connection.close()

    async def go_on(_: int) -> bool:
        return False

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        first, lane = [await connect("127.0.0.1", port, 5) for _ in range(2)]
        outgoing = Outgoing(Cache("e", "r", 9, 500_000), bytes(32), go_on)
        lane.send_json(Kind.LANE, token=outgoing.token)
        carrying = asyncio.create_task(outgoing.carry(lane, until_read=5))
        await asyncio.sleep(0)
        sending = asyncio.create_task(outgoing.send(first))
        await read.wait()
        await until(lambda: Kind.END in kinds, "the first lane ended")
        assert Kind.CHECKSUM not in kinds
        assert not carrying.done(), "the lane is not over before its reader ends it"
        assert not sending.done()
        may_close.set()
        await asyncio.gather(carrying, sending)
        await until(lambda: Kind.CHECKSUM in kinds, "all read")
        for connection in (first, lane):
            await connection.close()


@pytest.mark.parametrize(("lanes", "joined"), [(1, 0), (4, 3), (16, 3)])
async def test_a_large_cache_crosses_on_several_lanes_and_is_measured(lanes: int, joined: int) -> None:
    """Of 879,240 bytes: no lane for less than 256 KiB."""
    transfer = {"lanes": lanes}
    pair = (config(role, transfer=transfer, kv_byte_scale=20.0) for role in ("kv_producer", "kv_consumer"))
    async with serving(*pair) as (east, west):
        kv = await east.prefill(PROMPT)
        async with relaying(kv["remote_port"]) as relay:
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv | {"remote_port": relay.port})
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert relay.seen.count(Kind.LANE) == joined
        size = 20 * 43_962
        assert size < await west.metric("vllm:nixl_bytes_transferred_sum") < size * 1.002
        assert await west.metric("vllm:nixl_num_descriptors_sum") == 15
        sent = await east.metric("prfaas_worker_kv_wire_bytes_total", direction="sent")
        assert size < sent <= await west.metric("prfaas_worker_kv_wire_bytes_total", direction="received")
