"""The fields of a request's JSON: their types, what the server knows and allows, prompts as text or as ids. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.worker.errors import bad_body, bad_request, no_such_model
from prfaas.worker.frontend import FrontEnd
from prfaas.worker.oracle import from_token_ids


@dataclass(frozen=True)
class Limits:
    """What the server allows and knows."""

    names: tuple[str, ...]
    adapters: frozenset[str]
    max_model_len: int
    front: FrontEnd


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; ApiError otherwise."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad_body(f"JSON decode error: {error}") from error
    if not isinstance(fields, dict):
        raise bad_body("the body must be a JSON object")
    return fields


def check_model(fields: Mapping[str, Any], limits: Limits) -> str:
    """The name that is asked for, or the first one; an empty or absent name is accepted."""
    model = optional(fields, "model", str) or limits.names[0]
    if model in limits.names or model in limits.adapters:
        return str(model)
    if limits.front.any_model_name:
        return limits.names[0]
    raise no_such_model(model)


def text_or_ids(value: object, where: str) -> bytes:
    """A prompt: text, or token ids."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise bad_request("the prompt is not valid Unicode", where) from error
    if isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        try:
            return from_token_ids(value)
        except OverflowError as error:
            wrong = next(each for each in value if not 0 <= each < 2**32)
            if wrong < 0:
                raise bad_body(f"{where}: Input should be greater than or equal to 0", where) from error
            raise bad_request(f"Token id {wrong} is out of vocabulary", where) from error
    raise bad_body(f"{where} must be a string or a list of token ids", where)


def whole_numbers(fields: Mapping[str, Any], name: str) -> list[int]:
    """A list of numbers; empty where it is absent."""
    ids = fields.get(name) or []
    if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise bad_body(f"{name} must contain only integers", name)
    return ids


def whole(fields: Mapping[str, Any], name: str) -> int | None:
    """A number; None where it is absent or null."""
    value: int | None = optional(fields, name, int)
    return value


def optional(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """A value of that type; None where it is absent or null."""
    value = fields.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise bad_body(f"{name} must be {_KINDS[kind]}", name)
    return value


_KINDS: dict[type[Any], str] = {
    str: "a string",
    bool: "a boolean",
    dict: "an object",
    int: "a whole number",
    list: "a list",
}
