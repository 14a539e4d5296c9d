"""The picker's own server: probes, metrics, and the policy.

`/v1/policy` needs a bearer token of audience `prfaas-router`, reviewed by the API server, of a user on the list of
writers: any pod may get itself a token of that audience, so a valid token alone says nothing about who may route.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError

from prfaas.api import router_pod
from prfaas.api.policy import RoutingPolicy
from prfaas.router.answers import error_body
from prfaas.router.ledger import Ledger
from prfaas.router.metrics import Metrics
from prfaas.router.policies import Offer, PolicyStore

MAX_POLICY_BYTES = 256 * 1024
log = logging.getLogger(__name__)

ReviewToken = Callable[[str], Awaitable[str | None]]
"""Bearer token -> user name, None if it is not valid for our audience. Raises ReviewFailedError."""


class ReviewFailedError(Exception):
    """The API server could not be asked."""


@dataclass
class Admin:
    """Handlers of the admin port."""

    policies: PolicyStore
    metrics: Metrics
    ledger: Ledger
    synced: Callable[[], bool]
    review: ReviewToken
    writers: frozenset[str]
    envoy_socket: Path
    stopping: bool = False
    """Set on SIGTERM: not ready any more."""

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_POLICY_BYTES, middlewares=[_json_errors])
        app.router.add_get(router_pod.LIVE_PATH, self._live)
        app.router.add_get(router_pod.READY_PATH, self._ready)
        app.router.add_get(router_pod.METRICS_PATH, self._metrics)
        app.router.add_get(router_pod.POLICY_PATH, self._get_policy)
        app.router.add_put(router_pod.POLICY_PATH, self._put_policy)
        return app

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, _: web.Request) -> web.Response:
        uptime = await _envoy_uptime(self.envoy_socket)
        if uptime is not None:
            # Envoy counts whole seconds of the wall clock: this is at most 2 s before its start, and never after it.
            self.ledger.forget_before(self.ledger.now() - uptime - 1)
        state = {
            "synced": self.synced(),
            "policy": self.policies.current is not None,
            "envoy": uptime is not None,
            "serving": not self.stopping,
        }
        return web.json_response(state, status=200 if all(state.values()) else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _get_policy(self, request: web.Request) -> web.Response:
        await self._authorize(request)
        if self.policies.current is None:
            return _error(404, "No policy is in force yet.")
        return web.json_response(_in_force(self.policies.current))

    async def _put_policy(self, request: web.Request) -> web.Response:
        await self._authorize(request)
        try:
            text = await request.json()
        except ValueError as error:
            self.metrics.policies.labels("put", "Invalid").inc()
            return _error(400, f"The policy is not JSON: {error}")
        try:
            policy = RoutingPolicy.model_validate(text)
        except ValidationError as error:
            self.metrics.policies.labels("put", "Invalid").inc()
            return _error(422, _explain(error))
        offer = self.policies.offer(policy)
        self.metrics.policies.labels("put", offer.value).inc()
        if offer is Offer.STALE:
            current = self.policies.current
            force = json.dumps(_in_force(current)) if current else "none"
            return _error(409, f"The policy is older than the one in force, or of another PDCluster. In force: {force}")
        return web.json_response(_in_force(policy))

    async def _authorize(self, request: web.Request) -> None:
        """Raises the HTTP error for whoever may not."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _refuse(web.HTTPUnauthorized, "A bearer token is needed.")
        try:
            user = await self.review(token.strip())
        except ReviewFailedError as error:
            log.warning("token review failed: %s", error)
            raise _refuse(web.HTTPServiceUnavailable, "The token cannot be reviewed now. Try again.") from error
        if user is None:
            raise _refuse(web.HTTPUnauthorized, "The token is not valid for this audience.")
        if user not in self.writers:
            raise _refuse(web.HTTPForbidden, f"{user} may not use the routing policy.")


def _in_force(policy: RoutingPolicy) -> dict[str, object]:
    return {
        "pdClusterUID": policy.pd_cluster_uid,
        "epoch": policy.epoch,
        "version": policy.version,
        "hash": policy.hash,
    }


def _explain(error: ValidationError) -> str:
    """Each problem with its field path; the input is not repeated."""
    problems = (f"{'.'.join(map(str, item['loc'])) or 'policy'}: {item['msg']}" for item in error.errors())
    return "; ".join(problems)


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=error_body(status, message), content_type="application/json")


def _refuse(kind: type[web.HTTPError], message: str) -> web.HTTPError:
    status = kind.status_code
    return kind(text=error_body(status, message).decode(), content_type="application/json")


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """aiohttp's own errors (404, 405, 413) in our form too."""
    try:
        return await handler(request)
    except web.HTTPError as error:
        if error.content_type == "application/json":
            raise
        return _error(error.status, error.reason)


async def _envoy_uptime(admin_socket: Path) -> int | None:
    """Whole seconds since Envoy started; None unless it serves (its listeners are up, it has its endpoint list)."""
    timeout = aiohttp.ClientTimeout(total=1)
    connector = aiohttp.UnixConnector(path=str(admin_socket))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get("http://envoy/server_info") as response,
        ):
            info = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    return int(info["uptime_current_epoch"].removesuffix("s")) if info.get("state") == "LIVE" else None
