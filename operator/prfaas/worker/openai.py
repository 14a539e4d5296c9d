"""The OpenAI-shaped requests, answers and errors of vLLM 0.33: read, checked, written. No I/O.

Every answer has vLLM's fields, null where vLLM sends null. What this worker cannot do truthfully (several answers per
request, log probabilities, echo, token ids as a prompt) is refused with a 400 that says so, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas.worker.config import VLLM_VERSION
from prfaas.worker.oracle import chat_prompt, count_tokens

COMPLETION_DEFAULT_TOKENS = 16
MAX_STOP_STRINGS = 4
FINGERPRINT = f"vllm-{VLLM_VERSION}-prfaas"


class ApiError(Exception):
    """An error answer in vLLM's shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def body(self) -> dict[str, Any]:
        """The JSON body; in a stream, the object of an error event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A value is wrong."""
    return ApiError(400, "BadRequestError", message, param)


def bad_body(message: str, param: str | None = None) -> ApiError:
    """The body is not what the endpoint takes: vLLM's type has a space."""
    return ApiError(400, "Bad Request", message, param)


def internal_error() -> ApiError:
    """The engine failed the request, such as by a KV transfer that did not come."""
    return ApiError(500, "InternalServerError", "Internal server error")


@dataclass(frozen=True)
class Completion:
    """One request of either endpoint, checked."""

    chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    max_tokens: int | None
    """None: no limit was set (chat only)."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    request_id: str | None
    kv_params: dict[str, Any] | None

    def without_prompt(self) -> Completion:
        """The same request with its long parts dropped, for the time of its answer."""
        return replace(self, prompt=b"", kv_params=None)


def parse_completion(raw: bytes, *, chat: bool, names: tuple[str, ...], max_model_len: int) -> Completion:
    """The request in a body; ApiError for what vLLM refuses and for what this worker does not do."""
    fields = parse_object(raw)
    model = _optional(fields, "model", str) or names[0]
    if model not in names:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    _refuse_unsupported(fields)
    stream = _optional(fields, "stream", bool) or False
    options = _optional(fields, "stream_options", dict)
    if options is not None and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    try:
        prompt = (_chat_text(fields) if chat else _prompt_text(fields)).encode()
    except UnicodeEncodeError as error:
        raise bad_request("the prompt is not valid Unicode", "messages" if chat else "prompt") from error
    if not prompt:
        raise bad_request("The decoder prompt cannot be empty", "prompt")
    tokens = count_tokens(prompt)
    max_tokens = _limit(fields, chat)
    if tokens + (max_tokens or 1) > max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{max_tokens or 1} output tokens and your prompt contains {tokens} input tokens. Please reduce the "
            "length of the input prompt or the number of requested output tokens.",
            "input_tokens",
        )
    return Completion(
        chat=chat,
        model=model,
        prompt=prompt,
        prompt_tokens=tokens,
        max_tokens=max_tokens,
        stop=_stop(fields),
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        continuous_usage=bool(options and options.get("include_usage") and options.get("continuous_usage_stats")),
        request_id=_optional(fields, "request_id", str),
        kv_params=_optional(fields, "kv_transfer_params", dict),
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; ApiError otherwise."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad_body(f"JSON decode error: {error}") from error
    if not isinstance(fields, dict):
        raise bad_body("the body must be a JSON object")
    return fields


def _optional(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = fields.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise bad_body(f"{name} must be {_KINDS[kind]}", name)
    return value


_KINDS: dict[type[Any], str] = {
    str: "a string",
    bool: "a boolean",
    dict: "an object",
    int: "a whole number",
    list: "a list",
}


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, neutral in (
        ("n", (1,)),
        ("best_of", (1,)),
        ("logprobs", (False,)),
        ("top_logprobs", (0,)),
        ("prompt_logprobs", (0,)),
        ("echo", (False,)),
        ("suffix", ("",)),
        ("use_beam_search", (False,)),
        ("tools", ([],)),
    ):
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise bad_request(f"{name} is not supported by this worker", name)


def _prompt_text(fields: Mapping[str, Any]) -> str:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise bad_request("prompt must be one string: this worker takes no token ids and no batches", "prompt")
    return prompt


def _chat_text(fields: Mapping[str, Any]) -> str:
    messages = _optional(fields, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise bad_body("messages must be a list of objects", "messages")
    try:
        return chat_prompt(messages)
    except ValueError as error:
        raise bad_request(str(error), "messages") from error


def _limit(fields: Mapping[str, Any], chat: bool) -> int | None:
    name = "max_completion_tokens" if chat and fields.get("max_completion_tokens") is not None else "max_tokens"
    limit: int | None = _optional(fields, name, int)
    if limit is None:
        return None if chat else COMPLETION_DEFAULT_TOKENS
    if limit < 1:
        raise bad_request(f"{name} must be at least 1, got {limit}.", name)
    least = _optional(fields, "min_tokens", int) or 0
    if not 0 <= least <= limit:
        raise bad_request(f"min_tokens must be between 0 and {name}={limit}, got {least}.", "min_tokens")
    return limit


def _stop(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise bad_body("stop must be a string or a list of strings, none empty", "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_request(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
    return tuple(strings)


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """The usage object. `cached`: tokens for prompt_tokens_details, None where the flag is off."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def whole_answer(
    request: Completion,
    answer_id: str,
    created: int,
    text: str,
    finish_reason: str,
    counted: dict[str, Any],
    kv_params: dict[str, Any] | None,
) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice: dict[str, Any] = {"index": 0}
    if request.chat:
        choice["message"] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        }
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None, "token_ids": None}
    choice |= {"routed_experts": None, "weight_versions": None}
    extra: tuple[str, ...] = ("prompt_logprobs", "prompt_token_ids")
    if not request.chat:
        choice |= dict.fromkeys(extra)
    body: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": counted,
    }
    if request.chat:
        body |= dict.fromkeys((*extra, "prompt_text"))
    return body | {"kv_transfer_params": kv_params, "ec_transfer_params": None, "metrics": None}


class Chunks:
    """The events of one streamed answer, as bytes."""

    def __init__(self, request: Completion, answer_id: str, created: int) -> None:
        self._chat = request.chat
        kind = "chat.completion.chunk" if request.chat else "text_completion"
        self._head = {"id": answer_id, "object": kind, "created": created, "model": request.model}
        # What precedes and follows the text of a plain token never changes within a stream.
        before, _, after = self._token_json("\0", None, None).partition(json.dumps("\0"))
        self._before, self._after = f"data: {before}", f"{after}\n\n"

    def role(self) -> bytes:
        """The first chat event, which comes with the first token."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return _event({**self._head, "choices": [choice], "prompt_token_ids": None, "prompt_text": None})

    def token(self, text: str, counted: dict[str, Any] | None) -> bytes:
        """Some text; `counted` is the usage so far, in streams that ask for it in every event."""
        if counted is None:
            return (self._before + json.dumps(text) + self._after).encode()
        return f"data: {self._token_json(text, None, None, counted)}\n\n".encode()

    def last(
        self, text: str, finish_reason: str, kv_params: dict[str, Any] | None, counted: dict[str, Any] | None
    ) -> bytes:
        """The last text and why the answer ended."""
        return f"data: {self._token_json(text, finish_reason, kv_params, counted)}\n\n".encode()

    def usage(self, counted: dict[str, Any]) -> bytes:
        """The event with the usage, after the last text."""
        shown = {key: value for key, value in counted.items() if value is not None}
        return _event({**self._head, "choices": [], "usage": shown, "system_fingerprint": FINGERPRINT})

    def _token_json(
        self,
        text: str,
        finish_reason: str | None,
        kv_params: dict[str, Any] | None,
        counted: dict[str, Any] | None = None,
    ) -> str:
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": finish_reason}
            if finish_reason is not None:
                choice["stop_reason"] = None
            choice["token_ids"] = None
            if finish_reason is not None:
                choice["weight_versions"] = None
        else:
            choice |= {"text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
            choice |= dict.fromkeys(("prompt_token_ids", "token_ids", "weight_versions"))
        body: dict[str, Any] = {**self._head, "choices": [choice], "kv_transfer_params": kv_params}
        if counted is not None:
            body["usage"] = {key: value for key, value in counted.items() if not key.endswith("details")}
        return json.dumps(body, separators=(",", ":"))


def error_event(error: ApiError) -> bytes:
    """An error after the stream began."""
    return _event(error.body())


DONE = b"data: [DONE]\n\n"


def _event(body: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
