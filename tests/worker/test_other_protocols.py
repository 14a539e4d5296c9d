"""Anthropic's Messages and OpenAI's Responses: the same answers in other clothes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.frontend import FrontEnd
from prfaas.worker.oracle import count_tokens, expected_chat
from tests.worker.rig import MODEL, Client, config, gone, serving

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]
SAID = expected_chat(CHAT, 3, model=MODEL)


async def named(client: Client, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream whose events have names."""
    async with client.session.post(f"{client.url}{path}", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    events = []
    for part in text.strip().split("\n\n"):
        kind, data = part.split("\n")
        events.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert events[-1][0] == events[-1][1]["type"]
    return events


async def test_a_message() -> None:
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 3}
    async with serving(replace(config(), prompt_tokens_details=True)) as (client,):
        _, body = await client.post("/v1/messages", asked)
        _, counted = await client.post("/v1/messages/count_tokens", {"messages": CHAT})
        blocks = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
        _, system = await client.post("/v1/messages", {"system": "Be brief.", "messages": blocks, "max_tokens": 3})
        stop = SAID.split()[1]
        _, stopped = await client.post("/v1/messages", asked | {"stop_sequences": [stop]})
        _, natural = await client.post("/v1/messages", asked | {"max_tokens": 1})
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert body["content"] == [{"type": "text", "text": SAID}]
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    assert usage["output_tokens"] == 3
    with_system = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert system["content"][0]["text"] == expected_chat(with_system, 3, model=MODEL)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert natural["stop_reason"] == "max_tokens"


async def test_a_message_counts_what_was_cached_apart() -> None:
    talk = [{"role": "user", "content": PROMPT * 20}]
    async with serving(replace(config(), prompt_tokens_details=True)) as (client,):
        _, first = await client.post("/v1/messages", {"messages": talk, "max_tokens": 1})
        _, again = await client.post("/v1/messages", {"messages": talk, "max_tokens": 1})
    assert first["usage"]["cache_read_input_tokens"] == 0
    cached = again["usage"]["cache_read_input_tokens"]
    assert cached > 0
    assert again["usage"]["input_tokens"] + cached == first["usage"]["input_tokens"]


async def test_a_stream_of_a_message() -> None:
    async with serving(replace(config(), time_scale=50)) as (client,):
        events = await named(client, "/v1/messages", {"messages": CHAT, "max_tokens": 3})
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [body["delta"]["text"] for kind, body in events if kind == "content_block_delta"]
    assert "".join(deltas) == SAID
    assert events[0][1]["message"]["content"] == []
    end = events[-2][1]
    assert (end["delta"]["stop_reason"], end["usage"]["output_tokens"]) == ("max_tokens", 3)


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": "x"}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request_error"),
        ({"model": "no"}, 404, "not_found_error"),
        ({"tools": [{"name": "look"}]}, 400, "invalid_request_error"),
    ],
)
async def test_errors_of_messages_have_anthropics_shape(fields: dict[str, Any], status: int, kind: str) -> None:
    async with serving(config()) as (client,):
        got, body = await client.post("/v1/messages", {"messages": CHAT, "max_tokens": 1} | fields)
    assert (got, body["type"], body["error"]["type"]) == (status, "error", kind)


async def test_overload_of_messages_has_anthropics_name() -> None:
    async with serving(replace(config(), max_queued_requests=0)) as (client,):
        got, body = await client.post("/v1/messages", {"messages": CHAT, "max_tokens": 1})
    assert (got, body["error"]["type"]) == (503, "overloaded_error")


async def test_tool_results_and_calls_are_text() -> None:
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "42"}]}]},
    ]
    plain = [{"role": "assistant", "content": '{"a": 1}'}, {"role": "user", "content": "42"}]
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/messages", {"messages": blocks, "max_tokens": 3})
    assert body["content"][0]["text"] == expected_chat(plain, 3, model=MODEL)


async def test_a_response() -> None:
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/responses", {"input": PROMPT, "max_output_tokens": 3, "temperature": 0.5})
        items = [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]
        _, listed = await client.post(
            "/v1/responses", {"input": items, "instructions": "Be brief.", "max_output_tokens": 3}
        )
        async with client.session.get(f"{client.url}/v1/responses/{body['id']}") as response:
            assert response.status == 404, "nothing is stored without the variable"
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["temperature"]) == ("response", "incomplete", 0.5)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["content"][0]["text"] == SAID
    assert body["usage"]["output_tokens"] == 3
    with_system = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert listed["output"][0]["content"][0]["text"] == expected_chat(with_system, 3, model=MODEL)


async def test_a_stream_of_a_response() -> None:
    async with serving(replace(config(), time_scale=50)) as (client,):
        events = await named(client, "/v1/responses", {"input": PROMPT, "max_output_tokens": 3})
    kinds = [kind for kind, _ in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    assert "".join(body["delta"] for kind, body in events if kind == "response.output_text.delta") == SAID
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == SAID


async def test_stored_responses_are_found_and_gone_on_with() -> None:
    async with serving(replace(config(), front=FrontEnd(store_responses=True))) as (client,):
        _, first = await client.post("/v1/responses", {"input": PROMPT, "max_output_tokens": 3})
        async with client.session.get(f"{client.url}/v1/responses/{first['id']}") as response:
            assert await response.json() == first
        asked = {"input": "And then?", "previous_response_id": first["id"], "max_output_tokens": 3}
        _, second = await client.post("/v1/responses", asked)
        talk = [*CHAT, {"role": "assistant", "content": SAID}, {"role": "user", "content": "And then?"}]
        assert second["output"][0]["content"][0]["text"] == expected_chat(talk, 3, model=MODEL)
        status, body = await client.post(f"/v1/responses/{first['id']}/cancel", {})
        assert (status, body["error"]["param"]) == (400, "response_id")
        _, unstored = await client.post("/v1/responses", {"input": PROMPT, "max_output_tokens": 1, "store": False})
        for missing in (unstored["id"], "resp_none"):
            status, body = await client.post("/v1/responses", asked | {"previous_response_id": missing})
            assert (status, body["error"]["type"]) == (404, "invalid_request_error")
        streamed = await named(client, "/v1/responses", {"input": PROMPT, "max_output_tokens": 3})
        async with client.session.get(f"{client.url}/v1/responses/{streamed[0][1]['response']['id']}") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "fields",
    [{"background": True}, {"input": None}, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}],
)
async def test_responses_that_cannot_be_made_are_refused(fields: dict[str, Any]) -> None:
    async with serving(config()) as (client,):
        assert (await client.post("/v1/responses", {"input": PROMPT} | fields))[0] == 400


async def test_a_failed_transfer_ends_the_other_streams_too() -> None:
    params = gone(count_tokens(f"<|user|>\n{PROMPT}\n<|assistant|>\n"))
    async with serving(config("kv_consumer")) as (client,):
        asked = {"messages": CHAT, "max_tokens": 3, "kv_transfer_params": params}
        assert [kind for kind, _ in await named(client, "/v1/messages", asked)] == ["error"]
        asked = {"input": PROMPT, "max_output_tokens": 3, "kv_transfer_params": params}
        assert [kind for kind, _ in await named(client, "/v1/responses", asked)][-1] == "error"
