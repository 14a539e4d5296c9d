"""Token ids in and out: tokenize, detokenize, rendering, its reverse, and generation from ids."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.frontend import FrontEnd
from prfaas.worker.oracle import expected_chat, expected_text, token_ids
from tests.worker.rig import MODEL, ManualClock, config, serving, until

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]
SCALE_OUT = replace(config("kv_both"), front=FrontEnd(scale_out=True, tokenizer_info=True))
GENERATE = "/inference/v1/generate"


async def test_tokenize_and_back() -> None:
    async with serving(SCALE_OUT) as (client,):
        _, body = await client.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
        assert "".join(body["token_strs"]) == PROMPT
        assert (await client.post("/detokenize", {"tokens": body["tokens"]}))[1] == {"prompt": PROMPT}
        _, chat = await client.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False})
        assert chat["tokens"] == token_ids(f"<|user|>\n{PROMPT}\n".encode())
        for path, wrong, status in (
            ("/tokenize", {}, 400),
            ("/tokenize", {"messages": "x"}, 400),
            ("/tokenize", {"prompt": "x", "model": "no"}, 404),
            ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
            ("/tokenize", {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True}, 400),
            ("/detokenize", {"tokens": "x"}, 400),
            ("/detokenize", {"tokens": [-1]}, 400),
        ):
            assert (await client.post(path, wrong))[0] == status, wrong
        async with client.session.get(f"{client.url}/tokenizer_info") as response:
            assert (await response.json())["tokenizer_class"] == "FourByteTokenizer"


async def test_generation_from_ids() -> None:
    asked: dict[str, Any] = {
        "token_ids": token_ids(PROMPT.encode()),
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 0, "n": 2},
        "kv_transfer_params": None,
        "request_id": "mine",
    }
    async with serving(SCALE_OUT) as (client,):
        _, body = await client.post(GENERATE, asked)
        events = await client.stream(GENERATE, asked)
    first = token_ids(expected_text(PROMPT, 4, model=MODEL).encode())
    assert (body["request_id"], body["output_mode"]) == ("mine", "tokens")
    assert body["choices"][0]["token_ids"] == first
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert len(body["choices"][0]["logprobs"]["content"]) == 4
    assert len(body["prompt_logprobs"]) == len(asked["token_ids"])
    assert body["usage"]["completion_tokens"] == 8
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    streamed = [choice for choice in choices if choice["index"] == 0]
    assert [each for choice in streamed for each in choice["token_ids"]] == first
    assert [choice["finish_reason"] for choice in streamed][-1] == "length"
    assert sum(len(choice["token_ids"]) for choice in choices) == 8
    assert events[-1] == "[DONE]"


async def test_generation_from_ids_takes_the_cache_of_another() -> None:
    asked = {"token_ids": token_ids(PROMPT.encode()), "sampling_params": {"max_tokens": 1}}
    async with serving(SCALE_OUT, SCALE_OUT) as (east, west):
        _, prefilled = await east.post(GENERATE, asked | {"kv_transfer_params": {"do_remote_decode": True}})
        params = prefilled["kv_transfer_params"]
        _, body = await west.complete(PROMPT, 4, kv_transfer_params=params)
    assert body["choices"][0]["text"] == expected_text(PROMPT, 4, model=MODEL)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": []},
        {"token_ids": "x"},
        {"token_ids": [-1]},
        {"sampling_params": None},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"temperature": 5}},
        {"sampling_params": {"max_tokens": 10**9}},
    ],
)
async def test_wrong_generations_are_refused(wrong: dict[str, Any]) -> None:
    asked = {"token_ids": [1], "sampling_params": {"max_tokens": 1}} | wrong
    async with serving(SCALE_OUT) as (client,):
        assert (await client.post(GENERATE, asked))[0] == 400


async def test_a_rendered_request_generates_what_the_chat_would_say() -> None:
    async with serving(SCALE_OUT) as (client,):
        _, rendered = await client.post("/v1/chat/completions/render", {"messages": CHAT, "max_tokens": 3})
        _, generated = await client.post(GENERATE, rendered)
        _, back = await client.post("/v1/chat/completions/derender", {"model": MODEL, "generate_response": generated})
        _, text = await client.post("/v1/completions/derender", {"generate_response": generated})
        said = expected_chat(CHAT, 3, model=MODEL)
        assert back["choices"][0]["message"]["content"] == text["choices"][0]["text"] == said
        assert (back["object"], text["object"]) == ("chat.completion", "text_completion")
        assert back["usage"] == generated["usage"]

        several: Any
        _, several = await client.post("/v1/completions/render", {"prompt": ["a", "b"], "stop": ["x"]})
        assert [each["token_ids"] for each in several] == [token_ids(b"a"), token_ids(b"b")]
        assert several[0]["sampling_params"]["stop"] == ["x"]

        _, by_messages = await client.post("/v1/messages/render", {"messages": CHAT, "max_tokens": 3})
        _, by_response = await client.post("/v1/responses/render", {"input": PROMPT, "max_output_tokens": 3})
        assert by_messages["token_ids"] == by_response["token_ids"] == rendered["token_ids"]
        wrong: Any
        for wrong in (None, {"choices": []}, {"choices": [{}]}):
            assert (await client.post("/v1/completions/derender", {"generate_response": wrong}))[0] == 400


async def test_requests_are_aborted_by_their_ids() -> None:
    clock = ManualClock()
    patient = replace(SCALE_OUT, time_scale=1, front=FrontEnd(tokens_only=True, scale_out=True))
    headers = {"Content-Type": "application/json"}
    async with serving(patient, clock=clock) as (client,):
        for path in ("/inference/v1/abort_requests", "/abort_requests"):
            running = asyncio.create_task(client.complete("x", 100, request_id="mine"))
            await until(lambda: client.worker.engine.unfinished, "in flight")
            for body, status in ((b"{}", 400), (b"{", 400), (b'{"request_ids": ["mine"]}', 200)):
                async with client.session.post(client.url + path, data=body, headers=headers) as response:
                    assert response.status == status
            assert (await running)[1]["choices"][0]["finish_reason"] == "abort"
