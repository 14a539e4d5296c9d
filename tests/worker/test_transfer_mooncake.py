"""Mooncake: both legs under one transfer id, found through a bootstrap server; what is lost, vLLM loses too."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.config import WorkerConfig
from prfaas.worker.kv.mooncake import Mooncake
from prfaas.worker.kv.wire import Kind, connect
from prfaas.worker.oracle import expected_text
from tests.facts import facts
from tests.worker.relay import flip, relaying
from tests.worker.rig import MODEL, PROMPT, Client, config, failed, profile, serving, until

pytestmark = pytest.mark.slow

MOONCAKE = {"mode": "mooncake", "bootstrap_port": 0, "abort_seconds": 80_000}


def mooncake(role: Any, **changes: Any) -> WorkerConfig:
    """A worker with that connector."""
    return config(role, transfer=MOONCAKE | changes.pop("transfer", {}), **changes)


SENDER, TAKER = mooncake("kv_producer"), mooncake("kv_consumer")


def connector(client: Client) -> Mooncake:
    """The connector of a worker."""
    transfers = client.worker.engine.transfers
    assert isinstance(transfers, Mooncake)
    return transfers


def base(east: Client) -> str:
    """The bootstrap server of a prefill worker."""
    return f"http://127.0.0.1:{connector(east).bootstrap_port}"


def source(east: Client, transfer_id: str = "t") -> dict[str, Any]:
    """What a router gives the decode leg."""
    transfer = east.worker.config.kv_transfer
    assert transfer is not None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": base(east),
        "remote_engine_id": transfer.engine_id,
        "transfer_id": transfer_id,
    }


async def prefill(east: Client, transfer_id: str | None = "t", **fields: Any) -> tuple[int, dict[str, Any]]:
    """The prefill leg."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return await east.complete(PROMPT, 1, kv_transfer_params=params, **fields)


@pytest.mark.parametrize("first", ["prefill", "decode", "both"])
async def test_whichever_leg_is_first_the_answer_is_the_expected_one(first: str) -> None:
    async with serving(SENDER, TAKER) as (east, west):
        if first == "prefill":
            prefilled = await prefill(east)
            decoded = await west.complete(PROMPT, 20, kv_transfer_params=source(east))
        elif first == "decode":
            decoding = asyncio.create_task(west.complete(PROMPT, 20, kv_transfer_params=source(east)))
            await until(lambda: west.worker.engine.scheduler.fetch_stages()[1], "it asks")
            prefilled, decoded = await prefill(east), await decoding
        else:
            legs = prefill(east), west.complete(PROMPT, 20, kv_transfer_params=source(east))
            prefilled, decoded = await asyncio.gather(*legs)
        assert decoded[0] == 200
        assert decoded[1]["choices"][0]["text"] == expected_text(PROMPT, 20, model=MODEL)
        assert decoded[1]["kv_transfer_params"] is None
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side freed")
        size = profile().kv.bytes(430)
        assert size < await east.metric("vllm:mooncake_bytes_transferred_sum") < size + 1_000
        assert await east.metric("vllm:mooncake_xfer_time_seconds_count") == 1
        assert prefilled[0] == 200


@pytest.mark.fact("README 10")
async def test_the_prefill_answers_without_parameters() -> None:
    async with serving(SENDER) as (east,):
        status, body = await prefill(east)
        assert (status, body["kv_transfer_params"]) == (200, None)
        assert connector(east).kept == 1


@pytest.mark.fact("README 10")
@pytest.mark.parametrize("decode_first", [True, False])
async def test_a_prefill_that_stops_early_loses_its_blocks(decode_first: bool) -> None:
    word = expected_text(PROMPT, 1, model=MODEL).strip()
    short = {"abort_seconds": 200}
    async with serving(mooncake("kv_producer", transfer=short), mooncake("kv_consumer", transfer=short)) as (
        east,
        west,
    ):
        decoding = None
        if decode_first:
            decoding = asyncio.create_task(west.complete(PROMPT, 20, kv_transfer_params=source(east)))
            await until(lambda: west.worker.engine.scheduler.fetch_stages()[1], "it asks")
        _, body = await prefill(east, stop=word)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert connector(east).kept == 0
        assert east.worker.engine.pool.used == 0
        answer = await (decoding or west.complete(PROMPT, 20, kv_transfer_params=source(east)))
        assert failed(answer)
        assert await west.metric("vllm:mooncake_num_failed_recvs_total") == 1


async def test_a_prefill_without_transfer_id_keeps_nothing() -> None:
    async with serving(SENDER) as (east,):
        assert (await prefill(east, None))[0] == 200
        assert connector(east).kept == 0
        assert east.worker.engine.pool.used == 0


@pytest.mark.parametrize("field", ["remote_bootstrap_addr", "remote_engine_id", "transfer_id"])
async def test_a_decode_leg_without_a_field_waits_for_ever(field: str) -> None:
    async with serving(SENDER, TAKER) as (east, west):
        params = source(east)
        del params[field]
        leg = asyncio.create_task(west.complete(PROMPT, 20, kv_transfer_params=params))
        await until(lambda: west.worker.engine.scheduler.deferred, "it waits")
        assert (await west.complete("others are served"))[0] == 200
        assert not leg.done()
        leg.cancel()
        await until(lambda: west.worker.engine.unfinished == 0, "gone with its client")


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
async def test_a_leg_at_the_wrong_side_kills_the_engine(role: str) -> None:
    params = {"do_remote_prefill" if role == "kv_producer" else "do_remote_decode": True, "transfer_id": "t"}
    async with serving(mooncake(role)) as (worker,):
        assert failed(await worker.complete(PROMPT, 1, kv_transfer_params=params))
        assert worker.worker.engine.dead.is_set()


async def test_an_engine_that_the_bootstrap_server_does_not_know_fails_the_request() -> None:
    async with serving(SENDER, TAKER) as (east, west):
        assert failed(await west.complete(PROMPT, kv_transfer_params=source(east) | {"remote_engine_id": "another"}))
        nobody = source(east) | {"remote_bootstrap_addr": "http://127.0.0.1:1"}
        assert failed(await west.complete(PROMPT, kv_transfer_params=nobody))
        assert await west.metric("vllm:mooncake_num_failed_recvs_total") == 2


async def test_a_prefill_that_does_not_come_in_time_fails_the_decode_leg() -> None:
    async with serving(mooncake("kv_producer", transfer={"abort_seconds": 50}), TAKER) as (east, west):
        assert failed(await west.complete(PROMPT, kv_transfer_params=source(east)))


async def test_a_cache_that_nobody_comes_for_expires() -> None:
    async with serving(mooncake("kv_producer", transfer={"abort_seconds": 50})) as (east,):
        await prefill(east)
        await until(lambda: east.worker.engine.pool.used == 0, "freed")
        assert await east.metric("vllm:mooncake_num_kv_expired_reqs_total") == 1


async def test_a_transfer_that_breaks_fails_both_counts_and_frees() -> None:
    async with serving(SENDER, TAKER) as (east, west):
        await prefill(east)
        where = {"remote_bootstrap_addr": base(east)}
        async with relaying(connector(east).port, to_decode=flip) as relay:
            registry = connector(east)._bootstrap._registry
            registry._addresses = dict.fromkeys(registry._addresses, f"tcp://127.0.0.1:{relay.port}")
            assert failed(await west.complete(PROMPT, kv_transfer_params=source(east) | where))
        await until(lambda: east.worker.engine.pool.used == 0, "freed")
        assert await west.metric("vllm:mooncake_num_failed_recvs_total") == 1
        assert await east.metric("vllm:mooncake_num_failed_transfers_total") == 1


async def test_a_transfer_id_is_good_for_one_use() -> None:
    async with serving(SENDER, TAKER) as (east, west):
        await prefill(east)
        assert (await west.complete(PROMPT, kv_transfer_params=source(east)))[0] == 200
        assert failed(await west.complete(PROMPT, kv_transfer_params=source(east)))


@pytest.mark.fact("6.1 row 2")
@pytest.mark.parametrize("when", ["before the prefill", "queued", "while it waits for the prefill", "refused"])
async def test_a_decode_leg_that_is_given_up_frees_the_prefill_side(when: str) -> None:
    slow = replace(SENDER, time_scale=10) if when == "while it waits for the prefill" else SENDER
    async with serving(slow, mooncake("kv_consumer", max_num_seqs=1)) as (east, west):
        params = source(east)
        if when == "refused":
            await prefill(east)
            assert (await west.post("/v1/completions", {"prompt": "", "kv_transfer_params": params}))[0] == 400
        elif when == "queued":
            busy = asyncio.create_task(west.complete("busy", 100_000))
            await until(lambda: west.worker.engine.scheduler.running, "batch full")
            await prefill(east)
            leg = asyncio.create_task(west.complete(PROMPT, 20, kv_transfer_params=params))
            await until(lambda: west.worker.engine.scheduler.deferred, "queued")
            leg.cancel()
            await until(lambda: west.worker.engine.scheduler.deferred == 0, "given up")
            busy.cancel()
        else:
            leg = asyncio.create_task(west.complete(PROMPT, 20, kv_transfer_params=params))
            await until(lambda: west.worker.engine.scheduler.fetch_stages()[1], "it asks")
            await until(lambda: connector(east)._server._connections, "and is heard")
            if when == "while it waits for the prefill":
                prefilling = asyncio.create_task(prefill(east))
                await until(lambda: east.worker.engine.scheduler.running, "prefill running")
            leg.cancel()
            await until(lambda: connector(east)._lost, "told")
            await (prefilling if when == "while it waits for the prefill" else prefill(east))
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side free")
        await until(lambda: west.worker.engine.pool.used == 0, "decode side free")
        assert connector(east).kept == 0


@pytest.mark.fact("6.1 row 2")
@pytest.mark.fact("6.2 row 12")
async def test_a_prefill_leg_that_is_given_up_fails_the_decode_leg_at_once() -> None:
    async with serving(replace(SENDER, time_scale=1), TAKER) as (east, west):
        decode = asyncio.create_task(west.complete(PROMPT, 20, kv_transfer_params=source(east)))
        prefilling = asyncio.create_task(prefill(east))
        await until(lambda: connector(east)._server._connections, "the decode worker waits")
        await until(lambda: east.worker.engine.scheduler.running, "prefill running")
        prefilling.cancel()
        assert failed(await asyncio.wait_for(decode, 5))
        assert east.worker.engine.pool.used == 0
        assert west.worker.engine.pool.used == 0


async def test_a_reader_that_is_gone_without_a_word_frees_the_prefill_side() -> None:
    async with serving(replace(SENDER, time_scale=10)) as (east,):
        transfer = east.worker.config.kv_transfer
        assert transfer is not None
        reader = await connect("127.0.0.1", connector(east).port, 5)
        reader.send_json(Kind.OPEN, engine=transfer.engine_id)
        reader.send_json(Kind.WANT, transfer="t", tokens=430)
        prefilling = asyncio.create_task(prefill(east))
        await until(lambda: connector(east)._server._connections, "heard")
        reader.abort()
        await until(lambda: connector(east)._lost, "gone")
        assert (await prefilling)[0] == 200
        assert connector(east).kept == 0
        assert east.worker.engine.pool.used == 0


# The bootstrap server.


async def test_the_bootstrap_server_tells_where_the_ranks_are() -> None:
    async with serving(replace(SENDER, tensor_parallel_size=2)) as (east,):
        transfer = east.worker.config.kv_transfer
        assert transfer is not None
        addr = f"tcp://127.0.0.1:{connector(east).port}"
        async with east.session.get(f"{base(east)}/query") as response:
            known = await response.json()
        assert known == {"0": {"engine_id": transfer.engine_id, "worker_addr": {"0": {"0": addr}, "1": {"0": addr}}}}


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, 200, "ok"),
        ({"engine_id": "restarted"}, 400, "Engine ID mismatch"),
        ({"addr": "tcp://127.0.0.1:9"}, 400, "Address mismatch"),
        ({"engine_id": None}, 422, "Field required"),
    ],
)
async def test_the_bootstrap_server_takes_each_rank_once(changes: dict[str, Any], status: int, said: str) -> None:
    async with serving(SENDER) as (east,):
        transfer = east.worker.config.kv_transfer
        assert transfer is not None
        addr = f"tcp://127.0.0.1:{connector(east).port}"
        ranks = {"dp_rank": 0, "tp_rank": 0, "pp_rank": 0}
        body = {"engine_id": transfer.engine_id, "addr": addr} | ranks | changes
        given = {name: value for name, value in body.items() if value is not None}
        async with east.session.post(f"{base(east)}/register", json=given) as response:
            assert response.status == status
            assert said in await response.text()


async def test_data_parallel_ranks_share_the_first_ones_bootstrap_server() -> None:
    async with serving(SENDER) as (first,):
        port = connector(first).bootstrap_port
        ranked = {"dp_rank": 1, "bootstrap_port": port, "engine_id": "east_dp1"}
        async with serving(mooncake("kv_producer", transfer=ranked), TAKER) as (second, west):
            async with first.session.get(f"{base(first)}/query") as response:
                known = await response.json()
            assert [known[rank]["engine_id"] for rank in ("0", "1")][1] == "east_dp1"
            await prefill(second)
            params = source(first) | {"remote_engine_id": "east_dp1"}
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=params)
            assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))


async def test_an_engine_may_register_with_a_server_that_somebody_else_runs() -> None:
    async with serving(SENDER) as (first,):
        port = connector(first).bootstrap_port
        elsewhere = mooncake("kv_producer", transfer={"bootstrap_address": f"127.0.0.1:{port}"})
        with pytest.raises(Exception, match="Engine ID mismatch"):  # of the same data parallel rank
            async with serving(elsewhere):
                pass


def test_the_fields_are_vllms() -> None:
    vllm = facts("kv_transfer")["mooncake"]
    assert {field["field"] for field in vllm["leg_decode_request"]["fields"]} == {
        *("do_remote_prefill", "do_remote_decode", "remote_bootstrap_addr", "remote_engine_id", "transfer_id")
    }
    assert vllm["bootstrap"]["register"] == ["engine_id", "dp_rank", "tp_rank", "pp_rank", "addr"]


async def test_a_large_cache_crosses_on_several_lanes() -> None:
    large = profile(kv={"fixedBytes": 3_000_000, "bytesPerToken": 0})
    async with serving(replace(SENDER, profile=large), replace(TAKER, profile=large)) as (east, west):
        async with relaying(connector(east).port) as relay:
            registry = connector(east)._bootstrap._registry
            registry._addresses = dict.fromkeys(registry._addresses, f"tcp://127.0.0.1:{relay.port}")
            legs = prefill(east), west.complete(PROMPT, 20, kv_transfer_params=source(east))
            _, (status, body) = [*await asyncio.gather(*legs)]
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert relay.seen.count(Kind.LANE) == 3
