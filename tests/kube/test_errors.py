"""Answers of an API server, and the class that each becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NamespaceTerminating,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    error_from_response,
    error_from_status,
)


def status(code: int, reason: str = "", message: str = "said", **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (status(400, "BadRequest"), Invalid),
        (status(401, "Unauthorized"), Unauthorized),
        (status(403, "Forbidden"), Forbidden),
        (status(403, "Forbidden", causes=[{"reason": "NamespaceTerminating"}]), NamespaceTerminating),
        (status(404, "NotFound"), NotFound),
        (status(409, "Conflict"), Conflict),
        (status(409, "AlreadyExists"), AlreadyExists),
        (status(410, "Expired"), Gone),
        (status(410, "Gone"), Gone),
        (status(422, "Invalid", causes=[{"field": "spec.replicas"}]), Invalid),
        (status(422, "Invalid", causes=[{"field": "metadata.uid"}]), Conflict),
        (status(429, "TooManyRequests"), TooManyRequests),
        (status(500, "InternalError"), Unreachable),
        (status(500, "", "failed to create typed patch object (a/b; v1): expected string"), Invalid),
        (status(504, "Timeout"), Unreachable),
        (status(418, "Teapot"), KubeError),
    ],
)
def test_classes(body: dict[str, Any], kind: type[KubeError]) -> None:
    for error in (error_from_status(body), error_from_response(body["code"], {}, json.dumps(body).encode())):
        assert type(error) is kind
        assert error.message == body["message"]
        assert error.code == body["code"]


def test_retry_after_comes_from_the_header_or_else_the_body() -> None:
    body = json.dumps(status(429, retryAfterSeconds=3)).encode()
    assert error_from_response(429, {"Retry-After": "7"}, body).retry_after == 7
    assert error_from_response(429, {}, body).retry_after == 3
    assert error_from_response(429, {"Retry-After": "Mon, 30 Nov 2026 00:00:00 GMT"}, b"").retry_after is None


def test_an_answer_that_is_no_status_is_quoted_and_cut() -> None:
    error = error_from_response(502, {}, b"<html>" + b"x" * 5000)
    assert type(error) is Unreachable
    assert error.message.startswith("<html>")
    assert len(error.message) == 200
    assert error_from_response(503, {}, b"").message == "HTTP 503"


def test_the_message_is_free_of_the_request_and_the_text_has_it() -> None:
    error = error_from_response(404, {}, json.dumps(status(404, "NotFound")).encode(), request="GET /x")
    assert error.message == "said"
    assert str(error) == "GET /x: NotFound: said"
