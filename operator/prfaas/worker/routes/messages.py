"""Anthropic's Messages over the same answers: `/v1/messages` and its token count. Errors have Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from prfaas.worker.errors import ApiError, bad_body, internal_error
from prfaas.worker.fields import parse_object
from prfaas.worker.openai import chat_request
from prfaas.worker.routes.bodies import answer_headers, read_body
from prfaas.worker.serving import Run, Serving, answer_base, with_keep_alive

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Messages:
    """The Messages routes."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        try:
            return await self._create(http, await read_body(http))
        except ApiError as error:
            return _refused(error)

    async def count(self, http: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        raw = await read_body(http)
        try:
            fields = as_chat(parse_object(raw) | {"max_tokens": 1})
            asked = chat_request(fields, self._serving.limits())
        except ApiError as error:
            return _refused(error)
        return web.json_response({"input_tokens": asked.prompt_tokens[0], "context_management": None})

    async def _create(self, http: web.Request, raw: bytes) -> web.StreamResponse:
        serving = self._serving
        try:
            asked = chat_request(as_chat(parse_object(raw)), serving.limits())
        except ApiError:
            serving.refused(raw)
            raise
        run = await serving.begin(http, asked, f"chatcmpl-{answer_base(http, asked.request_id)}", indexed=False)
        asked = run.asked  # without its prompt
        del raw
        try:
            if asked.stream:
                return await self._stream(http, run)
            (outcome,) = await serving.outcomes(run)
            reason, sequence = _stopped(outcome.finish_reason, outcome.stop_reason)
            body = self._message(run) | {
                "content": [{"type": "text", "text": outcome.text}],
                "stop_reason": reason,
                "stop_sequence": sequence,
                "usage": self._usage(run),
                "kv_transfer_params": run.generations[0].kv_params,
                "ec_transfer_params": None,
            }
            return web.json_response(body)
        finally:
            serving.end(run)

    async def _stream(self, http: web.Request, run: Run) -> web.StreamResponse:
        headers = answer_headers(http, self._serving.config.request_id_headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"} | headers)
        await response.prepare(http)
        async for part in with_keep_alive(self._events(run), 0):
            await response.write(part)
        await response.write_eof()
        return response

    async def _events(self, run: Run) -> AsyncIterator[bytes]:
        generation = run.generations[0]
        reason: str | None = None
        begun = False
        while reason is None:
            fresh, reason = await generation.next()
            if reason == "error":
                failed = internal_error()
                yield _event("error", {"error": {"type": "api_error", "message": failed.message}})
                return
            if not begun:
                begun = True
                usage = {"input_tokens": run.asked.prompt_tokens[0], "output_tokens": 0}
                started: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
                yield _event("message_start", {"message": self._message(run) | started})
                yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
            if text := "".join(fresh):
                yield _event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})
        yield _event("content_block_stop", {"index": 0})
        stopped, sequence = _stopped(reason, generation.stop_reason)
        delta = {"stop_reason": stopped, "stop_sequence": sequence}
        yield _event("message_delta", {"delta": delta, "usage": self._usage(run)})
        yield _event("message_stop", {})

    def _message(self, run: Run) -> dict[str, Any]:
        return {"id": run.head.answer_id, "type": "message", "role": "assistant", "model": run.head.model}

    def _usage(self, run: Run) -> dict[str, Any]:
        counted = self._serving.usage(run, details=True)
        details = counted["prompt_tokens_details"]
        if details is None:
            return {"input_tokens": counted["prompt_tokens"], "output_tokens": counted["completion_tokens"]}
        cached = details["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "output_tokens": counted["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def as_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that a Messages request is."""
    limit = fields.get("max_tokens")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise bad_body("max_tokens must be a whole number of at least 1", "max_tokens")
    given = fields.get("messages")
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise bad_body("messages must be a list of objects", "messages")
    messages = [{"role": each.get("role"), "content": _text(each.get("content"))} for each in given]
    if fields.get("system"):
        messages.insert(0, {"role": "system", "content": _text(fields["system"])})
    same = ("model", "stream", "temperature", "top_p", "top_k", "kv_transfer_params", "cache_salt", "request_id")
    chat = {name: fields[name] for name in same if fields.get(name) is not None}
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    if fields.get("tools"):
        chat["tools"] = [{"type": "function", "function": {"name": tool.get("name")}} for tool in fields["tools"]]
    return chat | {"messages": messages, "max_tokens": limit}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_body("content must be a string or a list of blocks", "messages")
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            texts.append(_text(block.get("content") or ""))
        elif kind in ("text", "thinking"):
            texts.append(str(block.get(kind, "")))
        elif kind == "tool_use":
            texts.append(json.dumps(block.get("input")))
        else:
            raise bad_body(f"content blocks of type {kind} cannot be read: this model reads text only", "messages")
    return "".join(texts)


def _stopped(reason: str, stop: str | int | None) -> tuple[str | None, str | None]:
    if reason == "length":
        return "max_tokens", None
    if reason != "stop":
        return None, None
    return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)


def _refused(error: ApiError) -> web.Response:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return web.json_response(body, status=error.status)


def _event(kind: str, body: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body}, separators=(',', ':'))}\n\n".encode()
