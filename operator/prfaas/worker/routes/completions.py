"""Completions and chat, streamed or not; several conversations at once; `/invocations`, which takes either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiohttp import web

from prfaas.worker.errors import ApiError, bad_body, bad_request
from prfaas.worker.fields import parse_object
from prfaas.worker.openai import Asked, chat_request, completion_request
from prfaas.worker.routes.bodies import answer_headers, read_body
from prfaas.worker.serving import Run, Serving, answer_base


class Completions:
    """The routes that answer text."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._answer(http, await read_body(http), chat=False)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._answer(http, await read_body(http), chat=True)

    async def batch(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions/batch: a list of conversations, one choice for each."""
        fields = parse_object(await read_body(http))
        conversations = fields.get("messages")
        if not isinstance(conversations, list) or not all(isinstance(each, list) for each in conversations):
            raise bad_body("messages must be a list of conversations", "messages")
        if fields.get("n", 1) not in (None, 1):
            raise bad_request("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n")
        limits = self._serving.limits()
        single = [chat_request(fields | {"messages": each, "stream": False}, limits) for each in conversations]
        if not single:
            raise bad_body("messages must be a list of conversations", "messages")
        asked = replace(
            single[0],
            prompts=tuple(each.prompts[0] for each in single),
            prompt_tokens=tuple(each.prompt_tokens[0] for each in single),
        )
        run = await self._begin(http, asked, "chatcmpl")
        del fields, conversations, single, asked
        return await self._send(http, run)

    async def invocations(self, http: web.Request) -> web.StreamResponse:
        """POST /invocations: what is asked for shows in the body."""
        raw = await read_body(http)
        try:
            fields = parse_object(raw)
        except ApiError as error:
            raise ApiError(400, "Bad Request", error.message) from error
        if "messages" in fields:
            return await self._answer(http, raw, chat=True)
        if "prompt" in fields:
            return await self._answer(http, raw, chat=False)
        raise ApiError(415, "Unsupported Media Type", "Cannot find suitable handler for request.")

    async def _begin(self, http: web.Request, asked: Asked, prefix: str) -> Run:
        answer_id = f"{prefix}-{answer_base(http, asked.request_id)}"
        indexed = not asked.chat or len(asked.prompts) > 1
        return await self._serving.begin(http, asked, answer_id, indexed=indexed)

    async def _send(self, http: web.Request, run: Run) -> web.StreamResponse:
        """Answer. Whoever awaits this must have let go of the prompt: a batch of long ones would fill the memory."""
        serving = self._serving
        try:
            if run.asked.stream:
                return await serving.stream(http, run, answer_headers(http, serving.config.request_id_headers))
            body = await serving.whole(run)
            return web.json_response(body, headers=self._load_metrics(http))
        finally:
            # Cancelled by a client that left: nothing of the request may stay.
            serving.end(run)

    async def _answer(self, http: web.Request, raw: bytes, *, chat: bool) -> web.StreamResponse:
        limits = self._serving.limits()
        try:
            asked = (chat_request if chat else completion_request)(parse_object(raw), limits)
        except ApiError:
            self._serving.refused(raw)
            raise
        run = await self._begin(http, asked, "chatcmpl" if chat else "cmpl")
        del raw, asked
        return await self._send(http, run)

    def _load_metrics(self, http: web.Request) -> dict[str, str]:
        """ORCA: the load of this worker on the answer, for routers that ask for it."""
        form = http.headers.get("endpoint-load-metrics-format", "").upper()
        if form not in ("TEXT", "JSON"):
            return {}
        engine = self._serving.engine
        values: dict[str, Any] = {
            "kv_cache_usage_perc": engine.pool.used / engine.pool.total,
            "num_requests_waiting": float(engine.scheduler.waiting),
        }
        if form == "JSON":
            named = ", ".join(f'"{name}": {value}' for name, value in values.items())
            return {"endpoint-load-metrics": f'JSON {{"named_metrics": {{{named}}}}}'}
        named = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
        return {"endpoint-load-metrics": f"TEXT {named}"}
