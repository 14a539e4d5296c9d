"""What an answer has in it: choices, prompts as lists and as ids, log probabilities, echo, stops, usage, load."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.answers import Chunks, Head
from prfaas.worker.frontend import FrontEnd
from prfaas.worker.openai import Asked
from prfaas.worker.oracle import (
    LIKELIEST,
    Sampling,
    answer,
    answer_words,
    count_tokens,
    expected_chat,
    expected_text,
    from_token_ids,
    last_token,
    natural_length,
    prompt_state,
    token_ids,
)
from prfaas.worker.serving import with_keep_alive
from tests.worker.rig import MODEL, Client, ManualClock, config, facts, serving, until

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]
ERRORS = facts("errors")


def words_of(prompt: str, count: int, choice: int = 0) -> list[str]:
    """The first tokens of the answer."""
    raw = prompt.encode()
    every = answer_words(prompt_state(MODEL, raw), last_token(raw), choice)
    return [next(every) for _ in range(count)]


def chosen(prompt: str, tokens: int, choice: int) -> str:
    """The text of one of several answers."""
    return expected_text(prompt, tokens, model=MODEL, sampling=Sampling(choice=choice))


async def events(client: Client, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    said = await client.stream(path, asked)
    assert said[-1] == "[DONE]"
    return [json.loads(event) for event in said[:-1]]


async def test_several_answers_of_a_prompt() -> None:
    async with serving(config()) as (client,):
        _, body = await client.complete(PROMPT, 6, n=3)
        _, chat = await client.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "n": 2})
        assert await client.metric("vllm:request_params_n_sum") == 5
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]] == [chosen(PROMPT, 6, i) for i in range(3)]
    assert body["usage"]["prompt_tokens"] == count_tokens(PROMPT), "a prompt counts once"
    assert body["usage"]["completion_tokens"] == 18
    second = expected_chat(CHAT, 4, model=MODEL, sampling=Sampling(choice=1))
    assert chat["choices"][1]["message"]["content"] == second


async def test_a_list_of_prompts_has_choices_in_its_order() -> None:
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/completions", {"prompt": ["one", "twofold"], "max_tokens": 3, "n": 2})
    texts = [chosen(prompt, 3, choice) for prompt in ("one", "twofold") for choice in (0, 1)]
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] | {"prompt_tokens": 1 + 2, "completion_tokens": 12, "total_tokens": 15} == body["usage"]


async def test_a_stream_of_several_answers_tells_them_apart_by_index() -> None:
    asked = {"prompt": ["one", "two"], "max_tokens": 5, "n": 2, "stream_options": {"include_usage": True}}
    async with serving(replace(config(), time_scale=50)) as (client,):
        *chunks, usage = await events(client, "/v1/completions", asked)
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
        chunks = await events(client, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "n": 2})
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"]["content"] for choice in own)
        assert text == expected_chat(CHAT, 2, model=MODEL, sampling=Sampling(choice=index))


async def test_token_ids_are_a_prompt_as_their_text_is() -> None:
    ids = token_ids(PROMPT.encode())
    async with serving(config()) as (client,):
        _, by_text = await client.complete(PROMPT, 5)
        _, by_ids = await client.post("/v1/completions", {"prompt": ids, "max_tokens": 5})
        _, listed = await client.post("/v1/completions", {"prompt": [ids, [1, 2, 3]], "max_tokens": 5})
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"] == by_text["usage"]
    raw = from_token_ids([1, 2, 3])
    assert [choice["text"] for choice in listed["choices"]] == [
        expected_text(PROMPT, 5, model=MODEL),
        expected_text(raw, 5, model=MODEL),
    ]
    assert listed["usage"]["prompt_tokens"] == len(ids) + 3


async def test_token_ids_come_back_on_request() -> None:
    asked = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    ids, said = token_ids(PROMPT.encode()), token_ids(expected_text(PROMPT, 4, model=MODEL).encode())
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/completions", asked)
        chunks = await events(client, "/v1/completions", asked)
        _, chat = await client.post("/v1/chat/completions", {"messages": CHAT, **asked, "max_tokens": 2})
        role, *rest = await events(client, "/v1/chat/completions", {"messages": CHAT, **asked, "max_tokens": 2})
    (choice,) = body["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, said)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    assert all(chunk["choices"][0]["prompt_token_ids"] is None for chunk in chunks[1:])
    assert [each for chunk in chunks for each in chunk["choices"][0]["token_ids"]] == said
    assert chat["prompt_token_ids"] == role["prompt_token_ids"]
    assert [each for chunk in rest for each in chunk["choices"][0]["token_ids"]] == chat["choices"][0]["token_ids"]


def test_a_streams_first_event_has_the_prompts_ids_and_no_other() -> None:
    asked = Asked(chat=False, model=MODEL, prompts=(b"",), prompt_tokens=(2,), max_tokens=2, return_ids=True)
    chunks = Chunks(asked, Head("cmpl-x", 0, MODEL, None), prompt=b"abcdefgh")
    events = [chunks.token(word, [word]) for word in (" bab", " bad")]
    shown = [json.loads(event.removeprefix(b"data: "))["choices"][0]["prompt_token_ids"] for event in events]
    assert shown == [token_ids(b"abcdefgh"), None]


async def test_a_decode_worker_may_be_given_the_token_ids_of_a_chat() -> None:
    async with serving(config()) as (client,):
        _, first = await client.post(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "return_token_ids": True}
        )
        forwarded = {"prompt_token_ids": first["prompt_token_ids"]}
        asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 3, "kv_transfer_params": forwarded}
        _, second = await client.post("/v1/chat/completions", asked)
    assert second["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]


async def test_log_probabilities_of_a_completion() -> None:
    async with serving(config()) as (client,):
        _, body = await client.complete(PROMPT, 3, logprobs=2)
        _, none = await client.complete(PROMPT, 3, logprobs=0)
        _, as_ids = await client.complete(PROMPT, 1, logprobs=0, return_tokens_as_token_ids=True)
        chunks = await events(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2})
    words = words_of(PROMPT, 3)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == words
    assert logprobs["token_logprobs"] == [LIKELIEST] * 3
    assert logprobs["text_offset"] == [0, 4, 8]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert [max(top, key=top.__getitem__) for top in logprobs["top_logprobs"]] == words
    assert [len(top) for top in none["choices"][0]["logprobs"]["top_logprobs"]] == [1, 1, 1]
    assert as_ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token_ids(words[0].encode())[0]}"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in logprobs.items():
        assert [each for part in streamed for each in part[name]] == values


async def test_log_probabilities_of_a_chat() -> None:
    asked = {"messages": CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/chat/completions", asked)
        _, plain = await client.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "logprobs": True})
        _, *chunks = await events(client, "/v1/chat/completions", asked)
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == body["choices"][0]["message"]["content"]
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode())
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert len(entry["top_logprobs"]) == 2
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert [e for chunk in chunks for e in chunk["choices"][0]["logprobs"]["content"]] == content


async def test_echo_puts_the_prompt_before_the_answer() -> None:
    said = expected_text(PROMPT, 3, model=MODEL)
    async with serving(config()) as (client,):
        _, body = await client.complete(PROMPT, 3, echo=True, logprobs=1)
        _, alone = await client.complete(PROMPT, 0, echo=True)
        chunks = await events(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "echo": True})
    (choice,) = body["choices"]
    assert choice["text"] == PROMPT + said
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPT + said
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None), "a first token has none"
    assert logprobs["text_offset"][-1] == len(PROMPT + said) - 4
    assert alone["choices"][0]["text"] == PROMPT
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + said


async def test_log_probabilities_of_the_prompt() -> None:
    async with serving(config()) as (client,):
        await client.complete("abcdefgh", 1)
        _, body = await client.complete("abcdefgh", 1, prompt_logprobs=1)
        assert await client.metric("vllm:prefix_cache_queries_total") == 2, "it reads no cache: all is computed"
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    token = str(token_ids(b"efgh")[0])
    assert second[token] == {"logprob": LIKELIEST, "rank": 1, "decoded_token": "efgh"}
    assert [entry["rank"] for entry in second.values()] == [1, 2]


async def test_what_stopped_an_answer() -> None:
    words = words_of(PROMPT, 6)
    third = token_ids(words[2].encode())[0]
    async with serving(config()) as (client,):
        _, by_text = await client.complete(PROMPT, 6, stop=[words[2][1:3]])
        _, kept = await client.complete(PROMPT, 6, stop=words[2], include_stop_str_in_output=True)
        _, by_id = await client.complete(PROMPT, 6, stop_token_ids=[third])
        _, later = await client.complete(PROMPT, 6, stop=words[2], min_tokens=4)
        stream = await events(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "stop": words[2]})
    seen = [answered["choices"][0] for answered in (by_text, kept, by_id, later)]
    assert [(c["finish_reason"], c["stop_reason"]) for c in seen] == [
        ("stop", words[2][1:3]),
        ("stop", words[2]),
        ("stop", third),
        ("length", None),
    ]
    assert [c["text"] for c in seen[:3]] == ["".join(words[:2]) + words[2][:1], "".join(words[:3]), "".join(words[:2])]
    assert by_id["usage"]["completion_tokens"] == 3, "the stop token was made, and is not shown"
    assert stream[-1]["choices"][0]["stop_reason"] == words[2]


async def test_an_answer_has_its_least_length_and_ignores_its_own_end() -> None:
    natural = natural_length(prompt_state(MODEL, f"<|user|>\n{PROMPT}\n<|assistant|>\n".encode()))
    async with serving(replace(config(), max_model_len=1_000)) as (client,):
        _, longer = await client.post("/v1/chat/completions", {"messages": CHAT, "min_tokens": natural + 7})
        _, endless = await client.post("/v1/chat/completions", {"messages": CHAT, "ignore_eos": True})
    assert longer["usage"]["completion_tokens"] == natural + 7
    assert (endless["usage"]["total_tokens"], endless["choices"][0]["finish_reason"]) == (1_000, "length")


async def test_a_prompt_may_be_truncated_to_its_last_tokens() -> None:
    async with serving(config()) as (client,):
        _, left = await client.complete("abcdefghijkl", 2, truncate_prompt_tokens=2)
        _, right = await client.complete("abcdefghijkl", 2, truncate_prompt_tokens=2, truncation_side="right")
    assert left["choices"][0]["text"] == expected_text("efghijkl", 2, model=MODEL)
    assert right["choices"][0]["text"] == expected_text("abcdefgh", 2, model=MODEL)
    assert left["usage"]["prompt_tokens"] == 2


async def test_the_server_may_limit_answers() -> None:
    front = FrontEnd(default_max_tokens=3)
    async with serving(replace(config(), front=front)) as (client,):
        for asked in ({"messages": CHAT}, {"messages": CHAT, "max_tokens": 9}):
            _, body = await client.post("/v1/chat/completions", asked)
            assert body["usage"]["completion_tokens"] == 3


@pytest.mark.fact("README 20")
async def test_prompt_tokens_details_come_with_their_flag() -> None:
    long = "x" * 4 * 64
    async with serving(config(), replace(config(), prompt_tokens_details=True)) as (plain, detailed):
        _, without = await plain.complete(long, 1)
        await detailed.complete(long, 1)
        _, again = await detailed.complete(long, 1)
        *_, usage = await events(
            detailed, "/v1/completions", {"prompt": long, "max_tokens": 1, "stream_options": {"include_usage": True}}
        )
    assert without["usage"]["prompt_tokens_details"] is None
    details = again["usage"]["prompt_tokens_details"]
    assert set(details) == set(ERRORS["usage"]["prompt_tokens_details"])
    assert details["cached_tokens"] == 48, "all whole blocks but the last, which is computed"
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


@pytest.mark.fact("README 12")
async def test_a_decode_worker_reports_what_the_prefill_worker_had_cached() -> None:
    decode = replace(config("kv_consumer"), prompt_tokens_details=True)
    long = "x" * 4 * 64
    async with serving(config("kv_producer"), decode) as (east, west):
        await east.prefill(long)
        params = await east.prefill(long)
        assert params["remote_prefill_cached_tokens"] == 48
        status, body = await west.complete(long, 2, kv_transfer_params=params)
    assert status == 200
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.fact("README 18")
async def test_the_forced_usage_is_in_every_event() -> None:
    async with serving(replace(config(), force_include_usage=True, time_scale=50)) as (client,):
        *chunks, last = await events(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3})
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far == sorted(set(so_far))
    assert so_far[-1] == 3
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.fact("README 18")
async def test_the_client_never_sees_the_number_of_its_prompt() -> None:
    params = {"do_remote_decode": True}
    async with serving(config("kv_producer")) as (client,):
        status, body = await client.post(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params, "request_id": "abc"},
        )
    assert (status, body["id"]) == (200, "cmpl-abc")
    inside = body["kv_transfer_params"]["remote_request_id"]
    assert inside.startswith("cmpl-abc-0-")
    assert len(inside) == len("cmpl-abc-0-") + 8


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


@pytest.mark.fact("README 11")
async def test_the_header_of_a_request_comes_back_and_not_the_answers_id() -> None:
    async with serving(replace(config(), request_id_headers=True)) as (client,):
        asked = {"prompt": PROMPT, "max_tokens": 1, "request_id": "mine"}
        async with client.session.post(f"{client.url}/v1/completions", json=asked) as response:
            assert (await response.json())["id"] == "cmpl-mine"
            assert response.headers["X-Request-Id"] != "mine"
        async with client.session.post(
            f"{client.url}/v1/completions", json=asked, headers={"X-Request-Id": "theirs"}
        ) as response:
            assert (await response.json())["id"] == "cmpl-theirs"
            assert response.headers["X-Request-Id"] == "theirs"


@pytest.mark.fact("README 11")
async def test_a_body_of_many_megabytes_is_taken() -> None:
    """VLLM_HTTP_MAX_REQUEST_BODY_SIZE is of the Rust front end only."""
    async with serving(replace(config(), max_model_len=100)) as (client,):
        body = io.BytesIO(json.dumps({"prompt": "x" * 33 * 2**20}).encode())
        headers = {"Content-Type": "application/json"}
        async with client.session.post(f"{client.url}/v1/completions", data=body, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "input_tokens"


async def test_one_stamp_of_the_system_per_stream() -> None:
    asked = {"prompt": PROMPT, "max_tokens": 2}
    async with serving(replace(config(), time_scale=50, front=FrontEnd(fingerprint="stamp"))) as (client,):
        *others, last = await events(client, "/v1/completions", asked)
        *chunks, usage = await events(client, "/v1/completions", asked | {"stream_options": {"include_usage": True}})
    assert last["system_fingerprint"] == usage["system_fingerprint"] == "stamp"
    assert all("system_fingerprint" not in chunk for chunk in (*others, *chunks))


async def test_measurements_of_a_request() -> None:
    clock = ManualClock()
    front = FrontEnd(per_request_metrics=True)
    async with serving(replace(config(), time_scale=1, front=front), clock=clock) as (client,):
        body = await _in_steps(client, clock, n=1)
        several = await _in_steps(client, clock, n=2)
    metrics = body["metrics"]
    assert set(metrics) == set(ERRORS["non_stream"]["metrics_fields"])
    assert metrics["time_to_first_token_ms"] == pytest.approx(1001)
    assert metrics["mean_itl_ms"] == pytest.approx(100)
    assert metrics["generation_time_ms"] == pytest.approx(200)
    assert several["metrics"] is None, "two answers have no one time"


async def _in_steps(client: Client, clock: ManualClock, n: int) -> dict[str, Any]:
    """An answer of three tokens, the clock going from one thing to do to the next."""
    running = asyncio.create_task(client.complete("abcd", 3, n=n))
    while not running.done():
        due = clock.next_deadline()
        if due is not None:
            clock.advance(due - clock.now())
        await asyncio.sleep(0.005)
    return (await running)[1]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"),
        ("json", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}}'),
        ("other", None),
    ],
)
async def test_the_load_rides_on_an_answer(form: str, said: str | None) -> None:
    async with (
        serving(replace(config(), prefix_caching=False)) as (client,),
        client.session.post(
            f"{client.url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 1},
            headers={"endpoint-load-metrics-format": form},
        ) as response,
    ):
        assert response.headers.get("endpoint-load-metrics") == said


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


async def test_a_header_overrides_the_priority_of_a_body() -> None:
    front = FrontEnd(priorities=True)
    by_priority = replace(config(), front=front, scheduling_policy="priority")
    async with serving(by_priority, config()) as (client, plain):
        asked = {"prompt": PROMPT, "max_tokens": 1, "priority": 3}
        for header in ({"X-Vllm-Priority": "-5"}, {"X-Vllm-Priority": "many"}, {}):
            assert (await client.post("/v1/completions", asked, **header))[0] == 200
        status, body = await plain.post(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, **{"X-Vllm-Priority": "1"}
        )
    assert (status, body["error"]["param"]) == (400, "priority")


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": []}, "must not be an empty array"),
        ({"tools": [TOOL]}, "requires --enable-auto-tool-choice"),
        ({"tool_choice": "auto"}, "`tools` must be set"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "Invalid value for `tool_choice`: sometimes!"),
        ({"tools": [TOOL], "tool_choice": {}}, "Invalid value for `function`"),
        ({"tools": [TOOL], "tool_choice": {"function": {}}}, "Expected field `name`"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": ""}}}, "Invalid `name`"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "does not match any"),
        ({"tools": [TOOL], "tool_choice": "required"}, "a forced tool call is not supported by this worker"),
        ({"top_logprobs": 1}, "`logprobs` must be set to true"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "Cannot set both"),
    ],
)
async def test_what_a_chat_may_not_ask_for(fields: dict[str, Any], message: str) -> None:
    async with serving(config()) as (client,):
        status, body = await client.post("/v1/chat/completions", {"messages": CHAT, **fields})
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    assert message in body["error"]["message"]


async def test_tools_are_accepted_where_they_need_not_be_called() -> None:
    auto = replace(config(), front=FrontEnd(auto_tools=True))
    async with serving(config(), auto) as (plain, willing):
        asked = {"messages": CHAT, "max_tokens": 2, "tools": [TOOL]}
        for client, fields in ((plain, {"tool_choice": "none"}), (willing, {}), (willing, {"tool_choice": "auto"})):
            status, body = await client.post("/v1/chat/completions", asked | fields)
            assert status == 200
            assert body["choices"][0]["message"]["tool_calls"] == []


async def test_a_conversation_may_be_continued() -> None:
    talk = [*CHAT, {"role": "assistant", "content": "The sea"}]
    async with serving(config()) as (client,):
        _, opened = await client.post(
            "/v1/chat/completions", {"messages": talk, "max_tokens": 2, "continue_final_message": True}
        )
        _, bare = await client.post(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "add_generation_prompt": False}
        )
    rendered = f"<|user|>\n{PROMPT}\n"
    open_end = expected_text(f"{rendered}<|assistant|>\nThe sea", 2, model=MODEL)
    assert opened["choices"][0]["message"]["content"] == open_end
    assert bare["choices"][0]["message"]["content"] == expected_text(rendered, 2, model=MODEL)


async def test_accepted_parameters_change_nothing() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "seed": 7,
        "logit_bias": {"5": 1},
        "bad_words": ["x"],
        "user": "somebody",
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a*"},
        "skip_special_tokens": False,
        "stream_interval": 2,
        "unheard_of": {},
    }
    async with serving(config()) as (client,):
        _, body = await client.complete(PROMPT, 4, **fields)
        _, salted = await client.complete(PROMPT, 4, cache_salt="salt")
    assert body["choices"][0]["text"] == salted["choices"][0]["text"] == expected_text(PROMPT, 4, model=MODEL)


@pytest.mark.fact("README 16")
async def test_an_error_in_a_stream_is_followed_by_done() -> None:
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "gone",
        "remote_request_id": "gone",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "remote_num_tokens": count_tokens(PROMPT),
    }
    async with serving(config("kv_consumer")) as (client,):
        said = await client.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": params})
    assert json.loads(said[0])["error"]["code"] == 500
    assert said[1:] == ["[DONE]"]


@pytest.mark.fact("README 16")
async def test_overload_is_a_real_503_before_the_stream() -> None:
    async with serving(replace(config(), max_queued_requests=0)) as (client,):
        asked = {"prompt": PROMPT, "stream": True}
        async with client.session.post(f"{client.url}/v1/completions", json=asked) as response:
            assert (response.status, "Retry-After" in response.headers) == (503, False)
            assert (await response.json())["error"]["type"] == "Service Unavailable"


async def test_a_queue_limit_admits_all_answers_of_a_request_or_none() -> None:
    async with serving(replace(config(), max_queued_requests=2)) as (client,):
        assert (await client.complete(PROMPT, 2, n=2))[0] == 200
        assert (await client.complete(PROMPT, 2, n=3))[0] == 503
        assert client.worker.engine.unfinished == 0


def test_an_answer_is_a_function_of_its_sampling() -> None:
    state, last = prompt_state(MODEL, PROMPT.encode()), last_token(PROMPT.encode())
    assert answer(state, last, 4, Sampling(choice=3)).text == chosen(PROMPT, 4, 3)
