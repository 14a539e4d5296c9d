"""What probes, routers and people ask a server about itself: health, load, version, models, metrics, documentation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from prometheus_client import exposition

from prfaas.worker.config import VLLM_VERSION
from prfaas.worker.errors import ApiError
from prfaas.worker.fields import parse_object
from prfaas.worker.routes.bodies import read_any, read_body
from prfaas.worker.routes.table import Route
from prfaas.worker.serving import Serving

_PAGE = """<!DOCTYPE html><html><head><title>FastAPI - Swagger UI</title></head>
<body><p>The routes of this server are in <a href="{root}/openapi.json">openapi.json</a>.</p></body></html>"""


class Server:
    """Routes about the server."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._config, self._engine = serving, serving.config, serving.engine
        self._created = int(time.time())
        self._profiling = False
        self.listed: Sequence[Route] = ()
        """The routes that exist, for the documentation."""

    async def health(self, _: web.Request) -> web.Response:
        """GET /health, GET and POST /ping: 503 only where the engine is dead."""
        return web.Response(status=503 if self._engine.dead.is_set() else 200)

    async def version(self, _: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": VLLM_VERSION})

    async def load(self, _: web.Request) -> web.Response:
        """GET /load: requests under way, counted only with --enable-server-load-tracking."""
        return web.json_response({"server_load": self._serving.load if self._config.load_tracking else 0})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """GET /kv_event_sources."""
        events = self._engine.events
        return web.json_response(events.sources() if events is not None else {})

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics."""
        body = exposition.generate_latest(self._engine.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE_LATEST})

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models: the served names, then the LoRA adapters."""
        models = [self._model(name, self._config.model, None) for name in self._config.names]
        models += [self._model(lora.name, lora.path, self._config.names[0]) for lora in self._serving.adapters]
        return web.json_response({"object": "list", "data": models})

    def _model(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": None if parent else self._config.max_model_len,
            "permission": [],
        }

    async def load_adapter(self, http: web.Request) -> web.Response:
        """POST /v1/load_lora_adapter."""
        fields = parse_object(await read_body(http))
        name, path = fields.get("lora_name"), fields.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise ApiError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if self._serving.adapters.get(name) is not None and not fields.get("load_inplace"):
            raise ApiError(
                400,
                "InvalidUserInput",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            )
        self._serving.adapters.load(name, path)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.", content_type="text/plain")

    async def unload_adapter(self, http: web.Request) -> web.Response:
        """POST /v1/unload_lora_adapter."""
        fields = parse_object(await read_body(http))
        name = fields.get("lora_name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        if not self._serving.adapters.unload(name):
            raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.", content_type="text/plain")

    async def start_profile(self, _: web.Request) -> web.Response:
        """POST /start_profile: once."""
        if self._profiling:
            raise ApiError(409, "Conflict", "The profiler is already active.")
        self._profiling = True
        return web.Response()

    async def stop_profile(self, _: web.Request) -> web.Response:
        """POST /stop_profile."""
        self._profiling = False
        return web.Response()

    async def fault_status(self, _: web.Request) -> web.Response:
        """GET /fault_tolerance/status."""
        state = "unhealthy" if self._engine.dead.is_set() else "healthy"
        return web.json_response({"engines": [{"engine_index": 0, "status": state}]})

    async def fault_apply(self, http: web.Request) -> web.Response:
        """POST /fault_tolerance/apply: taken, and reported on by the status."""
        fields = parse_object(await read_body(http))
        instruction = fields.get("instruction")
        if not instruction:
            raise ApiError(400, "Bad Request", "'instruction' is required.")
        if instruction != "retry":
            raise ApiError(400, "Bad Request", f"Invalid instruction: '{instruction}'.")
        message = "Request accepted; poll /fault_tolerance/status for updates."
        return web.json_response({"message": message, "request_id": f"{id(fields):x}"}, status=202)

    async def scaling(self, _: web.Request) -> web.Response:
        """POST /is_scaling_elastic_ep."""
        scaling = self._serving.scaling
        return web.json_response(
            {
                "is_scaling_elastic_ep": scaling,
                "phase": "committing" if scaling else "idle",
                "epoch": None,
                "error": None,
                "requested_data_parallel_size": None,
            }
        )

    async def scale(self, http: web.Request) -> web.Response:
        """POST /scale_elastic_ep: takes as long as a start; until then everything but health is refused."""
        fields = parse_object(await read_any(http))
        size = fields.get("new_data_parallel_size")
        if size is None:
            raise ApiError(400, "Bad Request", "new_data_parallel_size is required")
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise ApiError(400, "Bad Request", "new_data_parallel_size must be a positive integer")
        if not self._config.front.elastic:
            raise ApiError(400, "Bad Request", "Elastic EP is not enabled: start with --enable-elastic-ep.")
        self._serving.scaling = True
        try:
            clock = self._engine.clock
            seconds = self._config.profile.startup_seconds / self._config.time_scale
            await clock.wait(asyncio.Event(), clock.now() + seconds)
        finally:
            self._serving.scaling = False
        return web.json_response({"message": f"Scaled to {size} data parallel engines"})

    async def docs(self, _: web.Request) -> web.Response:
        """GET /docs and /redoc."""
        return web.Response(text=_PAGE.format(root=self._config.front.root_path), content_type="text/html")

    async def openapi(self, _: web.Request) -> web.Response:
        """GET /openapi.json: the paths, without their schemas."""
        paths: dict[str, Any] = {}
        for route in self.listed:
            paths.setdefault(route.path, {})[route.method.lower()] = {"responses": {"200": {"description": "OK"}}}
        info = {"title": "vLLM API", "version": VLLM_VERSION}
        return web.json_response({"openapi": "3.1.0", "info": info, "paths": paths})

    async def unsupported(self, http: web.Request) -> web.Response:
        """Endpoints that vLLM refuses where the model was not made for them."""
        raise ApiError(501, "NotImplementedError", f"The model does not support {http.path}")
