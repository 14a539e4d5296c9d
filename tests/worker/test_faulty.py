"""Faults on request, through real HTTP; those of the process on a real process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.worker.config import WorkerConfig
from prfaas.worker.faults import parse
from prfaas.worker.kv.nixl_pull import NixlPull
from prfaas.worker.oracle import expected_text
from tests.worker.process import flags, free_port, process, said
from tests.worker.rig import DECODE, MODEL, PREFILL, PROMPT, Client, config, failed, serving, until

pytestmark = pytest.mark.slow

PATH, HEADER = "/prfaas/faults", "x-prfaas-fault"


def faulty(base: WorkerConfig, text: str = "") -> WorkerConfig:
    """A worker of which faults may be asked, with these from the start."""
    return replace(base, faults=parse(text, at_start=True))


def asked(text: str) -> dict[str, str]:
    """The header of a request."""
    return {HEADER: text}


async def put(client: Client, text: str) -> dict[str, Any]:
    """Set the faults of a worker."""
    async with client.session.put(f"{client.url}{PATH}", data=text) as response:
        assert response.status == 200, await response.text()
        document: dict[str, Any] = await response.json()
        return document


async def shown(client: Client) -> dict[str, Any]:
    """The faults of a worker, and how often each was applied."""
    async with client.session.get(f"{client.url}{PATH}") as response:
        document: dict[str, Any] = await response.json()
        return document


BODY = {"prompt": PROMPT, "max_tokens": 8}
SLOW = config(time_scale=100)
"""A token every millisecond, so that events of a stream are not told together."""


@asynccontextmanager
async def streamed(client: Client, header: str, path: str = "/v1/completions") -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream with these faults."""
    body = BODY | {"stream": True, "max_tokens": 100}
    async with client.session.post(f"{client.url}{path}", json=body, headers=asked(header)) as response:
        yield response


async def test_without_the_flag_nothing_can_be_asked_for() -> None:
    async with serving(config()) as (worker,):
        assert (await worker.post("/v1/completions", BODY, **asked("error=503")))[0] == 200
        async with worker.session.put(f"{worker.url}{PATH}", data="error=503") as response:
            assert response.status == 404


async def test_the_admin_endpoint() -> None:
    async with serving(faulty(config())) as (worker,):
        assert await shown(worker) == {"faults": "", "applied": {}, "blocks_held": 0}
        assert (await put(worker, "latency=1ms; error=503"))["faults"] == "latency=1ms; error=503"
        assert (await worker.post("/v1/completions", BODY))[0] == 503
        assert (await shown(worker))["applied"] == {"latency": 1, "error": 1}
        async with worker.session.put(f"{worker.url}{PATH}", data="latency=soon") as response:
            assert response.status == 400
            assert "latency=soon: latency must be a duration" in (await response.json())["error"]["message"]
        assert (await shown(worker))["faults"] == "latency=1ms; error=503", "and nothing changed"
        async with worker.session.delete(f"{worker.url}{PATH}") as response:
            assert (await response.json())["faults"] == ""
        assert (await worker.post("/v1/completions", BODY))[0] == 200


async def test_a_header_that_asks_for_nothing_known_is_refused() -> None:
    async with serving(faulty(config())) as (worker,):
        status, body = await worker.post("/v1/completions", BODY, **asked("explode"))
        assert (status, body["error"]["type"]) == (400, "BadRequestError")
        assert body["error"]["message"].startswith("x-prfaas-fault: explode: no such fault; there are ")


# Errors, waiting, connections.


async def test_latency_and_errors() -> None:
    async with serving(faulty(config())) as (worker,):
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await worker.post("/v1/completions", BODY, **asked("latency=200ms")))[0] == 200
        assert loop.time() - began >= 0.2
        status, body = await worker.post("/v1/chat/completions", {}, **asked("error=502"))
        assert (status, body["error"]["code"]) == (502, 502)
        url = f"{worker.url}/v1/completions"
        async with worker.session.post(url, json=BODY, headers=asked("error=529; body=%22busy%22")) as response:
            assert (response.status, await response.text()) == (529, '"busy"')


async def test_a_request_that_hangs_is_gone_with_its_client() -> None:
    async with serving(faulty(config(), "hang")) as (worker,):
        leg = asyncio.create_task(worker.complete(PROMPT))
        await until(lambda: worker.worker.engine.faults.applied["hang"], "it hangs")
        async with worker.session.get(f"{worker.url}/health") as response:
            assert response.status == 200, "stuck, and healthy to every probe"
        assert worker.worker.engine.unfinished == 0
        leg.cancel()


@pytest.mark.parametrize("where", ["request", "headers"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_cut_before_the_headers(where: str, stream: bool) -> None:
    async with serving(faulty(config())) as (worker,):
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await worker.post("/v1/completions", BODY | {"stream": stream}, **asked(f"cut={where}"))
        await until(lambda: worker.worker.engine.unfinished == 0, "nothing stays")
        computed = await worker.metric("vllm:prompt_tokens_total")
        assert (computed > 0) == (where == "headers" and not stream) or stream


async def test_a_stream_cut_in_the_middle() -> None:
    async with serving(faulty(SLOW)) as (worker,):
        async with streamed(worker, "cut=3") as response:
            assert response.status == 200
            parts = [await response.content.readuntil(b"\n\n") for _ in range(3)]
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        texts = [json.loads(part[6:])["choices"][0]["text"] for part in parts]
        assert expected_text(PROMPT, 100, model=MODEL).startswith("".join(texts))


async def test_a_whole_answer_cut_in_the_middle() -> None:
    async with serving(faulty(config())) as (worker,):
        with pytest.raises(aiohttp.ClientPayloadError):
            await worker.post("/v1/completions", BODY, **asked("cut=1"))


async def test_a_stream_that_falls_silent() -> None:
    async with serving(faulty(SLOW)) as (worker,):
        async with streamed(worker, "stall=2") as response:
            for _ in range(2):
                await response.content.readuntil(b"\n\n")
            await until(lambda: worker.worker.engine.faults.applied["stall"], "silent")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(response.content.readany(), 0.05)
        await until(lambda: worker.worker.engine.unfinished == 0, "gone with its client")


# Wrong answers.


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_one_wrong_token(path: str) -> None:
    chat = path.endswith("chat/completions")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    async with serving(faulty(config())) as (worker,):

        async def text(**headers: str) -> str:
            _, answer = await worker.post(path, body | {"max_tokens": 8}, **headers)
            choice = answer["choices"][0]
            return str(choice["message"]["content"] if chat else choice["text"])

        right, wrong = await text(), await text(**asked("wrong=token"))
        assert len(wrong) == len(right)
        assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1


async def test_one_wrong_token_in_a_stream_and_another_model() -> None:
    async with serving(faulty(config())) as (worker,):
        async with streamed(worker, "wrong=token") as response:
            raw = (await response.text()).split("\n\n")
        events = [json.loads(event[6:]) for event in raw if event.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        right = expected_text(PROMPT, 100, model=MODEL)
        assert len(text) == len(right)
        assert sum(a != b for a, b in zip(text, right, strict=True)) == 1
        assert raw[-2:] == ["data: [DONE]", ""]
        _, answer = await worker.post("/v1/completions", BODY, **asked("wrong=model"))
        assert answer["model"] == "another-model"


# KV.


async def test_a_prefill_answer_without_parameters() -> None:
    async with serving(faulty(PREFILL)) as (east,):
        body = BODY | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        _, answer = await east.post("/v1/completions", body, **asked("no-kv"))
        assert answer["kv_transfer_params"] is None
        assert east.worker.engine.transfers.kept == 1, "the blocks are stranded until the lease ends"


@pytest.mark.parametrize("by", ["header", "admin"])
@pytest.mark.parametrize("fault", ["cut", "corrupt"])
async def test_transfers_that_break(by: str, fault: str) -> None:
    async with serving(faulty(PREFILL, f"kv={fault}" if by == "admin" else ""), DECODE) as (east, west):
        body = BODY | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        header = asked(f"kv={fault}") if by == "header" else {}
        _, answer = await east.post("/v1/completions", body, **header)
        assert failed(await west.complete(PROMPT, kv_transfer_params=answer["kv_transfer_params"]))
        assert (await shown(east))["applied"] == {"kv": 1}
        if by == "header":
            assert (await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))[0] == 200


async def test_a_transfer_that_stalls_is_given_up_with_its_client() -> None:
    async with serving(faulty(PREFILL, "kv=stall"), DECODE) as (east, west):
        leg = asyncio.create_task(west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))
        await until(lambda: east.worker.engine.faults.applied["kv"], "stalls")
        assert west.worker.engine.scheduler.fetch_stages() == (0, 1, 0)
        leg.cancel()
        await until(lambda: east.worker.engine.pool.used == 0, "prefill side told")


@pytest.mark.fact("6.1 row 10")
async def test_a_transfer_of_wrong_bytes_can_be_seen_by_the_client_only() -> None:
    async with serving(faulty(PREFILL, "kv=wrong"), DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv)
        assert (status, len(body["choices"][0]["text"])) == (200, len(expected_text(PROMPT, 20, model=MODEL)))
        assert body["choices"][0]["text"] != expected_text(PROMPT, 20, model=MODEL)


@pytest.mark.fact("6.1 row 10a")
@pytest.mark.parametrize("when", ["used", "expired"])
async def test_stale_parameters_answer_200_with_wrong_text_where_that_is_asked_for(when: str) -> None:
    """As vLLM answers them. Without the fault they fail: test_transfer_leases, test_transfer_damage."""
    lease = 60 if when == "expired" else 80_000
    async with serving(faulty(config("kv_producer", lease=lease), "stale-kv"), DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        if when == "used":
            assert (await west.complete(PROMPT, kv_transfer_params=kv))[0] == 200
        await until(lambda: east.worker.engine.transfers.kept == 0, "freed")
        status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv)
        assert status == 200
        assert body["choices"][0]["text"] != expected_text(PROMPT, 20, model=MODEL)
        assert (await shown(east))["applied"] == {"stale-kv": 1}

        transfers = east.worker.engine.transfers
        assert isinstance(transfers, NixlPull)
        await until(lambda: not transfers._server._connections, "notified")
        assert await east.metric("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_a_pool_that_shrinks() -> None:
    async with serving(faulty(config(num_gpu_blocks=10_000))) as (worker,):
        assert (await put(worker, "blocks=20"))["blocks_held"] == 9_980
        assert (await worker.complete("short", 8))[0] == 200
        leg = asyncio.create_task(worker.complete(PROMPT, 8))
        await until(lambda: worker.worker.engine.scheduler.queue, "27 blocks are not there")
        await worker.session.delete(f"{worker.url}{PATH}")
        assert (await leg)[0] == 200
        assert worker.worker.engine.pool.used == 0


# Probes and processes.


async def test_health_that_lies_and_health_that_hangs() -> None:
    async with serving(faulty(config(), "health=503")) as (worker,):
        for path in ("/health", "/ping"):
            async with worker.session.get(f"{worker.url}{path}") as response:
                assert response.status == 503
        assert (await worker.complete(PROMPT))[0] == 200
        await put(worker, "health=hang")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.session.get(f"{worker.url}/health"), 0.05)
        await put(worker, "health=200")
        worker.worker.engine.die("a test")
        async with worker.session.get(f"{worker.url}/health") as response:
            assert response.status == 200


async def test_a_slow_start(tmp_path: Path) -> None:
    port = free_port()
    given = [*flags(tmp_path, port), "--enable-faults", "--faults", "slow-start=1s"]
    async with process(*given) as running:
        await said(running, "model org/model")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await said(running, f"serving on port {port}")


async def test_a_crash_after_a_time(tmp_path: Path) -> None:
    given = [*flags(tmp_path, free_port()), "--enable-faults", "--faults", "exit=7; after=50ms"]
    async with process(*given) as running:
        await said(running, "exit status 7 was asked for")
        assert await asyncio.wait_for(running.wait(), 30) == 7


async def test_a_crash_with_the_third_request(tmp_path: Path) -> None:
    port = free_port()
    async with process(*flags(tmp_path, port), "--enable-faults") as running, aiohttp.ClientSession() as session:
        await said(running, "serving on port")
        base = f"http://127.0.0.1:{port}"
        async with session.put(f"{base}{PATH}", data="exit=9; requests=3") as response:
            assert response.status == 200
        for _ in range(2):
            async with session.post(f"{base}/v1/completions", json={"prompt": "x", "max_tokens": 1}) as response:
                assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.post(f"{base}/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert await asyncio.wait_for(running.wait(), 30) == 9


async def test_wrong_faults_at_the_start_are_refused(tmp_path: Path) -> None:
    async with process(*flags(tmp_path, free_port()), "--enable-faults", "--faults", "explode") as running:
        assert "--faults: explode: no such fault" in await said(running, "error")
        assert await running.wait() == 2
    async with process(*flags(tmp_path, free_port()), "--faults", "hang") as running:
        assert "--faults: only together with --enable-faults" in await said(running, "error")
        assert await running.wait() == 2


@pytest.mark.fact("README 13")
@pytest.mark.parametrize("kept", [False, True], ids=["watchdog", "kept alive"])
async def test_the_process_of_a_dead_engine_ends(tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1" if kept else "0")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"})
    given = [*flags(tmp_path, port), "--kv-transfer-config", transfer, "--time-scale", "20"]
    async with process(*given) as running, aiohttp.ClientSession() as session:
        await said(running, "serving on port")
        base, params = f"http://127.0.0.1:{port}", {"do_remote_prefill": True}
        body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
        async with session.post(f"{base}/v1/completions", json=body) as response:
            assert response.status == 500
        async with session.get(f"{base}/health") as response:
            assert response.status == 503
        if kept:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(running.wait(), 0.5)
        else:
            assert await asyncio.wait_for(running.wait(), 30) == 1
