"""What only a chat has: tools, an open end, token ids in its transfer parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.frontend import FrontEnd
from prfaas.worker.oracle import expected_text
from tests.worker.rig import MODEL, config, serving

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]


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


async def test_a_decode_worker_may_be_given_the_token_ids_of_a_chat() -> None:
    async with serving(config()) as (client,):
        _, first = await client.post(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "return_token_ids": True}
        )
        forwarded = {"prompt_token_ids": first["prompt_token_ids"]}
        asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 3, "kv_transfer_params": forwarded}
        _, second = await client.post("/v1/chat/completions", asked)
    assert second["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
