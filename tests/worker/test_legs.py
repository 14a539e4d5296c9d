"""Table 6.3, the body of the prefill leg: what the strict worker does with a wrong leg, and with a right one.

A leg is made of the client's body; the rows say what peers left in it. `wrong` is what they sent, `right` what to send.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.worker.oracle import expected_chat, expected_text
from tests.worker.rig import DECODE, MODEL, PREFILL, PROMPT, Client, failed, serving

CHAT = [{"role": "user", "content": PROMPT}]
LEG = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


async def leg(client: Client, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The prefill leg of a chat."""
    return await client.post("/v1/chat/completions", {"messages": CHAT, **LEG, **body})


async def computed_here(client: Client) -> float:
    """Prompt tokens that this worker computed itself."""
    return await client.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


@pytest.mark.fact("6.3 row 17")
async def test_a_limit_that_is_left_makes_the_prefill_worker_write_the_whole_answer() -> None:
    async with serving(PREFILL) as (east,):
        _, wrong = await leg(east, {"max_tokens": 1, "max_completion_tokens": 40})
        _, right = await leg(east, {"max_tokens": 1, "max_completion_tokens": 1})
    assert wrong["usage"]["completion_tokens"] == 40
    assert right["usage"]["completion_tokens"] == 1
    assert right["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.fact("6.3 row 18")
async def test_a_least_length_above_the_limit_is_refused_by_prefill_and_kept_for_decode() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        status, wrong = await leg(east, {"max_tokens": 1, "min_tokens": 20})
        assert (status, wrong["error"]["type"]) == (400, "BadRequestError")
        assert "min_tokens must be less than or equal to max_tokens=1" in wrong["error"]["message"]
        _, right = await leg(east, {"max_tokens": 1})
        asked = {"messages": CHAT, "min_tokens": 400, "kv_transfer_params": right["kv_transfer_params"]}
        _, body = await west.post("/v1/chat/completions", asked)
    assert body["usage"]["completion_tokens"] == 400


@pytest.mark.fact("6.3 row 19")
async def test_stream_options_without_a_stream_are_refused_and_no_cache_is_left() -> None:
    options = {"stream_options": {"include_usage": True}}
    async with serving(PREFILL, DECODE) as (east, west):
        status, wrong = await leg(east, {"max_tokens": 1, "stream": False, **options})
        assert (status, wrong["error"]["param"]) == (400, "stream_options")
        assert len(east.worker.engine.transfers.leases) == 0
        _, right = await leg(east, {"max_tokens": 1, "stream": False})
        asked = {"messages": CHAT, "max_tokens": 3, **options, "kv_transfer_params": right["kv_transfer_params"]}
        events = await west.stream("/v1/chat/completions", asked)
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 3


@pytest.mark.fact("6.3 row 20")
async def test_a_cache_is_good_for_one_answer_not_for_several() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        _, right = await leg(east, {"max_tokens": 1})
        asked = {"messages": CHAT, "max_tokens": 3, "kv_transfer_params": right["kv_transfer_params"]}
        assert failed(await west.post("/v1/chat/completions", asked | {"n": 2})), "neither a hang nor a shared answer"
        assert west.worker.engine.unfinished == 0
        _, again = await leg(east, {"max_tokens": 1})
        asked["kv_transfer_params"] = again["kv_transfer_params"]
        assert (await west.post("/v1/chat/completions", asked))[0] == 200


@pytest.mark.fact("6.3 row 21")
async def test_a_renamed_object_is_ignored_in_silence_and_shows_in_the_metrics() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        _, right = await leg(east, {"max_tokens": 1})
        params = right["kv_transfer_params"]
        tokens = right["usage"]["prompt_tokens"]
        _, wrong = await west.post(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "kv_transfer_parameters": params}
        )
        assert wrong["choices"][0]["message"]["content"] == expected_chat(CHAT, 3, model=MODEL)
        assert await computed_here(west) == tokens, "it prefilled here, and said nothing"
        asked = {"messages": CHAT, "max_tokens": 3, "kv_transfer_params": params, "cache_salt": "anew"}
        _, body = await west.post("/v1/chat/completions", asked)
        assert body["choices"][0]["message"]["content"] == expected_chat(CHAT, 3, model=MODEL)
        external = await west.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        assert external > 0


@pytest.mark.fact("6.3 row 22")
async def test_an_answer_without_the_object_means_a_prefill_on_decode() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        _, plain = await east.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
        assert plain["kv_transfer_params"] is None, "nobody asked for it"
        asked = {"messages": CHAT, "max_tokens": 3, "kv_transfer_params": plain["kv_transfer_params"]}
        assert (await west.post("/v1/chat/completions", asked))[0] == 200
        assert await computed_here(west) == plain["usage"]["prompt_tokens"]


@pytest.mark.fact("6.3 row 23")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_object_is_relayed_on_every_endpoint(path: str) -> None:
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 3},
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
        "/v1/messages": {"messages": CHAT, "max_tokens": 3},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 3},
    }[path]
    limit = {name: 1 for name in asked if name.startswith("max")}
    async with serving(PREFILL, DECODE) as (east, west):
        _, prefilled = await east.post(path, asked | limit | LEG)
        params = prefilled["kv_transfer_params"]
        status, body = await west.post(path, asked | {"kv_transfer_params": params})
        assert await computed_here(west) <= 1
    said = expected_text(PROMPT, 3, model=MODEL) if "prompt" in asked else expected_chat(CHAT, 3, model=MODEL)
    assert status == 200
    assert said in json.dumps(body)


@pytest.mark.fact("6.3 row 25")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_decode_leg_streams(path: str) -> None:
    chat = "chat" in path
    asked: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": PROMPT}
    async with serving(PREFILL, DECODE) as (east, west):
        _, prefilled = await east.post(path, asked | {"max_tokens": 1} | LEG)
        events = await west.stream(
            path, asked | {"max_tokens": 5, "kv_transfer_params": prefilled["kv_transfer_params"]}
        )
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    text = "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)
    assert text == (expected_chat(CHAT, 5, model=MODEL) if chat else expected_text(PROMPT, 5, model=MODEL))
