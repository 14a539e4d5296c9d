"""Error answers in vLLM's shapes. The types vary with the place that raises them, and routers read them."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error answer in vLLM's usual shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def body(self) -> dict[str, Any]:
        """The JSON body; in a stream, the object of an error event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A value is wrong."""
    return ApiError(400, "BadRequestError", message, param)


def bad_body(message: str, param: str | None = None) -> ApiError:
    """The body is not what the endpoint takes: vLLM's type has a space."""
    return ApiError(400, "Bad Request", message, param)


def no_such_model(name: str) -> ApiError:
    """Neither a served name nor a LoRA adapter."""
    return ApiError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")


def internal_error() -> ApiError:
    """The engine failed the request, such as by a KV transfer that did not come, or is dead."""
    return ApiError(500, "InternalServerError", "Internal server error")


def overloaded(message: str) -> ApiError:
    """A queue limit; there is no Retry-After."""
    return ApiError(503, "Service Unavailable", message)


def paused() -> ApiError:
    """The engine is paused or asleep."""
    return ApiError(503, "ServiceUnavailableError", "The engine is paused; the request was not accepted.")


def disabled() -> ApiError:
    """The scale-out routes without their flag: they exist, and refuse."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return ApiError(403, "PermissionDeniedError", message)
