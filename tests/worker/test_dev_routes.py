"""Sleep, pause, caches, weights and adapters: what changes while a server runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from prfaas.worker.frontend import Adapter, FrontEnd
from prfaas.worker.oracle import adapted, expected_text
from prfaas.worker.serve import Worker
from tests.worker.rig import MODEL, Client, ManualClock, config, profile, serving, until

DEV = FrontEnd(dev_mode=True)
PROMPT = "Tell me about the sea. " * 20


async def get(client: Client, path: str) -> Any:
    """The JSON of a GET."""
    async with client.session.get(client.url + path) as response:
        return await response.json()


async def post(client: Client, path: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of a POST whose body may be empty."""
    data = None if body is None else json.dumps(body).encode()
    async with client.session.post(client.url + path, data=data) as response:
        text = await response.text()
        return response.status, json.loads(text) if text else None


async def test_a_sleeping_server_refuses_until_it_is_awake() -> None:
    async with serving(replace(config(), front=DEV)) as (client,):
        assert await post(client, "/sleep?level=2") == (200, {"status": "sleeping", "level": 2})
        assert await get(client, "/is_sleeping") == {"is_sleeping": True}
        assert await client.metric("vllm:engine_sleep_state", sleep_state="discard_all") == 1
        assert await client.metric("vllm:engine_sleep_state", sleep_state="awake") == 0
        status, body = await client.complete(PROMPT, 1)
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
        async with client.session.get(f"{client.url}/health") as response:
            assert response.status == 200
        partly = await post(client, "/wake_up?tags=weights")
        assert partly == (200, {"status": "sleeping", "tags": ["weights"]})
        assert (await client.complete(PROMPT, 1))[0] == 503
        assert await post(client, "/wake_up") == (200, {"status": "awake", "tags": None})
        assert await get(client, "/is_sleeping") == {"is_sleeping": False}
        assert await client.metric("vllm:engine_sleep_state", sleep_state="awake") == 1
        assert (await client.complete(PROMPT, 1))[0] == 200
        assert await post(client, "/release_kv_cache_memory") == (200, {"status": "kv_cache_released"})
        assert await get(client, "/is_sleeping") == {"is_sleeping": True}


async def test_a_pause_aborts_waits_or_keeps() -> None:
    clock = ManualClock()
    async with serving(replace(config(), front=DEV, time_scale=1), clock=clock) as (client,):
        running = asyncio.create_task(client.complete("x", 500))
        await until(lambda: client.worker.engine.unfinished, "in flight")
        assert await post(client, "/pause") == (200, {"status": "paused"})
        assert (await running)[1]["choices"][0]["finish_reason"] == "abort"
        assert await get(client, "/is_paused") == {"is_paused": True}
        assert (await client.complete("x", 1))[0] == 503
        assert await post(client, "/resume") == (200, {"status": "resumed"})
        assert await get(client, "/is_paused") == {"is_paused": False}

        running = asyncio.create_task(client.complete("x", 2))
        await until(lambda: client.worker.engine.unfinished, "in flight")
        pausing = asyncio.create_task(post(client, "/pause?mode=wait"))
        await until(lambda: client.worker.engine.clock.now() and not pausing.done(), "waits")
        while not running.done():
            clock.advance(2)
            await asyncio.sleep(0.005)
        assert (await running)[1]["choices"][0]["finish_reason"] == "length"
        assert (await pausing)[0] == 200
        await post(client, "/resume")

        assert (await post(client, "/pause?mode=keep"))[0] == 200
        kept = asyncio.create_task(client.complete("x", 1))
        assert await get(client, "/is_paused") == {"is_paused": True}
        assert not kept.done()
        await post(client, "/resume")
        while not kept.done():
            clock.advance(2)
            await asyncio.sleep(0.005)
        assert (await kept)[0] == 200


@pytest.mark.parametrize(
    "path", ["/pause?mode=now", "/sleep?mode=now", "/sleep?level=3", "/sleep?level=x", "/server_info?config_format=x"]
)
async def test_wrong_queries_are_refused(path: str) -> None:
    async with serving(replace(config(), front=DEV)) as (client,):
        method = "GET" if "info" in path else "POST"
        async with client.session.request(method, client.url + path) as response:
            body = await response.json()
    assert (response.status, body["error"]["type"]) == (400, "Bad Request")


async def test_requests_are_aborted_by_the_ids_that_clients_see() -> None:
    clock = ManualClock()
    async with serving(replace(config(), front=DEV, time_scale=1), clock=clock) as (client,):
        one, two, three = (
            asyncio.create_task(client.complete("x", 100, request_id=name)) for name in ("one", "two", "three")
        )
        await until(lambda: client.worker.engine.unfinished == 3, "in flight")
        assert await post(client, "/abort_requests", {"request_ids": ["cmpl-one"]}) == (
            200,
            {"status": "aborted", "aborted": 1},
        )
        assert (await one)[1]["choices"][0]["finish_reason"] == "abort"
        assert not two.done()
        assert (await post(client, "/abort_requests", {"request_ids": ["two"]}))[0] == 200
        await two
        assert await post(client, "/abort_requests", {}) == (200, {"status": "aborted", "aborted": 1})
        assert (await three)[1]["choices"][0]["finish_reason"] == "abort"
        assert (await post(client, "/abort_requests"))[0] == 400
        assert (await post(client, "/abort_requests", []))[0] == 400


async def test_the_prefix_cache_is_reset() -> None:
    async with serving(replace(config(), front=DEV, prompt_tokens_details=True)) as (client,):
        cached = []
        for reset in (False, False, True):
            if reset:
                assert await post(client, "/reset_prefix_cache") == (200, {"success": True})
            _, body = await client.complete(PROMPT, 1)
            cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True, False]
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            assert await post(client, path) == (200, None)


async def test_what_the_server_is() -> None:
    async with serving(replace(config("kv_both"), front=DEV, tensor_parallel_size=8)) as (client,):
        text, parsed = await get(client, "/server_info"), await get(client, "/server_info?config_format=json")
        assert MODEL in text["vllm_config"]
        assert parsed["vllm_config"]["kv_transfer"]["role"] == "kv_both"
        assert set(parsed) == {"vllm_config", "vllm_env", "system_env"}
        assert await get(client, "/get_world_size") == {"world_size": 8}
        assert await post(client, "/collective_rpc", {"method": "echo"}) == (200, {"results": [None] * 8})
        assert (await post(client, "/collective_rpc", {}))[0] == 400


async def test_weights_are_labels() -> None:
    async with serving(replace(config(), front=DEV)) as (client,):
        assert (await post(client, "/update_weights", {}))[0] == 500, "nothing was initialized"
        assert (await post(client, "/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
        for step in ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"):
            assert (await post(client, f"/{step}", {}))[0] == 200
        assert await get(client, "/weight_info") == {"weight_version": "default"}
        assert (await post(client, "/update_weight_version", {"weight_version": "7"}))[0] == 200
        assert await get(client, "/weight_info") == {"weight_version": "7"}
        assert (await post(client, "/update_weight_version", {}))[0] == 400
        assert (await post(client, "/weight_checker", {"action": "check"}))[0] == 200
        assert (await post(client, "/shutdown_weight_transfer_engine"))[0] == 200


LORA = FrontEnd(lora=True, lora_updates=True, adapters=(Adapter("first", "/adapters/first"),))


async def test_adapters_are_models_with_answers_of_their_own() -> None:
    async with serving(replace(config(), front=LORA)) as (client,):
        listed = (await get(client, "/v1/models"))["data"]
        assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
            (MODEL, MODEL, None),
            ("first", "/adapters/first", MODEL),
        ]
        _, body = await client.complete(PROMPT, 4, model="first")
        assert body["model"] == "first"
        assert body["choices"][0]["text"] == expected_text(PROMPT, 4, model=adapted(MODEL, "first"))
        assert body["choices"][0]["text"] != expected_text(PROMPT, 4, model=MODEL)


async def test_adapters_are_loaded_and_unloaded() -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    named = {"lora_name": "second", "lora_path": "/adapters/second"}
    headers = {"Content-Type": "application/json"}
    async with serving(replace(config(), front=LORA)) as (client,):

        async def change(path: str, body: dict[str, Any]) -> tuple[int, str]:
            async with client.session.post(client.url + path, data=json.dumps(body), headers=headers) as response:
                return response.status, await response.text()

        assert await change(load, named) == (200, "Success: LoRA adapter 'second' added successfully.")
        assert (await client.complete("x", 1, model="second"))[0] == 200
        again = await change(load, named)
        assert (again[0], json.loads(again[1])["error"]["type"]) == (400, "InvalidUserInput")
        assert (await change(load, named | {"load_inplace": True}))[0] == 200
        assert (await change(load, {"lora_name": "x"}))[0] == 400
        assert await change(unload, named) == (200, "Success: LoRA adapter 'second' removed successfully.")
        assert (await change(unload, named))[0] == 404
        assert (await change(unload, {}))[0] == 400
        assert (await client.complete("x", 1, model="second"))[0] == 404


async def test_an_adapters_cache_crosses_only_as_its_own() -> None:
    east, west = (replace(config(role), front=LORA) for role in ("kv_producer", "kv_consumer"))
    async with serving(east, west) as (prefill, decode):
        params = await prefill.prefill(PROMPT, model="first")
        _, body = await decode.complete(PROMPT, 4, model="first", kv_transfer_params=params)
    assert body["choices"][0]["text"] == expected_text(PROMPT, 4, model=adapted(MODEL, "first"))


async def test_fault_tolerance_and_scaling_say_how_it_is() -> None:
    front = FrontEnd(fault_tolerance=True, profiler=True)
    headers = {"Content-Type": "application/json"}
    async with serving(replace(config(), front=front)) as (client,):
        assert (await get(client, "/fault_tolerance/status"))["engines"][0]["status"] == "healthy"
        for body, status in (({"instruction": "retry"}, 202), ({"instruction": "burn"}, 400), ({}, 400)):
            async with client.session.post(
                f"{client.url}/fault_tolerance/apply", data=json.dumps(body), headers=headers
            ) as response:
                assert response.status == status
        assert (await post(client, "/is_scaling_elastic_ep"))[1]["is_scaling_elastic_ep"] is False
        for size in (None, 0, 2):
            assert (await post(client, "/scale_elastic_ep", {"new_data_parallel_size": size}))[0] == 400
        assert [(await post(client, path))[0] for path in ("/start_profile", "/start_profile", "/stop_profile")] == [
            *(200, 409, 200)
        ]


async def test_while_it_scales_everything_but_health_is_refused() -> None:
    clock = ManualClock()
    elastic = replace(config(), profile=profile(startupSeconds=60), time_scale=1, front=FrontEnd(elastic=True))
    worker = Worker(elastic, clock)
    starting = asyncio.create_task(worker.start())
    await until(clock.next_deadline, "loading")
    clock.advance(60)
    await starting
    async with aiohttp.ClientSession() as session:
        client = Client(worker, session)
        scaling = asyncio.create_task(post(client, "/scale_elastic_ep", {"new_data_parallel_size": 2}))
        await until(clock.next_deadline, "scaling")
        status, body = await client.complete("x", 1)
        assert (status, body) == (503, {"error": "The model is currently scaling. Please try again later."})
        async with session.get(f"{client.url}/health") as response:
            assert response.status == 200
        assert (await post(client, "/is_scaling_elastic_ep"))[1]["is_scaling_elastic_ep"] is True
        clock.advance(60)
        assert await scaling == (200, {"message": "Scaled to 2 data parallel engines"})
        assert (await post(client, "/is_scaling_elastic_ep"))[1]["is_scaling_elastic_ep"] is False
    await worker.shutdown()


async def test_names_may_go_unchecked() -> None:
    async with serving(replace(config(), front=FrontEnd(any_model_name=True))) as (client,):
        status, body = await client.complete("x", 1, model="no such")
    assert (status, body["model"]) == (200, MODEL)
