"""vLLM's HTTP as a client, a router and a probe see it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.oracle import count_tokens, expected_chat, expected_text
from tests.facts import facts
from tests.worker.rig import MODEL, Client, ManualClock, config, serving, until

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]
HTTP = facts("errors")


def texts(events: list[str], chat: bool) -> str:
    """The text of a stream."""
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)


async def test_completion_has_vllms_fields() -> None:
    async with serving(config()) as (client,):
        status, body = await client.complete(PROMPT, 8, model=MODEL)
    assert (status, body["object"], body["model"]) == (200, "text_completion", MODEL)
    assert list(body) == HTTP["non_stream"]["completion_fields"]
    (choice,) = body["choices"]
    assert list(choice) == HTTP["non_stream"]["completion_choice"]
    assert (choice["text"], choice["finish_reason"]) == (expected_text(PROMPT, 8, model=MODEL), "length")
    assert body["usage"] == {
        "prompt_tokens": count_tokens(PROMPT),
        "completion_tokens": 8,
        "total_tokens": count_tokens(PROMPT) + 8,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


async def test_chat_has_vllms_fields() -> None:
    async with serving(config()) as (client,):
        status, body = await client.post("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 5})
    assert (status, body["object"]) == (200, "chat.completion")
    assert list(body) == HTTP["non_stream"]["chat_fields"]
    (choice,) = body["choices"]
    assert list(choice) == HTTP["non_stream"]["chat_choice"]
    assert list(choice["message"]) == HTTP["non_stream"]["chat_message"]
    assert choice["message"]["content"] == expected_chat(CHAT, 5, model=MODEL)


async def test_a_chat_without_a_limit_ends_by_itself() -> None:
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/chat/completions", {"messages": CHAT})
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["message"]["content"] == expected_chat(CHAT, None, model=MODEL)
    room = config()
    async with serving(replace(room, max_model_len=60)) as (client,):
        _, body = await client.post("/v1/chat/completions", {"messages": CHAT})
        assert body["choices"][0]["finish_reason"] == "length", "no room for a natural end"
        assert body["usage"]["total_tokens"] == 60


async def test_a_completion_without_a_limit_has_sixteen_tokens() -> None:
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/completions", {"prompt": [PROMPT]})
    assert body["choices"][0]["text"] == expected_text(PROMPT, 16, model=MODEL)


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
async def test_a_stream_says_what_the_whole_answer_says(chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": CHAT} if chat else {"prompt": PROMPT}
    async with serving(config()) as (client,):
        _, whole = await client.post(path, asked | {"max_tokens": 30})
        events = await client.stream(path, asked | {"max_tokens": 30})
    choice = whole["choices"][0]
    assert texts(events, chat) == (choice["message"]["content"] if chat else choice["text"])
    assert events[-1] == "[DONE]"
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert len({json.loads(event)["id"] for event in events[:-1]}) == 1


async def test_stream_chunks_have_vllms_shape() -> None:
    samples = HTTP["wire_samples"]
    usage = {"include_usage": True}
    async with serving(replace(config(), prompt_tokens_details=True, time_scale=20)) as (client,):
        chat = await client.stream("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "stream_options": usage})
        plain = await client.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "stream_options": usage})
    first, content, *_, last = [shape(json.loads(event)) for event in chat[:-2]]
    json_usage = json.loads(chat[-2])
    assert first == shape(samples["chat_first_chunk"])
    assert content == shape(samples["chat_content_chunk"])
    assert last == shape(samples["chat_last_chunk"])
    # The sample's answer did not say what it added to the cache.
    del json_usage["usage"]["prompt_tokens_details"]["created_cache_tokens"]
    assert shape(json_usage) == shape(samples["chat_usage_chunk"])
    token, *_, plain_usage = [shape(json.loads(event)) for event in plain[:-1]]
    assert token == shape(samples["completions_chunk"])
    assert plain_usage == shape(samples["completions_usage_chunk"])


def shape(value: Any) -> Any:
    """Keys, their order and nesting of a JSON value, without its leaves."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    return [shape(inner) for inner in value] if isinstance(value, list) else type(value) if value == [] else "leaf"


async def test_usage_comes_last_and_only_when_asked_for() -> None:
    asked = {"prompt": PROMPT, "max_tokens": 3}
    async with serving(config()) as (client,):
        without = await client.stream("/v1/completions", asked)
        *_, last, done = await client.stream("/v1/completions", asked | {"stream_options": {"include_usage": True}})
        options = {"include_usage": True, "continuous_usage_stats": True}
        always = await client.stream("/v1/completions", asked | {"stream_options": options})
    assert all("usage" not in json.loads(event) for event in without[:-1])
    assert (json.loads(last)["choices"], json.loads(last)["usage"]["completion_tokens"], done) == ([], 3, "[DONE]")
    assert all("usage" in json.loads(event) for event in always[:-1])


async def test_request_ids() -> None:
    async with serving(replace(config("kv_producer"), request_id_headers=True)) as (client,):
        asked = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        _, body = await client.post("/v1/completions", asked | {"request_id": "body"}, **{"X-Request-Id": "head"})
        assert body["id"] == "cmpl-head"
        assert re.fullmatch(r"cmpl-head-0-[0-9a-f]{8}", body["kv_transfer_params"]["remote_request_id"])
        _, body = await client.post("/v1/completions", asked | {"request_id": "body"})
        assert body["id"] == "cmpl-body"
        chat = asked | {"messages": CHAT}
        _, body = await client.post("/v1/chat/completions", chat, **{"X-Request-Id": "head"})
        assert body["id"] == "chatcmpl-head"
        assert re.fullmatch(r"chatcmpl-head-[0-9a-f]{8}", body["kv_transfer_params"]["remote_request_id"])
        async with client.session.get(f"{client.url}/health", headers={"X-Request-Id": "ping"}) as response:
            assert response.headers["X-Request-Id"] == "ping"


ERRORS: list[tuple[dict[str, Any], int, str, str | None, str]] = [
    ({"prompt": PROMPT, "model": "no"}, 404, "NotFoundError", "model", "The model `no` does not exist."),
    ({"prompt": ""}, 400, "BadRequestError", "prompt", "must be provided and non-empty"),
    ({}, 400, "BadRequestError", "prompt", "must be provided and non-empty"),
    ({"prompt": ["a", ""]}, 400, "BadRequestError", "prompt", "cannot be empty"),
    ({"prompt": 5}, 400, "Bad Request", "prompt", "a string or a list of token ids"),
    ({"prompt": [1, -1]}, 400, "Bad Request", "prompt", "greater than or equal to 0"),
    ({"prompt": [2**32]}, 400, "BadRequestError", "prompt", "out of vocabulary"),
    ({"prompt": ["a"] * 1025}, 400, "BadRequestError", "prompt", "VLLM_MAX_COMPLETION_PROMPTS"),
    ({"prompt": "\ud800"}, 400, "BadRequestError", "prompt", "not valid Unicode"),
    ({"prompt": PROMPT, "max_tokens": 0}, 400, "BadRequestError", "max_tokens", "at least 1"),
    ({"prompt": PROMPT, "max_tokens": "5"}, 400, "Bad Request", "max_tokens", "a whole number"),
    ({"prompt": PROMPT, "max_tokens": True}, 400, "Bad Request", "max_tokens", "a whole number"),
    ({"prompt": PROMPT, "min_tokens": 9, "max_tokens": 1}, 400, "BadRequestError", "min_tokens", "max_tokens=1, got 9"),
    ({"prompt": PROMPT, "min_tokens": -1}, 400, "BadRequestError", "min_tokens", "greater than or equal to 0"),
    ({"prompt": PROMPT, "n": 0}, 400, "BadRequestError", None, "n must be at least 1, got 0."),
    ({"prompt": PROMPT, "n": 16_385}, 400, "BadRequestError", None, "VLLM_MAX_N_SEQUENCES"),
    ({"prompt": PROMPT, "logprobs": -2}, 400, "BadRequestError", "logprobs", "a positive value or -1"),
    ({"prompt": PROMPT, "logprobs": "1"}, 400, "BadRequestError", "logprobs", "must be an integer"),
    ({"prompt": PROMPT, "logprobs": 21}, 400, "BadRequestError", "logprobs", "greater than max allowed: 20"),
    ({"prompt": PROMPT, "prompt_logprobs": 21}, 400, "BadRequestError", "prompt_logprobs", "max allowed: 20"),
    ({"prompt": PROMPT, "prompt_logprobs": 1, "stream": True}, 400, "BadRequestError", "prompt_logprobs", "stream"),
    ({"prompt": PROMPT, "logprob_token_ids": [1]}, 400, "BadRequestError", "logprob_token_ids", "must be set"),
    ({"prompt": PROMPT, "suffix": "x"}, 400, "BadRequestError", "suffix", "not currently supported"),
    ({"prompt": PROMPT, "use_beam_search": True}, 400, "BadRequestError", "use_beam_search", "not supported"),
    ({"prompt": PROMPT, "prompt_embeds": "x"}, 400, "BadRequestError", "prompt_embeds", "--enable-prompt-embeds"),
    ({"prompt": PROMPT, "temperature": -1}, 400, "BadRequestError", "temperature", "in [0, 2], got -1"),
    ({"prompt": PROMPT, "top_p": 0}, 400, "BadRequestError", "top_p", "in (0, 1], got 0"),
    ({"prompt": PROMPT, "presence_penalty": 3}, 400, "BadRequestError", None, "presence_penalty must be in [-2, 2]"),
    ({"prompt": PROMPT, "top_k": "x"}, 400, "Bad Request", "top_k", "must be a number"),
    ({"prompt": PROMPT, "priority": 1}, 400, "BadRequestError", "priority", "Priority scheduling is not enabled"),
    ({"prompt": PROMPT, "cache_salt": ""}, 400, "BadRequestError", "cache_salt", "1 to 1024 characters"),
    ({"prompt": PROMPT, "truncate_prompt_tokens": 200}, 400, "BadRequestError", None, "between 1 and 100"),
    (
        {"prompt": PROMPT, "response_format": {"type": "json_schema"}},
        *(400, "BadRequestError", "response_format", "'json_schema' field must be provided"),
    ),
    (
        {"prompt": PROMPT, "structured_outputs": {"json": "{}", "regex": "a"}},
        *(400, "BadRequestError", "structured_outputs", "only use one kind"),
    ),
    ({"prompt": PROMPT, "stop": ["a"] * 5}, 400, "Bad Request", "stop", "at most 4"),
    ({"prompt": PROMPT, "stop": [1]}, 400, "Bad Request", "stop", "list of strings"),
    ({"prompt": PROMPT, "stop": [""]}, 400, "BadRequestError", None, "empty string"),
    ({"prompt": PROMPT, "stop_token_ids": ["a"]}, 400, "Bad Request", "stop_token_ids", "only integers"),
    (
        {"prompt": PROMPT, "stream_options": {"include_usage": True}},
        400,
        "BadRequestError",
        "stream_options",
        "`stream",
    ),
    ({"prompt": PROMPT, "kv_transfer_params": []}, 400, "Bad Request", "kv_transfer_params", "an object"),
    ({"prompt": "x" * 400}, 400, "BadRequestError", "input_tokens", "maximum context length is 100 tokens"),
    ({"prompt": PROMPT, "max_tokens": 95}, 400, "BadRequestError", "input_tokens", "95 output tokens"),
]


@pytest.mark.parametrize(("asked", "status", "kind", "param", "message"), ERRORS)
async def test_errors_have_vllms_shape(
    asked: dict[str, Any], status: int, kind: str, param: str | None, message: str
) -> None:
    async with serving(replace(config(), max_model_len=100)) as (client,):
        got, body = await client.post("/v1/completions", asked)
    assert got == status
    assert set(body["error"]) == set(HTTP["wire_samples"]["error"]["error"])
    assert (body["error"]["type"], body["error"]["param"], body["error"]["code"]) == (kind, param, status)
    assert message in body["error"]["message"]
    assert (status, kind) in {(error["status"], error["type"]) for error in HTTP["errors"]}


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        (None, "Bad Request", "messages must be a list of objects"),
        ([], "Bad Request", "messages must be a list of objects"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "BadRequestError", "reads text only"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "data:x"}]}], "BadRequestError", "text only"),
    ],
)
async def test_chat_errors(messages: Any, kind: str, message: str) -> None:
    async with serving(config()) as (client,):
        status, body = await client.post("/v1/chat/completions", {"messages": messages})
    assert (status, body["error"]["type"], body["error"]["param"]) == (400, kind, "messages")
    assert message in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"{", "application/json", "JSON decode error"),
        (b"[" * 100_000, "application/json", "JSON decode error"),
        (b"[]", "application/json", "must be a JSON object"),
        (b"{}", "text/plain", "Unsupported Media Type"),
    ],
    ids=["not JSON", "too deep", "no object", "content type"],
)
async def test_a_body_that_is_no_json_object(body: bytes, content_type: str, message: str) -> None:
    async with serving(config()) as (client,):
        headers = {"Content-Type": content_type}
        async with client.session.post(f"{client.url}/v1/completions", data=body, headers=headers) as response:
            error = (await response.json())["error"]
    assert (response.status, error["type"], error["code"]) == (400, "Bad Request", 400)
    assert message in error["message"]


async def test_unknown_paths_and_methods() -> None:
    async with serving(config()) as (client,):
        assert await client.post("/v1/embeddings", {}) == (404, {"detail": "Not Found"})
        assert await client.post("/health", {}) == (405, {"detail": "Method Not Allowed"})


async def test_api_keys_guard_v1_only() -> None:
    async with serving(replace(config(), api_keys=("secret", "other"))) as (client,):
        assert await client.complete(PROMPT) == (401, {"error": "Unauthorized"})
        for wrong in ("Bearer no", "secret", "Basic secret"):
            status, _ = await client.post("/v1/completions", {"prompt": PROMPT}, Authorization=wrong)
            assert status == 401
        asked = {"prompt": PROMPT}
        assert (await client.post("/v1/completions", asked, Authorization="Bearer other"))[0] == 200
        async with client.session.get(f"{client.url}/metrics") as response:
            assert response.status == 200


async def test_small_routes() -> None:
    async with serving(replace(config(), served_names=("big", "small"))) as (client,):
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            async with client.session.request(method, client.url + path) as response:
                assert (response.status, await response.read()) == (200, b"")
        for path, body in (
            ("/version", {"version": "0.33.0"}),
            ("/load", {"server_load": 0}),
            ("/kv_event_sources", {}),
        ):
            async with client.session.get(client.url + path) as response:
                assert await response.json() == body
        async with client.session.get(f"{client.url}/v1/models") as response:
            models = await response.json()
        assert [set(model) for model in models["data"]] == [set(HTTP["models_response"]["data"])] * 2
        assert [(model["id"], model["root"]) for model in models["data"]] == [("big", MODEL), ("small", MODEL)]
        assert models["data"][0]["max_model_len"] == 131_072
        assert (await client.complete(PROMPT, model="small"))[1]["model"] == "small"
        assert await client.metric("vllm:prompt_tokens_total", model_name="big") == count_tokens(PROMPT)


async def test_tokenize() -> None:
    async with serving(config()) as (client,):
        _, body = await client.post("/tokenize", {"prompt": "abcdef"})
        assert body == {"count": 2, "max_model_len": 131_072, "tokens": [0x61626364, 0x6566], "token_strs": None}
        _, body = await client.post("/tokenize", {"messages": CHAT})
        _, answer = await client.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
        assert body["count"] == answer["usage"]["prompt_tokens"]
        assert (await client.post("/tokenize", {"prompt": 5}))[0] == 400


async def test_queue_limit_on_requests() -> None:
    clock = ManualClock()
    async with serving(replace(config(), max_queued_requests=1, time_scale=1), clock=clock) as (client,):
        running = asyncio.create_task(client.complete(PROMPT, 1))
        await until(lambda: client.worker.engine.unfinished, "one in flight")
        status, body = await client.complete(PROMPT)
        assert (status, body["error"]["type"], body["error"]["code"]) == (503, "Service Unavailable", 503)
        assert await client.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
        clock.advance(5)
        assert (await running)[0] == 200


async def test_queue_limit_on_tokens_counts_prompts_still_in_prefill() -> None:
    clock = ManualClock()
    async with serving(replace(config(), max_queued_tokens=5, time_scale=1), clock=clock) as (client,):
        first = asyncio.create_task(client.complete(PROMPT, 2))
        await until(lambda: client.worker.engine.unfinished, "admitted, though it crosses the limit")
        assert (await client.complete(PROMPT))[0] == 503
        assert await client.metric("vllm:admission_rejections_total", reason="max_num_queued_tokens") == 1
        clock.advance(1.05)
        await until(lambda: client.worker.engine._prefill_tokens == 0, "prefilled, still decoding")
        second = asyncio.create_task(client.complete(PROMPT, 1))
        await until(lambda: client.worker.engine.unfinished == 2, "admitted")
        clock.advance(5)
        assert [(await first)[0], (await second)[0]] == [200, 200]


async def test_a_client_that_leaves_a_stream_frees_its_slot() -> None:
    async with serving(replace(config(), time_scale=10)) as (client,):
        asked = {"prompt": PROMPT, "max_tokens": 100_000, "stream": True}
        response = await client.session.post(f"{client.url}/v1/completions", json=asked)
        await response.content.readany()
        assert await client.metric("vllm:num_requests_running") == 1
        response.close()
        await until(lambda: client.worker.engine.unfinished == 0, "aborted")
        engine = client.worker.engine
        assert (engine.scheduler.running, engine.pool.used) == (0, 0)
        assert await client.metric("vllm:request_success_total", finished_reason="abort") == 1


async def test_load_counts_requests_under_way() -> None:
    clock = ManualClock()
    async with serving(replace(config(), load_tracking=True, time_scale=1), clock=clock) as (client,):
        running = asyncio.create_task(client.complete(PROMPT, 1))
        await until(lambda: client.worker.engine.unfinished, "in flight")
        async with client.session.get(f"{client.url}/load") as response:
            assert await response.json() == {"server_load": 1}
        clock.advance(5)
        await running


@pytest.mark.fact("README 7")
async def test_a_drain_ends_running_requests_with_abort_and_refuses_new_ones() -> None:
    clock = ManualClock()
    async with serving(replace(config(), time_scale=1), clock=clock) as (client,):
        running = asyncio.create_task(client.complete(PROMPT, 50))
        await until(lambda: client.worker.engine.unfinished, "in flight")
        clock.advance(1.35)  # the first token comes at 1.006 s, then one every 0.1 s
        await until(lambda: _generated(client) == 4, "four tokens")
        await client.worker.engine.drain(0)
        status, body = await running
        assert (status, body["choices"][0]["finish_reason"]) == (200, "abort")
        assert body["choices"][0]["text"] == expected_text(PROMPT, 4, model=MODEL)
        status, body = await client.complete(PROMPT)
        assert (status, body["choices"][0]["finish_reason"], body["choices"][0]["text"]) == (200, "abort", "")
        async with client.session.get(f"{client.url}/health") as response:
            assert response.status == 200
        assert await client.metric("vllm:request_success_total", finished_reason="abort") == 2


async def test_a_drain_waits_for_requests_and_leases() -> None:
    clock = ManualClock()
    east_config = replace(config("kv_producer", lease=30), time_scale=1)
    async with serving(east_config, clock=clock) as (client,):
        leg = asyncio.create_task(client.prefill(PROMPT))
        await until(lambda: client.worker.engine.unfinished, "in flight")
        drain = asyncio.create_task(client.worker.engine.drain(5))
        clock.advance(2)
        assert await leg
        assert not drain.done(), "somebody is to read this KV"
        clock.advance(30)
        await drain
        assert client.worker.engine.pool.used == 0


def _generated(client: Client) -> int:
    (generation,) = client.worker.engine._generations.values()
    return generation.sequence.generated


async def test_media_that_must_be_fetched_is_not_reached() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://nowhere/x.png"}}
    async with serving(config()) as (client,):
        status, body = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
    assert (status, body["error"]["type"]) == (422, "UnprocessableEntityError")
