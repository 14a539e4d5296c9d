"""The answers of the completions and the chat endpoint: whole bodies and the events of streams. No I/O.

Every answer has vLLM's fields, null where vLLM sends null: a router that counts on a field finds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.worker.errors import ApiError
from prfaas.worker.logprobs import answer_ids, chat_logprobs, completion_logprobs, prompt_logprobs, prompt_words
from prfaas.worker.openai import Asked
from prfaas.worker.oracle import token_ids

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Outcome:
    """One finished answer."""

    text: str
    words: Sequence[str]
    """The whole text of every token, also of one that a stop string cut; empty unless the request asks for details."""
    finish_reason: str
    stop_reason: str | int | None
    prompt: bytes = b""
    """Kept only for `echo`, prompt ids and prompt log probabilities."""


@dataclass(frozen=True)
class Head:
    """What every body and event of one request has."""

    answer_id: str
    created: int
    model: str
    fingerprint: str | None


def usage(prompt: int, completion: int, cached: int | None = None, created: int | None = None) -> dict[str, Any]:
    """The usage object. `cached`: tokens for prompt_tokens_details, None where the flag is off; `created`: chat's."""
    details = {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None if cached is None else details,
        "completion_tokens_details": None,
    }


def whole_answer(
    asked: Asked,
    head: Head,
    outcomes: Iterable[Outcome],
    counted: dict[str, Any],
    kv_params: dict[str, Any] | None,
    metrics: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    answers = list(outcomes)
    shape = _chat_choice if asked.chat else _completion_choice
    body: dict[str, Any] = {
        "id": head.answer_id,
        "object": "chat.completion" if asked.chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [shape(asked, index, outcome) for index, outcome in enumerate(answers)],
        "service_tier": None,
        "system_fingerprint": head.fingerprint,
        "usage": counted,
    }
    if asked.chat:
        body |= _prompt_details(asked, answers[0].prompt) | {"prompt_text": None}
    return body | {"kv_transfer_params": kv_params, "ec_transfer_params": None, "metrics": metrics}


def _chat_choice(asked: Asked, index: int, outcome: Outcome) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": outcome.text}
    message |= {"refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, "tool_calls": [], "reasoning": None}
    logprobs = None
    if asked.logprobs is not None:
        logprobs = chat_logprobs(outcome.words, asked.logprobs, as_ids=asked.ids_as_tokens)
    return {"index": index, "message": message, "logprobs": logprobs} | _end(asked, outcome) | _NEVER


def _completion_choice(asked: Asked, index: int, outcome: Outcome) -> dict[str, Any]:
    shown = prompt_words(outcome.prompt) if asked.echo else []
    said = [] if asked.max_tokens == 0 else outcome.words
    text = outcome.prompt.decode(errors="replace") if asked.echo else ""
    logprobs = None
    if asked.logprobs is not None:
        logprobs = completion_logprobs([*shown, *said], asked.logprobs, as_ids=asked.ids_as_tokens, prompt=bool(shown))
    choice = {"index": index, "text": text + ("" if asked.max_tokens == 0 else outcome.text), "logprobs": logprobs}
    return choice | _end(asked, outcome) | _prompt_details(asked, outcome.prompt) | _NEVER


def _end(asked: Asked, outcome: Outcome) -> dict[str, Any]:
    return {
        "finish_reason": outcome.finish_reason,
        "stop_reason": outcome.stop_reason,
        "token_ids": answer_ids(outcome.words) if asked.return_ids else None,
    }


_NEVER = {"routed_experts": None, "weight_versions": None}
"""What this model has none of."""


def _prompt_details(asked: Asked, prompt: bytes) -> dict[str, Any]:
    wanted = asked.prompt_logprobs
    return {
        "prompt_logprobs": None if wanted is None else prompt_logprobs(prompt, wanted),
        "prompt_token_ids": token_ids(prompt) if asked.return_ids else None,
    }


class Chunks:
    """The events of one choice of a streamed answer, as bytes."""

    def __init__(self, asked: Asked, head: Head, index: int = 0, prompt: bytes = b"") -> None:
        self._asked, self._index, self._prompt = asked, index, prompt
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        self._head = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
        self._fingerprint = head.fingerprint
        self._offset = 0
        self._first = True
        # What precedes and follows the text of a plain token never changes within a stream.
        before, _, after = self._json("\0").partition(json.dumps("\0"))
        self._before, self._after = f"data: {before}", f"{after}\n\n"
        self._first = True

    def role(self) -> bytes:
        """The first chat event of a choice, which comes with its first token."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = token_ids(self._prompt) if self._asked.return_ids else None
        return event({**self._head, "choices": [choice], "prompt_token_ids": ids, "prompt_text": None})

    def echo(self, counted: dict[str, Any] | None) -> bytes:
        """The prompt, as the first event of a completion that echoes it."""
        text, words = self._prompt.decode(errors="replace"), prompt_words(self._prompt)
        return f"data: {self._json(text, words, counted=counted, prompt=True)}\n\n".encode()

    def token(self, text: str, words: Sequence[str] = (), counted: dict[str, Any] | None = None) -> bytes:
        """Some text; `counted` is the usage so far, in streams that ask for it in every event."""
        if counted is None and not words:
            return (self._before + json.dumps(text) + self._after).encode()
        return f"data: {self._json(text, words, counted=counted)}\n\n".encode()

    def last(
        self,
        text: str,
        words: Sequence[str],
        finish_reason: str,
        stop_reason: str | int | None,
        kv_params: dict[str, Any] | None,
        counted: dict[str, Any] | None,
        *,
        stamped: bool,
    ) -> bytes:
        """The last text of a choice and why it ended; `stamped`: no usage event follows, so this one is the last."""
        end = (finish_reason, stop_reason)
        return f"data: {self._json(text, words, end, kv_params, counted, stamped=stamped)}\n\n".encode()

    def usage(self, counted: dict[str, Any], metrics: dict[str, Any] | None = None) -> bytes:
        """The event with the usage, after the last text."""
        body = {**self._head, "choices": [], "usage": counted, "system_fingerprint": self._fingerprint}
        return event(without_nulls(body | {"metrics": metrics}))

    def _json(
        self,
        text: str,
        words: Sequence[str] = (),
        end: tuple[str | None, str | int | None] = (None, None),
        kv_params: dict[str, Any] | None = None,
        counted: dict[str, Any] | None = None,
        *,
        stamped: bool = False,
        prompt: bool = False,
    ) -> str:
        reason, stop_reason = end
        ids = answer_ids(words) if self._asked.return_ids and not prompt else None
        choice: dict[str, Any] = {"index": self._index}
        if self._asked.chat:
            choice |= {"delta": {"content": text}, "logprobs": self._logprobs(words), "finish_reason": reason}
            if reason is not None:
                choice["stop_reason"] = stop_reason
            choice["token_ids"] = ids
            if reason is not None:
                choice["weight_versions"] = None
        else:
            choice |= {"text": text, "logprobs": self._logprobs(words, prompt), "finish_reason": reason}
            choice |= {"stop_reason": stop_reason, "prompt_token_ids": self._prompt_ids(), "token_ids": ids}
            choice["weight_versions"] = None
        body: dict[str, Any] = {**self._head, "choices": [choice], "kv_transfer_params": kv_params}
        if stamped and self._fingerprint is not None:
            body["system_fingerprint"] = self._fingerprint
        if counted is not None:
            body["usage"] = {key: value for key, value in counted.items() if not key.endswith("details")}
        return json.dumps(body, separators=(",", ":"))

    def _prompt_ids(self) -> list[int] | None:
        """In the first event of a choice only."""
        first, self._first = self._first, False
        return token_ids(self._prompt) if first and self._asked.return_ids and self._prompt else None

    def _logprobs(self, words: Sequence[str], prompt: bool = False) -> dict[str, Any] | None:
        wanted, as_ids = self._asked.logprobs, self._asked.ids_as_tokens
        if wanted is None:
            return None
        if self._asked.chat:
            return chat_logprobs(words, wanted, as_ids=as_ids)
        shown = completion_logprobs(words, wanted, as_ids=as_ids, offset=self._offset, prompt=prompt)
        self._offset += sum(map(len, words))
        return shown


def error_event(error: ApiError) -> bytes:
    """An error after the stream began."""
    return event(error.body())


def event(body: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


def without_nulls(value: Any) -> Any:
    """The same JSON without null members."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value
