"""What vLLM refuses in a request, with its words: bounds, lengths, and fields that do not go together. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.worker.errors import ApiError, bad_body, bad_request
from prfaas.worker.fields import Limits, optional, whole

_BOUNDS = {
    # name: least, most, whether least itself is allowed, vLLM's words, whether the parameter is named
    "temperature": (0.0, 2.0, True, "in [0, 2]", True),
    "top_p": (0.0, 1.0, False, "in (0, 1]", True),
    "min_p": (0.0, 1.0, True, "in [0, 1]", False),
    "presence_penalty": (-2.0, 2.0, True, "in [-2, 2]", False),
    "frequency_penalty": (-2.0, 2.0, True, "in [-2, 2]", False),
    "repetition_penalty": (0.0, math.inf, False, "greater than zero", False),
    "top_k": (-1, math.inf, True, "0 (disable), or at least 1", False),
}


def check_sampling(fields: Mapping[str, Any]) -> None:
    """Bounds of what is accepted and changes nothing."""
    for name, (least, most, closed, words, named) in _BOUNDS.items():
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_body(f"{name} must be a number", name)
        if not math.isfinite(value) or not (least <= value <= most) or (value == least and not closed):
            raise bad_request(f"{name} must be {words}, got {value}.", name if named else None)


def check_length(prompt_tokens: int, limit: int | None, limits: Limits) -> None:
    """Prompt and answer must fit into the context."""
    if prompt_tokens + (1 if limit is None else limit) > limits.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{1 if limit is None else limit} output tokens and your prompt contains {prompt_tokens} input tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
        )


def check_limit(limit: int | None, min_tokens: int, name: str, least: int = 1) -> None:
    """The limit of an answer, and its least length."""
    if limit is not None and limit < least:
        raise bad_request(f"{name} must be at least {least}, got {limit}.", name)
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.", "min_tokens")
    if limit is not None and min_tokens > limit:
        raise bad_request(f"min_tokens must be less than or equal to {name}={limit}, got {min_tokens}.", "min_tokens")


def check_common(fields: Mapping[str, Any], limits: Limits) -> None:
    """What every request that generates may get wrong."""
    if fields.get("stream_options") and not fields.get("stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    form = optional(fields, "response_format", dict) or {}
    if form.get("type") == "json_schema" and form.get("json_schema") is None:
        raise bad_request(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )
    structured = optional(fields, "structured_outputs", dict) or {}
    if sum(structured.get(kind) is not None for kind in ("json", "regex", "choice")) > 1:
        raise bad_request(
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice').",
            "structured_outputs",
        )
    if optional(fields, "use_beam_search", bool):
        raise bad_request("use_beam_search is not supported by this worker", "use_beam_search")
    check_sampling(fields)
    priority = whole(fields, "priority") or 0
    if priority and not limits.front.priorities:
        raise bad_request(f"Got priority {priority} but Priority scheduling is not enabled.", "priority")


def check_logprobs(fields: Mapping[str, Any], *, chat: bool) -> None:
    """Log probabilities that are no numbers, or that go with nothing."""
    top = "top_logprobs" if chat else "logprobs"
    for name in ("prompt_logprobs", top):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise bad_request(f"`{name}` must be an integer.", name)
        if value is not None and value < -1:
            raise bad_request(f"`{name}` must be a positive value or -1.", name)
    if fields.get("stream") and (fields.get("prompt_logprobs") or 0) != 0:
        raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if chat and (fields.get("top_logprobs") or 0) != 0 and not fields.get("logprobs"):
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if fields.get("logprob_token_ids") and not fields.get("logprobs"):
        words = "be set to true" if chat else "be set"
        raise bad_request(f"when using `logprob_token_ids`, `logprobs` must {words}.", "logprob_token_ids")


def check_tools(fields: Mapping[str, Any], limits: Limits) -> None:
    """Tools, and the choice among them."""
    tools, choice = optional(fields, "tools", list), fields.get("tool_choice")
    if tools == []:
        raise bad_request(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if choice == "none" or (choice is None and not tools):
        return
    choice = "auto" if choice is None else choice
    if not tools:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        _check_named_tool(choice, tools)
    elif choice not in ("auto", "required"):
        raise bad_request(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )
    if choice == "auto" and not limits.front.auto_tools:
        raise bad_request('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if choice != "auto":
        raise bad_request("a forced tool call is not supported by this worker: its answers are words", "tool_choice")


def _check_named_tool(choice: Mapping[str, Any], tools: Sequence[Any]) -> None:
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = choice.get("function")
    if not isinstance(function, dict):
        raise bad_request(
            f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}", "tool_choice.function"
        )
    if "name" not in function:
        raise bad_request(f"Expected field `name` in `function` in `tool_choice`! {usage}", "tool_choice.function.name")
    name = function["name"]
    if not isinstance(name, str) or not name:
        raise bad_request(
            f"Invalid `name` in `function`: `{name}` in `tool_choice`! {usage}", "tool_choice.function.name"
        )
    named = [(tool.get("function") or {}).get("name") for tool in tools if isinstance(tool, dict)]
    if name not in named:
        raise bad_request(
            "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
        )


def check_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """Media by URL: this worker fetches none, and says what vLLM says of media that it cannot reach."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            where = part.get(kind) if isinstance(kind, str) and kind.endswith("_url") else None
            url = where.get("url") if isinstance(where, dict) else where
            if isinstance(url, str) and url.startswith(("http://", "https://")):
                raise ApiError(422, "UnprocessableEntityError", "The media at the given URL cannot be reached.")
