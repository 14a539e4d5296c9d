"""From pydantic to a structural schema: what is translated, and what is refused because a CRD cannot say it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from kubernetes.client import V1CustomResourceDefinition
from pydantic import Field, create_model

from prfaas.api.base import ApiModel
from prfaas.api.crd import definition, object_schema
from prfaas.api.kinds import KINDS
from prfaas.api.rules import Ruled, rule
from prfaas.api.schema import SchemaError, faults, structural


def member(annotation: Any, default: Any = ...) -> dict[str, Any]:
    """The schema of one member of a model."""
    model = create_model("Sample", __base__=ApiModel, member=(annotation, default))
    schema: dict[str, Any] = structural(model)["properties"]["member"]
    return schema


class Inner(ApiModel):
    """An inner thing."""

    size: Annotated[int, Field(ge=1, le=9)] = 3
    """Its size."""


class Needy(ApiModel):
    """Has a member without default."""

    size: Annotated[int, Field(ge=1, le=9)]


class Endless(ApiModel):
    """Contains itself."""

    inner: Endless | None = None


def test_an_absent_member_is_not_null() -> None:
    assert member(Annotated[str, Field(max_length=5)] | None, None) == {"type": "string", "maxLength": 5}


def test_integers_get_the_format_that_holds_their_bounds() -> None:
    assert member(Annotated[int, Field(ge=0, le=2**31 - 1)])["format"] == "int32"
    assert member(Annotated[int, Field(ge=0, le=2**31)])["format"] == "int64"


def test_one_value_is_an_enum() -> None:
    assert member(Literal["Only"]) == {"type": "string", "enum": ["Only"]}


def test_integer_or_string() -> None:
    assert member(int | Annotated[str, Field(max_length=5)]) == {
        "maxLength": 5,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
    }


def test_models_are_put_in_place_with_whole_defaults() -> None:
    assert member(Inner, Inner()) == {
        "description": "An inner thing.",
        "type": "object",
        "properties": {
            "size": {
                "description": "Its size.",
                "type": "integer",
                "format": "int32",
                "minimum": 1,
                "maximum": 9,
                "default": 3,
            }
        },
        "default": {"size": 3},
    }


def test_lists_of_plain_values_are_atomic() -> None:
    assert member(tuple[str, ...], ())["x-kubernetes-list-type"] == "atomic"


def test_rules_stand_at_the_level_of_their_model() -> None:
    @rule("self.low <= self.high", "low above high", holds=lambda pair: pair.low <= pair.high, field_path=".low")
    class Pair(Ruled):
        low: Annotated[int, Field(ge=0, le=9)]
        high: Annotated[int, Field(ge=0, le=9)]

    assert member(Pair)["x-kubernetes-validations"] == [
        {"rule": "self.low <= self.high", "message": "low above high", "fieldPath": ".low"}
    ]
    with pytest.raises(ValueError, match="low above high"):
        Pair(low=2, high=1)


def test_a_rule_without_its_python_side_is_refused() -> None:
    with pytest.raises(TypeError, match="a rule has a Python side exactly when"):
        rule("self.a == 1", "a is not 1")


@pytest.mark.parametrize(
    ("annotation", "default", "message"),
    [
        (int | bool, ..., "a union may only be"),
        (Annotated[int, Field(gt=0)], ..., "no structural form for exclusiveMinimum"),
        (tuple[int, str], ..., "no structural form for prefixItems"),
        (frozenset[str], ..., "no structural form for uniqueItems"),
        (Inner, Inner(size=4), "must be what the defaults of its members make"),
        (Endless, ..., "Endless contains itself"),
    ],
)
def test_what_a_crd_cannot_say_is_refused(annotation: Any, default: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        member(annotation, default)


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({}, ".a: no type"),
        ({"type": "string", "maxLength": 1}, ".a: no description"),
        ({"type": "string", "description": "d"}, ".a: a string needs maxLength or enum"),
        ({"type": "integer", "description": "d", "minimum": 0}, ".a: an integer needs minimum, maximum and format"),
        ({"type": "number", "description": "d"}, ".a: floating point numbers do not survive a round trip"),
        (
            {"type": "array", "description": "d", "items": {"type": "object"}, "x-kubernetes-list-type": "atomic"},
            ".a: a list needs maxItems",
        ),
        (
            {"type": "array", "description": "d", "items": {"type": "object"}, "maxItems": 1},
            ".a: a list of objects needs its list type",
        ),
        (
            {"type": "object", "description": "d", "additionalProperties": {"type": "boolean"}},
            ".a: a map needs maxProperties",
        ),
    ],
)
def test_faults_are_found(schema: dict[str, Any], fault: str) -> None:
    assert fault in list(faults({"type": "object", "properties": {"a": schema}}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_crd_is_one_to_kubernetes_own_client(kind: str) -> None:
    V1CustomResourceDefinition.model_validate(definition(KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_status_has_no_defaults_and_requires_nothing_at_its_top(kind: str) -> None:
    status = object_schema(KINDS[kind])["properties"]["status"]

    assert "required" not in status
    assert not list(defaults(status))


def defaults(schema: dict[str, Any]) -> list[Any]:
    """Every default below a schema."""
    children = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
    found = [schema["default"]] if "default" in schema else []
    return found + [each for child in children for each in defaults(child)]
