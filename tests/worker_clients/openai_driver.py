"""Runs in the OpenAI client's own environment: makes the calls that arrive as JSON lines, and tells what came of each.

A call is `{"call": "chat.completions.create", "arguments": {...}}`: a path of attributes on the client. What comes back
has `value` (one object), or `values` (what a stream gave), or both `values` and `raised`: class names of the exception,
most special first, with what it knows. Objects that the client builds from an answer are checked against its models,
which it does not do by itself; what does not fit is in `invalid`. `key`, where given, is another API key.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from typing import Any

import openai


def plain(value: Any) -> Any:
    """A client's object as JSON, with its class."""
    if hasattr(value, "has_next_page"):
        return {"class": type(value).__name__, "data": [checked(item) for item in value.data]}
    if isinstance(value, openai.BaseModel):
        return {"class": type(value).__name__, **value.model_dump(mode="json", warnings=False)}
    return value


def checked(value: Any) -> Any:
    """The same, of an object that the client built from an answer."""
    shown = plain(value)
    # The client uses one class for completions and their chunks, whose finish_reason is null until the last.
    if isinstance(value, openai.BaseModel) and not hasattr(value, "has_next_page"):
        unfinished = type(value).__name__ == "Completion" and value.choices[0].finish_reason is None
        try:
            if not unfinished:
                type(value).model_validate(value.to_dict())
        except ValueError as error:
            shown["invalid"] = str(error)
    return shown


def told(error: openai.OpenAIError) -> dict[str, Any]:
    """What a program can learn from an exception."""
    known = {name: getattr(error, name, None) for name in ("status_code", "type", "code", "param", "body", "message")}
    return {"raised": [kind.__name__ for kind in type(error).__mro__], **known}


def make(client: openai.OpenAI, call: dict[str, Any]) -> dict[str, Any]:
    """One call."""
    if "key" in call:
        client = client.with_options(api_key=call["key"])
    values: list[Any] = []
    try:
        result = reduce(getattr, call["call"].split("."), client)(**call["arguments"])
        if hasattr(result, "__enter__") and not isinstance(
            result, openai.Stream
        ):  # `.stream(...)`: the accumulating kind
            with result as stream:
                values.extend(plain(event) for event in stream)
                final = getattr(stream, "get_final_completion", None) or stream.get_final_response
                return {"values": values, "value": plain(final())}
        if isinstance(result, openai.Stream):
            values.extend(checked(event) for event in result)
            return {"values": values}
        return {"value": checked(result)}
    except openai.OpenAIError as error:
        return {"values": values, **told(error)}


def main() -> None:
    """Answer until the input ends."""
    client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0, timeout=30)
    for line in sys.stdin:
        print(json.dumps(make(client, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
