"""How long a request's prompt is, and how many sequences it asks for.

The cheap bound: 4 bytes of UTF-8 per token, rounded up, over the text of the prompt alone (no JSON around it). Token
ids are counted exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True)
class Prompt:
    """What the decision needs to know of a request."""

    tokens: int
    """Prompt tokens, all prompts of a batch together."""
    sequences: int = 1
    """Sequences that the engine would run: prompts times choices. Above 1 there is no KV transfer (see `decide`)."""


def measure(body: Mapping[str, Any]) -> Prompt:
    """The prompt of a completions or chat completions body. Shapes that no engine takes count as empty."""
    choices = max(_integer(body.get("n")), _integer(body.get("best_of")), 1)
    if body.get("use_beam_search"):
        choices = max(choices, 2)
    if "messages" in body:
        # Tool definitions are rendered into the prompt as JSON.
        tools = body.get("tools")
        size = _messages_bytes(body["messages"]) + (len(json.dumps(tools)) if tools else 0)
        return Prompt(_tokens(size), choices)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return Prompt(_tokens(_bytes(prompt)), choices)
    if not isinstance(prompt, list) or not prompt:
        return Prompt(0, choices)
    if isinstance(prompt[0], int):
        return Prompt(len(prompt), choices)
    tokens = sum(_tokens(_bytes(part)) if isinstance(part, str) else _length(part) for part in prompt)
    return Prompt(tokens, choices * len(prompt))


def _tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


def _bytes(text: str) -> int:
    # A lone surrogate is legal in JSON and has no UTF-8 form of its own.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _messages_bytes(messages: Any) -> int:
    if not isinstance(messages, list):
        return 0
    return sum(_content_bytes(message.get("content")) for message in messages if isinstance(message, dict))


def _content_bytes(content: Any) -> int:
    if isinstance(content, str):
        return _bytes(content)
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return sum(_bytes(text) for text in texts if isinstance(text, str))
    return 0
