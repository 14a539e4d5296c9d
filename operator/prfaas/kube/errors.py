"""The one error boundary: whatever goes wrong between us and an API server is a KubeError of a known class.

A caller decides by class (`except NotFound`), shows people `message` (the server's own words, without the request that
caused it, so that it may go into a condition), and logs `str(error)` (which names the request).
"""

# Classes are named after what happened, in the server's own words, hence without a suffix.
# ruff: noqa: N818

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """A request failed. `code` is the HTTP status, 0 where there was none; `reason` is the server's, CamelCase."""

    def __init__(
        self, message: str, *, code: int = 0, reason: str = "", request: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason or type(self).__name__
        self.request = request
        self.retry_after = retry_after
        """Seconds the server asked to wait before the next try, if it did."""

    def __str__(self) -> str:
        where = f"{self.request}: " if self.request else ""
        return f"{where}{self.reason}: {self.message}"


class NotFound(KubeError):
    """The object, or the whole kind, is not there."""


class Conflict(KubeError):
    """Somebody else changed the object, or owns the field: read again and decide again."""


class AlreadyExists(Conflict):
    """An object of that name is there already."""


class NameTaken(KubeError):
    """An object that is not ours has the name that one of ours needs."""


class Gone(KubeError):
    """The resourceVersion or the list's continue token is too old: list again."""


class Invalid(KubeError):
    """The server refuses the object; `message` is its explanation. Sending it again is pointless."""


class Unauthorized(KubeError):
    """The credentials are not accepted (any more)."""


class Forbidden(KubeError):
    """The credentials are good but may not do this."""


class NamespaceTerminating(Forbidden):
    """Nothing new can be created here, since the namespace is being deleted."""


class TooManyRequests(KubeError):
    """The server sheds load; wait `retry_after` seconds at least."""


class Unreachable(KubeError):
    """No usable answer: refused, reset or silent, name not resolved, certificate not trusted, or HTTP 5xx."""


class BadCredentials(KubeError):
    """A kubeconfig cannot be used: unparsable, incomplete, or holding something that we refuse to follow."""


_BY_CODE: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


def error_from_status(status: Mapping[str, Any], *, request: str = "", retry_after: float | None = None) -> KubeError:
    """The error that a `Status` object describes (an answer's body, or the object of a watch's ERROR event)."""
    code = int(status.get("code") or 0)
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or reason or f"HTTP {code}")
    details = status.get("details")
    details = details if isinstance(details, dict) else {}
    if retry_after is None and details.get("retryAfterSeconds"):
        retry_after = float(details["retryAfterSeconds"])
    causes = details.get("causes") or []
    kind: type[KubeError]
    if reason == "Expired":
        kind = Gone
    elif any(cause.get("field") == "metadata.uid" for cause in causes):
        kind = Conflict  # the uid was our precondition, and a namesake has taken the object's place
    elif reason == "AlreadyExists":
        kind = AlreadyExists
    elif any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        kind = NamespaceTerminating
    elif message.startswith("failed to create typed patch object"):
        kind = Invalid  # what server-side apply says, with code 500, about a field of the wrong type
    elif code >= 500:
        kind = Unreachable
    else:
        kind = _BY_CODE.get(code, KubeError)
    return kind(message, code=code, reason=reason, request=request, retry_after=retry_after)


def error_from_response(
    code: int, headers: Mapping[str, str], body: bytes, *, request: str = "", max_message: int = 1000
) -> KubeError:
    """The error of an HTTP answer that is not 2xx. A body that is no Status (a proxy's page) is quoted, cut short."""
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    if not isinstance(status, dict) or status.get("kind") != "Status":
        status = {"message": body.decode(errors="replace").strip()[:200] or f"HTTP {code}"}
    status = {**status, "code": code, "message": str(status.get("message", ""))[:max_message]}
    try:
        retry_after = max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):  # absent, or the date form, which API servers do not use
        retry_after = None
    return error_from_status(status, request=request, retry_after=retry_after)
