"""A streamed answer: what comes when, comments while nothing comes, how it fails."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.answers import Chunks, Head
from prfaas.worker.frontend import FrontEnd
from prfaas.worker.openai import Asked
from prfaas.worker.oracle import Sampling, count_tokens, expected_chat, token_ids
from prfaas.worker.serving import with_keep_alive
from tests.worker.rig import MODEL, ManualClock, chosen, config, gone, serving, until

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]


async def test_a_stream_of_several_answers_tells_them_apart_by_index() -> None:
    asked = {"prompt": ["one", "two"], "max_tokens": 5, "n": 2, "stream_options": {"include_usage": True}}
    async with serving(replace(config(), time_scale=50)) as (client,):
        *chunks, usage = await client.events("/v1/completions", asked)
    texts = ["", "", "", ""]
    ends = [0, 0, 0, 0]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert not ends[choice["index"]], "nothing comes after a choice's end"
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] == "length"
    assert texts == [chosen(prompt, 5, choice) for prompt in ("one", "two") for choice in (0, 1)]
    assert ends == [1, 1, 1, 1]
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}


async def test_every_choice_of_a_chat_stream_begins_with_its_role() -> None:
    async with serving(config()) as (client,):
        chunks = await client.events("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "n": 2})
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"]["content"] for choice in own)
        assert text == expected_chat(CHAT, 2, model=MODEL, sampling=Sampling(choice=index))


def test_a_streams_first_event_has_the_prompts_ids_and_no_other() -> None:
    asked = Asked(chat=False, model=MODEL, prompts=(b"",), prompt_tokens=(2,), max_tokens=2, return_ids=True)
    chunks = Chunks(asked, Head("cmpl-x", 0, MODEL, None), prompt=b"abcdefgh")
    events = [chunks.token(word, [word]) for word in (" bab", " bad")]
    shown = [json.loads(event.removeprefix(b"data: "))["choices"][0]["prompt_token_ids"] for event in events]
    assert shown == [token_ids(b"abcdefgh"), None]


@pytest.mark.fact("README 18")
async def test_the_role_comes_after_the_prefill() -> None:
    clock = ManualClock()
    async with serving(replace(config(), time_scale=1), clock=clock) as (client,):
        url = f"{client.url}/v1/chat/completions"
        asked = {"messages": CHAT, "max_tokens": 1, "stream": True}
        async with client.session.post(url, json=asked) as response:
            first = asyncio.ensure_future(response.content.readuntil(b"\n\n"))
            await until(lambda: client.worker.engine.unfinished, "prefilling")
            assert not first.done()
            clock.advance(5)
            assert b'"role":"assistant"' in await first


async def test_one_stamp_of_the_system_per_stream() -> None:
    asked = {"prompt": PROMPT, "max_tokens": 2}
    async with serving(replace(config(), time_scale=50, front=FrontEnd(fingerprint="stamp"))) as (client,):
        *others, last = await client.events("/v1/completions", asked)
        *chunks, usage = await client.events("/v1/completions", asked | {"stream_options": {"include_usage": True}})
    assert last["system_fingerprint"] == usage["system_fingerprint"] == "stamp"
    assert all("system_fingerprint" not in chunk for chunk in (*others, *chunks))


async def test_a_silent_stream_has_comments() -> None:
    gate = asyncio.Event()

    async def parts() -> Any:
        await gate.wait()
        yield b"data"

    seen = []
    async for part in with_keep_alive(parts(), 0.01):
        seen.append(part)
        if len(seen) == 2:
            gate.set()
    assert seen[:2] == [b": keep-alive\n\n"] * 2
    assert seen[-1] == b"data"
    assert [part async for part in with_keep_alive(parts(), 0)] == [b"data"]


async def test_comments_are_sent_where_the_flag_says_so() -> None:
    clock = ManualClock()
    front = FrontEnd(sse_keep_alive=1)
    async with serving(replace(config(), time_scale=1, front=front), clock=clock) as (client,):
        asked = {"prompt": PROMPT, "max_tokens": 1, "stream": True}
        async with client.session.post(f"{client.url}/v1/completions", json=asked) as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            clock.advance(5)
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.fact("README 16")
async def test_an_error_in_a_stream_is_followed_by_done() -> None:
    async with serving(config("kv_consumer")) as (client,):
        said = await client.stream(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": gone(count_tokens(PROMPT))}
        )
    assert json.loads(said[0])["error"]["code"] == 500
    assert said[1:] == ["[DONE]"]


@pytest.mark.fact("README 16")
async def test_overload_is_a_real_503_before_the_stream() -> None:
    async with serving(replace(config(), max_queued_requests=0)) as (client,):
        asked = {"prompt": PROMPT, "stream": True}
        async with client.session.post(f"{client.url}/v1/completions", json=asked) as response:
            assert (response.status, "Retry-After" in response.headers) == (503, False)
            assert (await response.json())["error"]["type"] == "Service Unavailable"
