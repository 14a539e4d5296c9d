"""vLLM's HTTP server, as far as a client, a router or a probe sees it. A thin layer over the engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import exposition

from prfaas.worker.config import VLLM_VERSION
from prfaas.worker.engine import AdmissionError, Engine
from prfaas.worker.generation import Ask, Generation, internal_id
from prfaas.worker.openai import (
    DONE,
    ApiError,
    Chunks,
    Completion,
    bad_body,
    bad_request,
    error_event,
    internal_error,
    parse_completion,
    parse_object,
    usage,
    whole_answer,
)
from prfaas.worker.oracle import BYTES_PER_TOKEN, Sampling, chat_prompt

MAX_BODY_BYTES = 64 * 1024 * 1024
"""vLLM has no limit; a prompt of ten times the longest context fits."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The routes of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._config = engine, engine.config
        self._created = int(time.time())
        self._load = 0

    def application(self) -> web.Application:
        """The aiohttp application with every route."""
        app = web.Application(middlewares=[self._middleware])
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_post("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/load", self._server_load)
        app.router.add_get("/kv_event_sources", self._kv_event_sources)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        keys = self._config.api_keys
        if keys and request.path.startswith("/v1"):
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or key not in keys:
                return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            response = await handler(request)
        except ApiError as error:
            response = web.json_response(error.body(), status=error.status)
        except web.HTTPNotFound:
            response = web.json_response({"detail": "Not Found"}, status=404)
        except web.HTTPMethodNotAllowed as error:
            allow = {"Allow": error.headers["Allow"]}
            response = web.json_response({"detail": "Method Not Allowed"}, status=405, headers=allow)
        if self._config.request_id_headers and not response.prepared:
            response.headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.dead.is_set() else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VLLM_VERSION})

    async def _server_load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": self._load if self._config.load_tracking else 0})

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _metrics(self, _: web.Request) -> web.Response:
        body = exposition.generate_latest(self._engine.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE_LATEST})

    async def _models(self, _: web.Request) -> web.Response:
        models: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": self._config.model,
                "parent": None,
                "max_model_len": self._config.max_model_len,
                "permission": [],
            }
            for name in self._config.names
        ]
        return web.json_response({"object": "list", "data": models})

    async def _tokenize(self, request: web.Request) -> web.Response:
        fields = parse_object(await read_body(request))
        try:
            text = chat_prompt(fields["messages"]) if "messages" in fields else fields["prompt"]
            raw = text.encode()
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise bad_request(f"prompt or messages must be given as text: {error}") from error
        tokens = [int.from_bytes(raw[i : i + BYTES_PER_TOKEN], "big") for i in range(0, len(raw), BYTES_PER_TOKEN)]
        return web.json_response(
            {"count": len(tokens), "max_model_len": self._config.max_model_len, "tokens": tokens, "token_strs": None}
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _complete(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        asked, generation, answer_id = self._begin(http, await read_body(http), chat)
        created = int(time.time())
        self._load += 1
        try:
            if asked.stream:
                return await self._stream(http, asked, generation, Chunks(asked, answer_id, created))
            return await self._whole(asked, generation, answer_id, created)
        finally:
            # Cancelled by a client that left: nothing of the request may stay.
            self._engine.abort(generation)
            self._load -= 1

    def _begin(self, http: web.Request, raw: bytes, chat: bool) -> tuple[Completion, Generation, str]:
        """Check and submit. The prompt is not kept: a queue of long requests must not fill the memory."""
        try:
            asked = parse_completion(raw, chat=chat, names=self._config.names, max_model_len=self._config.max_model_len)
        except ApiError:
            self._release(raw)
            raise
        base = http.headers.get("X-Request-Id") or asked.request_id or uuid.uuid4().hex
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{base}"
        ask = Ask(
            request_id=internal_id(answer_id if chat else f"{answer_id}-0"),
            prompt=asked.prompt,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens,
            sampling=Sampling(stop=asked.stop),
            kv_params=asked.kv_params,
        )
        try:
            generation = self._engine.submit(ask)
        except AdmissionError as error:
            self._engine.release_refused(asked.kv_params)
            raise ApiError(503, "Service Unavailable", str(error)) from error
        return asked.without_prompt(), generation, answer_id

    def _release(self, raw: bytes) -> None:
        try:
            params = parse_object(raw).get("kv_transfer_params")
        except ApiError:
            return
        if isinstance(params, dict):
            self._engine.release_refused(params)

    async def _whole(
        self, asked: Completion, generation: Generation, answer_id: str, created: int
    ) -> web.StreamResponse:
        texts: list[str] = []
        reason: str | None = None
        while reason is None:
            fresh, reason = await generation.next()
            texts.extend(fresh)
        if reason == "error":
            raise internal_error()
        counted = self._usage(asked, generation)
        body = whole_answer(asked, answer_id, created, "".join(texts), reason, counted, generation.kv_params)
        return web.json_response(body)

    async def _stream(
        self, http: web.Request, asked: Completion, generation: Generation, chunks: Chunks
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if self._config.request_id_headers:
            response.headers["X-Request-Id"] = http.headers.get("X-Request-Id") or uuid.uuid4().hex
        await response.prepare(http)
        continuous = asked.continuous_usage or self._config.force_include_usage
        reason: str | None = None
        role_due = asked.chat
        while reason is None:
            fresh, reason = await generation.next()
            if reason == "error":
                await response.write(error_event(internal_error()))
                break
            events = [chunks.role()] if role_due else []
            role_due = False
            counted = self._usage(asked, generation) if continuous else None
            text = "".join(fresh)
            if reason is None:
                events.append(chunks.token(text, counted))
            else:
                events.append(chunks.last(text, reason, generation.kv_params, counted))
                if asked.include_usage or self._config.force_include_usage:
                    events.append(chunks.usage(self._usage(asked, generation)))
                events.append(DONE)
            await response.write(b"".join(events))
        if reason == "error":
            await response.write(DONE)
        await response.write_eof()
        return response

    def _usage(self, asked: Completion, generation: Generation) -> dict[str, Any]:
        cached: int | None = None
        if self._config.prompt_tokens_details:
            cached = generation.remote.cached_tokens if generation.remote is not None else 0
        return usage(asked.prompt_tokens, generation.sequence.generated, cached)


async def read_body(request: web.Request) -> bytes:
    """The JSON body, not cached in the request; ApiError for another content type or a body beyond all reason."""
    if request.content_type != "application/json":
        raise bad_body("Unsupported Media Type: Only 'application/json' is allowed")
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, "Request Entity Too Large", f"the body is above {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
