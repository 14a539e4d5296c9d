"""Every bound of every field, at its edge and one step beyond, before our models and before the API server.

Generated from the schema: a field added to a model is tested from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError

from e2e.apiserver import ApiServer
from prfaas.api.crd import object_schema
from prfaas.api.kinds import KINDS
from prfaas.api.schema import Schema
from tests.api.documents import EXAMPLES, REMOVE, collection, example


@dataclass(frozen=True)
class Beyond:
    """A value that one field may not have, and the API server's words about it."""

    kind: str
    path: str
    value: Any
    message: str

    def __str__(self) -> str:
        return f"{self.kind} {self.path}: {self.message}"


def beyond(kind: str, schema: Schema, path: str, value: Any) -> Iterator[Beyond]:
    """Everything that breaks one bound below a value of the full example."""
    for name in schema.get("required", []):
        yield Beyond(kind, f"{path}.{name}", REMOVE, "Required value")
    if "enum" in schema:
        yield Beyond(kind, path, "Other", 'Unsupported value: "Other"')
    elif schema.get("type") == "integer":
        yield Beyond(kind, path, schema["minimum"] - 1, f"should be greater than or equal to {schema['minimum']}")
        yield Beyond(kind, path, schema["maximum"] + 1, f"should be less than or equal to {schema['maximum']}")
    elif "minimum" in schema:
        yield Beyond(kind, path, -1, "should be greater than or equal to 0")
    elif schema.get("type") == "string":
        if schema.get("minLength") == 1:
            yield Beyond(kind, path, "", "should be at least 1 chars long")
        if "format" not in schema:
            text = "1" * (schema["maxLength"] + 1)
            yield Beyond(kind, path, text, f"may not be more than {schema['maxLength']} bytes")
    elif schema.get("type") == "array":
        many = [value[0]] * (schema["maxItems"] + 1)
        yield Beyond(kind, path, many, f"must have at most {schema['maxItems']} items")
    elif "maxProperties" in schema:
        many_keys = {f"k{number}": "1" for number in range(schema["maxProperties"] + 1)}
        yield Beyond(kind, path, many_keys, f"must have at most {schema['maxProperties']} items")
    for name, child in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            yield from beyond(kind, child, f"{path}.{name}", value[name])
    if "items" in schema and schema["items"].get("type") == "object":
        # The last item that has a member shows the member's bounds.
        for name, child in schema["items"]["properties"].items():
            for index, item in enumerate(value):
                if name in item:
                    yield from beyond(kind, child, f"{path}.{index}.{name}", item[name])
                    break


CASES = [
    case
    for kind, model in KINDS.items()
    for case in beyond(kind, object_schema(model)["properties"]["spec"], "spec", EXAMPLES[kind][0]["spec"])
]


def test_there_are_bounds_to_break() -> None:
    broken = {(case.kind, case.message.split()[0]) for case in CASES}

    assert {(kind, word) for kind in ("PDCluster", "PrfaaSCluster") for word in ("Required", "must", "may")} <= broken


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_hold_the_bound(case: Beyond) -> None:
    document = example(case.kind, {case.path: case.value, "metadata.namespace": "default"})

    with pytest.raises(ValidationError):
        KINDS[case.kind].model_validate(document)


@pytest.mark.apiserver
@pytest.mark.parametrize("case", CASES, ids=str)
def test_api_server_holds_the_bound(case: Beyond, apiserver: ApiServer) -> None:
    document = example(case.kind, {case.path: case.value})

    answer = apiserver.request("POST", collection(case.kind, "default"), document, query={"dryRun": "All"})

    assert answer.status == 422, answer.message
    assert case.message in answer.message
