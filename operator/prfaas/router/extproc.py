"""Envoy's external processing protocol: turns its messages into calls of the picker, and the answers back.

The stream is closed right after the last answer. Left open it would live as long as the client's answer does, and the
death of this process would cut every running stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.type.v3 import http_status_pb2
from google.protobuf.duration_pb2 import Duration

from prfaas.router.answers import Forward, Reply
from prfaas.router.picker import Picker, Request

DESTINATION = "x-gateway-destination-endpoint"
DECISION = "x-prfaas-decision"
STREAM = "x-prfaas-stream"
"""Envoy's own id of the request, the same in all attempts."""
ATTEMPT = "x-envoy-attempt-count"


class ExternalProcessor:
    """Servicer of envoy.service.ext_proc.v3.ExternalProcessor."""

    def __init__(self, picker: Picker, leg_seconds: float) -> None:
        """`leg_seconds` bounds everything that the picker does for one request: two prefill legs at most."""
        self._picker = picker
        self._extended = ext_proc.ProcessingResponse(override_message_timeout=Duration(seconds=int(leg_seconds)))

    async def Process(self, _: object, context: Any) -> None:  # noqa: N802 (the protocol's name)
        """One request. Cancelled when the client or Envoy leaves, and with it the prefill leg."""
        message = await context.read()
        if not isinstance(message, ext_proc.ProcessingRequest) or not message.HasField("request_headers"):
            return
        request, method = _request(message.request_headers.headers)
        if method == "GET":
            answer = self._picker.health(request) if request.path == "/health" else self._picker.plain(request)
            await context.write(_response(answer, in_headers=True))
            return
        raw = b""
        if not message.request_headers.end_of_stream:
            await context.write(_CONTINUE)
            message = await context.read()
            if not isinstance(message, ext_proc.ProcessingRequest):
                return
            raw = message.request_body.body
        # Before anything that takes time: Envoy takes a picker that is silent for too long for hung.
        await context.write(self._extended)
        answer = await self._picker.complete(request, raw)
        await context.write(_response(answer, in_headers=message.HasField("request_headers")))


_CONTINUE = ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())


def _request(headers: Any) -> tuple[Request, str]:
    """The request and its method, from Envoy's header map."""
    read = {header.key: _value(header) for header in headers.headers}
    attempt = read.get(ATTEMPT, "1")
    stream = read.get(STREAM) or read.get("x-request-id", "")
    path = read.get(":path", "").partition("?")[0]
    return Request(stream, int(attempt) if attempt.isdecimal() else 1, path, read), read.get(":method", "")


def _value(header: Any) -> str:
    return header.raw_value.decode("utf-8", "surrogateescape") if header.raw_value else str(header.value)


def _response(answer: Forward | Reply, *, in_headers: bool) -> Any:
    if isinstance(answer, Reply):
        return _immediate(answer)
    headers = {DESTINATION: answer.destination, DECISION: answer.decision}
    common = ext_proc.CommonResponse()
    if answer.body is not None:
        headers["content-length"] = str(len(answer.body))
        common.body_mutation.body = answer.body
    common.header_mutation.CopyFrom(_headers(headers))
    if in_headers:
        return ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=common))
    return ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse(response=common))


def _immediate(reply: Reply) -> Any:
    headers = {"content-type": reply.content_type, DECISION: f"refused; reason={reply.reason}", **dict(reply.headers)}
    return ext_proc.ProcessingResponse(
        immediate_response=ext_proc.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=reply.status),
            headers=_headers(headers),
            body=reply.body,
            # Envoy leaves the body of answers with this prefix alone (local_reply_config in the bootstrap).
            details=f"prfaas_{reply.reason}",
        )
    )


def _headers(headers: Mapping[str, str]) -> Any:
    overwrite = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return ext_proc.HeaderMutation(
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=key, raw_value=value.encode("utf-8", "surrogateescape")),
                append_action=overwrite,
            )
            for key, value in headers.items()
        ]
    )
