"""What the picker can answer: pass the request on, or answer the client itself.

An answer of ours has the form of OpenAI's and vLLM's errors: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

_TYPES: Final = {
    400: "BadRequestError",
    404: "NotFoundError",
    502: "BadGatewayError",
    503: "Service Unavailable",
    504: "GatewayTimeoutError",
}


@dataclass(frozen=True)
class Forward:
    """Envoy sends the request to a decode instance."""

    destination: str
    """`host:port`, one of the watched endpoints."""
    decision: str
    """Value of `x-prfaas-decision`."""
    body: bytes | None = None
    """The new body; None leaves the client's as it is."""


@dataclass(frozen=True)
class Reply:
    """Envoy sends this to the client; no decode instance sees the request."""

    status: int
    body: bytes
    reason: str
    """Short word for `x-prfaas-decision` and metrics."""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = field(default=())


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON body of an error."""
    kind = _TYPES.get(status, "RouterError")
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}}).encode()


def error(status: int, reason: str, message: str, param: str | None = None) -> Reply:
    """An error of ours. 503 says when to come back."""
    headers = (("retry-after", "1"),) if status == 503 else ()
    return Reply(status, error_body(status, message, param), reason, headers=headers)
