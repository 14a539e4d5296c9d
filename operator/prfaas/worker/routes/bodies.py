"""Bodies in, headers out: what every route does."""

from __future__ import annotations

import uuid

from aiohttp import web

from prfaas.worker.errors import ApiError, bad_body

MAX_BODY_BYTES = 64 * 1024 * 1024
"""vLLM has no limit; a prompt of ten times the longest context fits."""


async def read_body(request: web.Request) -> bytes:
    """The JSON body, not cached in the request; ApiError for another content type or a body beyond all reason."""
    if request.content_type != "application/json":
        raise bad_body("Unsupported Media Type: Only 'application/json' is allowed")
    return await read_any(request)


async def read_any(request: web.Request) -> bytes:
    """The body, whatever it says it is."""
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, "Request Entity Too Large", f"the body is above {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def answer_headers(request: web.Request, wanted: bool) -> dict[str, str]:
    """`--enable-request-id-headers`: the request's own header comes back, not the answer's id."""
    return {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex} if wanted else {}


def whole_query(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """A number in the query string."""
    text = request.query.get(name, str(default))
    if not text.lstrip("-").isdecimal() or not least <= int(text) <= most:
        raise bad_body(f"query.{name}: Input should be a number from {least} to {most}, got {text}", name)
    return int(text)


def flag_query(request: web.Request, name: str) -> bool:
    """A switch in the query string."""
    return request.query.get(name, "false").lower() in ("1", "true", "yes", "on", "t", "y")
