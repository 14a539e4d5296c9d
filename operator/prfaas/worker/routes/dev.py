"""The routes of VLLM_SERVER_DEV_MODE=1: sleep and pause, caches, weights, what the server is. None has an API key.

Weights are labels here: an update changes what `/weight_info` says, and nothing in the answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform

from aiohttp import web

from prfaas.worker.config import VLLM_VERSION
from prfaas.worker.errors import ApiError, bad_body
from prfaas.worker.routes.bodies import flag_query, read_any, whole_query
from prfaas.worker.serving import Serving

MODES = ("abort", "wait", "keep")


class Dev:
    """Routes for development."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._asleep = 0
        """0: awake; 1 or 2: the level of sleep."""
        self._tags_left: set[str] = set()
        self._weights = "default"
        self._transfer = False

    async def sleep(self, http: web.Request) -> web.Response:
        """POST /sleep?level=1&mode=abort."""
        level, mode = whole_query(http, "level", 1, 0, 2), _mode(http)
        with self._serving.engine.metrics.operation("sleep", "sleep"):
            await self._pause(mode)
        self._asleep, self._tags_left = level, {"weights", "kv_cache"} if level else set()
        self._serving.engine.reset_prefix_cache()
        self._tell()
        return web.json_response({"status": "sleeping", "level": level})

    async def release_kv(self, _: web.Request) -> web.Response:
        """POST /release_kv_cache_memory."""
        with self._serving.engine.metrics.operation("sleep", "release_kv_cache_memory"):
            await self._pause("abort")
        self._asleep, self._tags_left = 1, {"kv_cache"}
        self._serving.engine.reset_prefix_cache()
        self._tell()
        return web.json_response({"status": "kv_cache_released"})

    async def wake(self, http: web.Request) -> web.Response:
        """POST /wake_up?tags=weights&tags=kv_cache: awake once every tag is."""
        tags = http.query.getall("tags", [])
        with self._serving.engine.metrics.operation("sleep", "wake"):
            self._tags_left -= set(tags) if tags else set(self._tags_left)
            if not self._tags_left:
                self._asleep = 0
                self._resume()
        self._tell()
        status = "sleeping" if self._tags_left else "awake"
        return web.json_response({"status": status, "tags": tags or None})

    async def sleeping(self, _: web.Request) -> web.Response:
        """GET /is_sleeping."""
        return web.json_response({"is_sleeping": self._asleep > 0})

    async def pause(self, http: web.Request) -> web.Response:
        """POST /pause?mode=abort|wait|keep: with `keep`, what comes waits; otherwise it is refused with 503."""
        mode = _mode(http)
        await self._pause(mode)
        if mode != "keep" and flag_query_default(http, "clear_cache", True):
            self._serving.engine.reset_prefix_cache()
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        """POST /resume."""
        self._resume()
        return web.json_response({"status": "resumed"})

    async def paused(self, _: web.Request) -> web.Response:
        """GET /is_paused."""
        serving = self._serving
        return web.json_response({"is_paused": serving.paused or serving.held is not None})

    async def abort(self, http: web.Request) -> web.Response:
        """POST /abort_requests: the ids that are named, or all."""
        try:
            fields = json.loads(await read_any(http) or b"")
        except ValueError as error:
            raise ApiError(400, "Bad Request", "Invalid JSON format") from error
        if not isinstance(fields, dict):
            raise ApiError(400, "Bad Request", "Request body must be a JSON object")
        ids = fields.get("request_ids")
        ended = self._serving.abort([str(each) for each in ids] if ids else None)
        return web.json_response({"status": "aborted", "aborted": len(ids) if ids else ended})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """POST /reset_prefix_cache: false while requests hold blocks."""
        done = self._serving.engine.reset_prefix_cache(reset_running=flag_query(http, "reset_running_requests"))
        return web.json_response({"success": done})

    async def nothing(self, _: web.Request) -> web.Response:
        """Caches that a model of text does not have; 200 without a body."""
        return web.Response()

    async def server_info(self, http: web.Request) -> web.Response:
        """GET /server_info?config_format=text|json."""
        form = http.query.get("config_format", "text")
        if form not in ("text", "json"):
            raise bad_body(f"query.config_format: Input should be 'text' or 'json', got {form}", "config_format")
        config = self._serving.config
        shown = {
            "model": config.model,
            "max_model_len": config.max_model_len,
            "block_size": config.block_size,
            "dtype": config.dtype,
            "cache_dtype": config.kv_cache_dtype,
            "tensor_parallel_size": config.tensor_parallel_size,
            "kv_transfer": None if config.kv_transfer is None else dataclasses.asdict(config.kv_transfer),
        }
        return web.json_response(
            {
                "vllm_config": json.loads(json.dumps(shown, default=str)) if form == "json" else str(shown),
                "vllm_env": {k: v for k, v in os.environ.items() if k.startswith("VLLM_") and k != "VLLM_API_KEY"},
                "system_env": {"vllm_version": VLLM_VERSION, "python_version": platform.python_version()},
            }
        )

    async def collective_rpc(self, http: web.Request) -> web.Response:
        """POST /collective_rpc: there are no worker processes that could answer."""
        try:
            fields = json.loads(await read_any(http) or b"")
        except ValueError as error:
            raise ApiError(400, "Bad Request", f"JSON decode error: {error}") from error
        if not isinstance(fields, dict) or not fields.get("method"):
            raise ApiError(400, "Bad Request", "Missing 'method' in request body")
        return web.json_response({"results": [None] * self._serving.config.tensor_parallel_size})

    async def init_transfer(self, _: web.Request) -> web.Response:
        """POST /init_weight_transfer_engine."""
        with self._serving.engine.metrics.operation("weights", "init"):
            self._transfer = True
        return web.json_response({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, _: web.Request) -> web.Response:
        """POST /shutdown_weight_transfer_engine."""
        self._transfer = False
        return web.json_response({"message": "Weight transfer engine shut down"})

    async def update_weights(self, http: web.Request) -> web.Response:
        """The steps of an update: each needs the transfer to be initialized."""
        if not self._transfer:
            raise ApiError(500, "InternalServerError", "Weight transfer engine is not initialized.")
        step = http.path.rsplit("/", 1)[-1].replace("_", " ")
        with self._serving.engine.metrics.operation("weights", step.split(" ", 1)[0]):
            pass
        return web.json_response({"message": f"{step}: done"})

    async def update_version(self, http: web.Request) -> web.Response:
        """POST /update_weight_version."""
        try:
            version = json.loads(await read_any(http))["weight_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise bad_body("weight_version: Field required", "weight_version") from error
        self._weights = str(version)
        return web.json_response({"success": True, "weight_version": self._weights})

    async def weight_info(self, _: web.Request) -> web.Response:
        """GET /weight_info."""
        return web.json_response({"weight_version": self._weights})

    async def weight_checker(self, _: web.Request) -> web.Response:
        """POST /weight_checker: weights that do not exist are always right."""
        return web.json_response({"success": True, "message": "", "checksums": {}})

    async def world_size(self, http: web.Request) -> web.Response:
        """GET /get_world_size."""
        return web.json_response({"world_size": self._serving.config.tensor_parallel_size})

    async def _pause(self, mode: str) -> None:
        serving = self._serving
        if mode == "keep":
            serving.held = serving.held or asyncio.Event()
            return
        serving.paused = True
        if mode == "abort":
            serving.abort()
        elif mode == "wait":
            await serving.idle.wait()

    def _resume(self) -> None:
        serving = self._serving
        serving.paused = False
        if serving.held is not None:
            serving.held.set()
            serving.held = None

    def _tell(self) -> None:
        self._serving.engine.metrics.set_sleeping(self._asleep if self._tags_left else 0)


def _mode(http: web.Request) -> str:
    mode = http.query.get("mode", "abort")
    if mode not in MODES:
        raise bad_body(f"query.mode: Input should be 'abort', 'wait' or 'keep', got {mode}", "mode")
    return mode


def flag_query_default(http: web.Request, name: str, default: bool) -> bool:
    """A switch in the query string that may be on unless it says no."""
    return flag_query(http, name) if name in http.query else default
