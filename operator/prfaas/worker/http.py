"""vLLM's HTTP server, as far as a client, a router or a probe sees it: routes, keys, errors, headers. Thin.

Which routes there are is in `routes/table.py`; what they do in the other modules of `routes`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from prfaas.worker.engine import Engine
from prfaas.worker.errors import ApiError, disabled
from prfaas.worker.routes.bodies import answer_headers
from prfaas.worker.routes.completions import Completions
from prfaas.worker.routes.dev import Dev
from prfaas.worker.routes.messages import Messages
from prfaas.worker.routes.responses import Responses
from prfaas.worker.routes.server import Server
from prfaas.worker.routes.table import routes
from prfaas.worker.routes.tokens import Tokens
from prfaas.worker.serving import Serving

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What `--api-key` guards; everything else is open, `/invocations` too."""


class Api:
    """The server of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._config, self._front = engine, engine.config, engine.config.front
        self.serving = Serving(engine)
        self._server = Server(self.serving)

    def application(self) -> web.Application:
        """The aiohttp application with every route that these settings have."""
        app = web.Application(middlewares=[self._middleware])
        handlers = self.handlers()
        existing = [route for route in routes() if route.exists(self._front)]
        self._server.listed = existing
        for root in {"", self._front.root_path}:
            for route in existing:
                refused = route.scale_out and not self._front.scale_out
                handler = _disabled if refused else handlers.get(route.key, self._server.unsupported)
                app.router.add_route(route.method, root + route.path, handler)
            app.router.add_get(f"{root}/metrics/", self._server.metrics, allow_head=False)
        return app

    def handlers(self) -> dict[str, Handler]:
        """What answers a route; a route that exists and is not here is refused as not supported by the model."""
        server, dev = self._server, Dev(self.serving)
        completions, tokens = Completions(self.serving), Tokens(self.serving)
        messages, responses = Messages(self.serving), Responses(self.serving)
        abort = dev.abort if self._front.dev_mode else tokens.abort
        return {
            "GET /health": server.health,
            "GET /ping": server.health,
            "POST /ping": server.health,
            "POST /invocations": completions.invocations,
            "GET /load": server.load,
            "GET /version": server.version,
            "GET /kv_event_sources": server.kv_event_sources,
            "GET /metrics": server.metrics,
            "POST /tokenize": tokens.tokenize,
            "POST /detokenize": tokens.detokenize,
            "GET /tokenizer_info": tokens.tokenizer_info,
            "GET /v1/models": server.models,
            "POST /v1/load_lora_adapter": server.load_adapter,
            "POST /v1/unload_lora_adapter": server.unload_adapter,
            "POST /start_profile": server.start_profile,
            "POST /stop_profile": server.stop_profile,
            "POST /reset_prefix_cache": dev.reset_prefix_cache,
            "POST /reset_mm_cache": dev.nothing,
            "POST /reset_encoder_cache": dev.nothing,
            "POST /collective_rpc": dev.collective_rpc,
            "GET /server_info": dev.server_info,
            "POST /sleep": dev.sleep,
            "POST /release_kv_cache_memory": dev.release_kv,
            "POST /wake_up": dev.wake,
            "GET /is_sleeping": dev.sleeping,
            "POST /pause": dev.pause,
            "POST /resume": dev.resume,
            "POST /abort_requests": abort,
            "GET /is_paused": dev.paused,
            "POST /init_weight_transfer_engine": dev.init_transfer,
            "POST /shutdown_weight_transfer_engine": dev.shutdown_transfer,
            "POST /start_weight_update": dev.update_weights,
            "POST /start_draft_weight_update": dev.update_weights,
            "POST /update_weights": dev.update_weights,
            "POST /finish_weight_update": dev.update_weights,
            "POST /update_weight_version": dev.update_version,
            "GET /weight_info": dev.weight_info,
            "POST /weight_checker": dev.weight_checker,
            "GET /get_world_size": dev.world_size,
            "POST /v1/chat/completions": completions.chat,
            "POST /v1/chat/completions/batch": completions.batch,
            "POST /v1/completions": completions.completions,
            "POST /v1/responses": responses.create,
            "GET /v1/responses/{response_id}": responses.retrieve,
            "POST /v1/responses/{response_id}/cancel": responses.cancel,
            "POST /v1/messages": messages.create,
            "POST /v1/messages/count_tokens": messages.count,
            "POST /scale_elastic_ep": server.scale,
            "POST /is_scaling_elastic_ep": server.scaling,
            "POST /v1/chat/completions/render": tokens.render_chat,
            "POST /v1/messages/render": tokens.render_messages,
            "POST /v1/completions/render": tokens.render_completion,
            "POST /v1/responses/render": tokens.render_responses,
            "POST /v1/chat/completions/derender": tokens.derender_chat,
            "POST /v1/completions/derender": tokens.derender_completion,
            "POST /inference/v1/generate": tokens.generate,
            "POST /inference/v1/abort_requests": tokens.abort,
            "POST /fault_tolerance/apply": server.fault_apply,
            "GET /fault_tolerance/status": server.fault_status,
            "GET /docs": server.docs,
            "GET /redoc": server.docs,
            "GET /openapi.json": server.openapi,
        }

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.perf_counter()
        refused = self._scaling(request) or self._preflight(request) or self._unauthorized(request)
        response = await self._handled(request, handler) if refused is None else refused
        if not response.prepared:
            response.headers.update(answer_headers(request, self._config.request_id_headers))
            self._allow_origin(request, response)
        self._count(request, response, time.perf_counter() - began)
        return response

    async def _handled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.body(), status=error.status)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)
        except web.HTTPMethodNotAllowed as error:
            allow = {"Allow": error.headers["Allow"]}
            return web.json_response({"detail": "Method Not Allowed"}, status=405, headers=allow)

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        keys = self._config.api_keys
        path = request.path.removeprefix(self._front.root_path)
        if not keys or request.method == "OPTIONS" or not path.startswith(GUARDED):
            return None
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key in keys:
            return None
        return web.json_response({"error": "Unauthorized"}, status=401)

    def _scaling(self, request: web.Request) -> web.Response | None:
        if not self.serving.scaling or request.path in ("/health", "/is_scaling_elastic_ep"):
            return None
        return web.json_response({"error": "The model is currently scaling. Please try again later."}, status=503)

    def _preflight(self, request: web.Request) -> web.Response | None:
        """A browser asks whether it may: `--allowed-origins`."""
        wants = "Access-Control-Request-Method" in request.headers
        if not self._front.origins or request.method != "OPTIONS" or not wants:
            return None
        if not self._allowed(request):
            return web.Response(status=400, text="Disallowed CORS origin")
        headers = request.headers.get("Access-Control-Request-Headers", "*")
        methods = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
        return web.Response(
            text="OK", headers={"Access-Control-Allow-Methods": methods, "Access-Control-Allow-Headers": headers}
        )

    def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._allowed(request):
            everyone = "*" in self._front.origins and not self._front.allow_credentials
            response.headers["Access-Control-Allow-Origin"] = "*" if everyone else request.headers["Origin"]
            if self._front.allow_credentials:
                response.headers["Access-Control-Allow-Credentials"] = "true"

    def _allowed(self, request: web.Request) -> bool:
        origin, origins = request.headers.get("Origin"), self._front.origins
        return origin is not None and (origin in origins or "*" in origins)

    def _count(self, request: web.Request, response: web.StreamResponse, seconds: float) -> None:
        resource = request.match_info.route.resource
        sizes = [int(message.headers.get("Content-Length", 0)) for message in (request, response)]
        handler = "none" if resource is None else resource.canonical
        self._engine.metrics.http(handler, request.method, response.status, sizes[0], sizes[1], seconds)


async def _disabled(_: web.Request) -> web.Response:
    raise disabled()
