"""OpenAI's Responses over the same answers. Stored, and found again, only with VLLM_ENABLE_RESPONSES_API_STORE=1."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from prfaas.worker.errors import ApiError, bad_body, bad_request, internal_error
from prfaas.worker.fields import parse_object
from prfaas.worker.openai import chat_request
from prfaas.worker.routes.bodies import answer_headers, read_body
from prfaas.worker.serving import Run, Serving

MAX_STORED = 1_000
_ECHOED: dict[str, Any] = {
    # what a response repeats of its request, and what it says where the request did not
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_options": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

Conversation = tuple[Mapping[str, Any], ...]


class Responses:
    """The Responses routes."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._stored: OrderedDict[str, tuple[dict[str, Any], Conversation]] = OrderedDict()

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        raw = await read_body(http)
        serving = self._serving
        try:
            fields = parse_object(raw)
            chat = as_chat(fields, self._before(fields.get("previous_response_id")))
            asked = chat_request(chat, serving.limits())
        except ApiError:
            serving.refused(raw)
            raise
        response_id = str(asked.request_id or f"resp_{uuid.uuid4().hex}")
        run = await serving.begin(http, asked, response_id, indexed=False)
        asked = run.asked  # without its prompt
        del raw
        try:
            shown = self._shown(fields, run, response_id)
            if asked.stream:
                return await self._stream(http, run, shown, chat["messages"], stored=fields.get("store", True))
            (outcome,) = await serving.outcomes(run)
            body = self._finished(shown, run, outcome.text, outcome.finish_reason, f"msg_{uuid.uuid4().hex}")
            self._keep(body, chat["messages"], outcome.text, stored=fields.get("store", True))
            return web.json_response(body)
        finally:
            serving.end(run)

    async def retrieve(self, http: web.Request) -> web.Response:
        """GET /v1/responses/{response_id}."""
        return web.json_response(self._find(http.match_info["response_id"])[0])

    async def cancel(self, http: web.Request) -> web.Response:
        """POST /v1/responses/{response_id}/cancel: none runs in the background here."""
        self._find(http.match_info["response_id"])
        raise ApiError(400, "invalid_request_error", "Cannot cancel a synchronous response.", "response_id")

    def _find(self, response_id: str) -> tuple[dict[str, Any], Conversation]:
        found = self._stored.get(response_id)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, "invalid_request_error", message, "response_id")
        return found

    def _before(self, previous: object) -> Conversation | None:
        return None if previous is None else self._find(str(previous))[1]

    def _keep(self, body: dict[str, Any], messages: Sequence[Mapping[str, Any]], text: str, *, stored: bool) -> None:
        if not (self._serving.config.front.store_responses and stored):
            return
        said = {"role": "assistant", "content": text}
        self._stored[body["id"]] = (body, (*messages, said))
        while len(self._stored) > MAX_STORED:
            self._stored.popitem(last=False)

    def _shown(self, fields: Mapping[str, Any], run: Run, response_id: str) -> dict[str, Any]:
        given = {name: fields.get(name) if fields.get(name) is not None else unset for name, unset in _ECHOED.items()}
        asked = run.asked
        room = self._serving.config.max_model_len - asked.prompt_tokens[0]
        return {
            "id": response_id,
            "created_at": run.head.created,
            "incomplete_details": None,
            "model": run.head.model,
            "object": "response",
            "output": [],
            "max_output_tokens": room if asked.max_tokens is None else asked.max_tokens,
            "status": "in_progress",
            "usage": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        } | given

    def _finished(self, shown: dict[str, Any], run: Run, text: str, reason: str, item: str) -> dict[str, Any]:
        counted = self._serving.usage(run, details=False)
        # Details are there without the flag; turns are counted only where tools run, so their lists are empty.
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": self._serving.cached_tokens(run),
                "cache_write_tokens": self._serving.created_cache_tokens(run),
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": counted["total_tokens"],
        }
        ended = {"stop": "completed", "abort": "cancelled"}.get(reason, "incomplete")
        return shown | {
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": [_message(item, text, "completed")],
            "status": ended,
            "usage": usage,
            "kv_transfer_params": run.generations[0].kv_params,
        }

    async def _stream(
        self,
        http: web.Request,
        run: Run,
        shown: dict[str, Any],
        messages: Sequence[Mapping[str, Any]],
        *,
        stored: bool,
    ) -> web.StreamResponse:
        headers = answer_headers(http, self._serving.config.request_id_headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"} | headers)
        await response.prepare(http)
        number = 0
        async for body in self._events(run, shown):
            await response.write(_event(body | {"sequence_number": number}))
            number += 1
            if body["type"] in ("response.completed", "response.incomplete"):
                text = body["response"]["output"][0]["content"][0]["text"]
                self._keep(body["response"], messages, text, stored=stored)
        await response.write_eof()
        return response

    async def _events(self, run: Run, shown: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        generation, item = run.generations[0], f"msg_{uuid.uuid4().hex}"
        place = {"output_index": 0, "content_index": 0, "item_id": item}
        yield {"type": "response.created", "response": shown}
        yield {"type": "response.in_progress", "response": shown}
        reason: str | None = None
        texts: list[str] = []
        begun = False
        while reason is None:
            fresh, reason = await generation.next()
            if reason == "error":
                yield internal_error().body() | {"type": "error"}
                return
            if not begun:
                begun = True
                added = _message(item, None, "in_progress")
                yield {"type": "response.output_item.added", "output_index": 0, "item": added}
                yield {"type": "response.content_part.added", **place, "part": _part("")}
            if text := "".join(fresh):
                texts.append(text)
                yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
        whole = "".join(texts)
        yield {"type": "response.output_text.done", **place, "text": whole, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": _part(whole)}
        done = _message(item, whole, "completed")
        yield {"type": "response.output_item.done", "output_index": 0, "item": done}
        body = self._finished(shown, run, whole, reason, item)
        kind = "response.incomplete" if body["status"] == "incomplete" else "response.completed"
        yield {"type": kind, "response": body}


def as_chat(fields: Mapping[str, Any], before: Conversation | None) -> dict[str, Any]:
    """The chat request that a Responses request is; `before`: the conversation it goes on with."""
    if fields.get("background"):
        raise bad_request("background responses are not supported by this worker", "background")
    given = fields.get("input")
    messages: list[dict[str, Any]] = [dict(each) for each in before or ()]
    if fields.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(fields["instructions"])})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and all(isinstance(item, dict) for item in given):
        messages += [{"role": item.get("role", "user"), "content": _text(item.get("content"))} for item in given]
    else:
        raise bad_body("input must be a string or a list of items", "input")
    same = ("model", "stream", "temperature", "top_p", "kv_transfer_params", "cache_salt", "request_id", "priority")
    chat = {name: fields[name] for name in same if fields.get(name) is not None}
    if fields.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    return chat | {"messages": messages}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise bad_body("the content of an input item must be text: this model reads text only", "input")
    return "".join(part["text"] for part in parts)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": item, "type": "message", "role": "assistant", "content": content, "status": status}


def _event(body: Mapping[str, Any]) -> bytes:
    return f"event: {body['type']}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
