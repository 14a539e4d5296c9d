"""What an answer has in it: choices, prompts as lists and as ids, stops, lengths, load, and the names it goes by."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.frontend import FrontEnd
from prfaas.worker.oracle import (
    Sampling,
    answer,
    count_tokens,
    expected_chat,
    expected_text,
    from_token_ids,
    last_token,
    natural_length,
    prompt_state,
    token_ids,
)
from tests.facts import facts
from tests.worker.rig import MODEL, Client, ManualClock, chosen, config, serving, words_of

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]
ERRORS = facts("errors")


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
        chunks = await client.events("/v1/completions", asked)
        _, chat = await client.post("/v1/chat/completions", {"messages": CHAT, **asked, "max_tokens": 2})
        role, *rest = await client.events("/v1/chat/completions", {"messages": CHAT, **asked, "max_tokens": 2})
    (choice,) = body["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, said)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    assert all(chunk["choices"][0]["prompt_token_ids"] is None for chunk in chunks[1:])
    assert [each for chunk in chunks for each in chunk["choices"][0]["token_ids"]] == said
    assert chat["prompt_token_ids"] == role["prompt_token_ids"]
    assert [each for chunk in rest for each in chunk["choices"][0]["token_ids"]] == chat["choices"][0]["token_ids"]


async def test_what_stopped_an_answer() -> None:
    words = words_of(PROMPT, 6)
    third = token_ids(words[2].encode())[0]
    async with serving(config()) as (client,):
        _, by_text = await client.complete(PROMPT, 6, stop=[words[2][1:3]])
        _, kept = await client.complete(PROMPT, 6, stop=words[2], include_stop_str_in_output=True)
        _, by_id = await client.complete(PROMPT, 6, stop_token_ids=[third])
        _, later = await client.complete(PROMPT, 6, stop=words[2], min_tokens=4)
        stream = await client.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "stop": words[2]})
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


async def test_a_queue_limit_admits_all_answers_of_a_request_or_none() -> None:
    async with serving(replace(config(), max_queued_requests=2)) as (client,):
        assert (await client.complete(PROMPT, 2, n=2))[0] == 200
        assert (await client.complete(PROMPT, 2, n=3))[0] == 503
        assert client.worker.engine.unfinished == 0


def test_an_answer_is_a_function_of_its_sampling() -> None:
    state, last = prompt_state(MODEL, PROMPT.encode()), last_token(PROMPT.encode())
    assert answer(state, last, 4, Sampling(choice=3)).text == chosen(PROMPT, 4, 3)
