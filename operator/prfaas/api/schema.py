"""pydantic's JSON schema -> the structural schema that a CRD may carry.

References are put in place, `null` goes (an absent member is how our API says "not set"), and what Kubernetes has no
word for goes too. A default stays: the API server writes it into stored objects, so it is frozen there. That of an
object is written out whole, for the server runs an object's rules on its default before it fills in members. The same
module checks that the result is structural and bounded, which the server's cost estimate for CEL needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_COPIED = (
    "type",
    "format",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
)
_DROPPED = frozenset({"$defs", "title", "default", "const", "required", "propertyNames", "description"})
_HANDLED = frozenset({"$ref", "anyOf", "properties", "items", "additionalProperties"})


class SchemaError(ValueError):
    """A model says something that a structural schema cannot say; the message has the path."""


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a model."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(raw, raw.get("$defs", {}), model.__name__, ())


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any], path: str, seen: tuple[str, ...]) -> Schema:
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        if name in seen:
            raise SchemaError(f"{path}: {name} contains itself")
        # What stands beside the reference (a field's own description) goes before what the model says of itself.
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _convert({**definitions[name], **beside}, definitions, path, (*seen, name))
    if "anyOf" in node:
        return _convert_union(node, definitions, path, seen)
    unknown = set(node) - set(_COPIED) - _DROPPED - _HANDLED
    if unknown:
        raise SchemaError(f"{path}: no structural form for {', '.join(sorted(unknown))}")

    schema: Schema = {}
    if "description" in node:
        schema["description"] = " ".join(node["description"].split())
    schema.update({key: node[key] for key in _COPIED if key in node})
    if "const" in node:
        schema["enum"] = [node["const"]]
    if schema.get("type") == "integer":
        schema["format"] = "int32" if schema.get("maximum", 2**63) < 2**31 else "int64"
    if "items" in node:
        schema["items"] = _convert(node["items"], definitions, f"{path}[]", seen)
        schema.setdefault("x-kubernetes-list-type", "atomic")
    if "properties" in node:
        schema["properties"] = {
            name: _convert(child, definitions, f"{path}.{name}", seen) for name, child in node["properties"].items()
        }
        if node.get("required"):
            schema["required"] = list(node["required"])
    elif isinstance(node.get("additionalProperties"), Mapping):
        schema["additionalProperties"] = _convert(node["additionalProperties"], definitions, f"{path}[*]", seen)
    _set_default(schema, node, path)
    return schema


def _convert_union(node: Mapping[str, Any], definitions: Mapping[str, Any], path: str, seen: tuple[str, ...]) -> Schema:
    beside = {key: value for key, value in node.items() if key != "anyOf"}
    members = [member for member in node["anyOf"] if member.get("type") != "null"]
    if len(members) == 1:
        return _convert({**members[0], **beside}, definitions, path, seen)
    by_type = {member.get("type"): member for member in members}
    if set(by_type) != {"integer", "string"}:
        raise SchemaError(f"{path}: a union may only be of one type and null, or of integer and string")
    text = _convert({**by_type["string"], **beside}, definitions, path, seen)
    del text["type"]
    bounds = {key: by_type["integer"][key] for key in ("minimum", "maximum") if key in by_type["integer"]}
    return {**text, **bounds, "anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}


def _set_default(schema: Schema, node: Mapping[str, Any], path: str) -> None:
    default = node.get("default")
    if default is None:
        return
    if "properties" in node:
        members = {name: child["default"] for name, child in schema["properties"].items() if "default" in child}
        if _significant(default) != _significant(members):
            raise SchemaError(f"{path}: the default of an object must be what the defaults of its members make")
        default = members
    if default not in ([], {}):
        schema["default"] = default


def _significant(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    pruned = {key: _significant(member) for key, member in value.items()}
    return {key: member for key, member in pruned.items() if member is not None and member not in ([], {})}


def without_defaults(schema: Schema) -> Schema:
    """The schema of a status: no defaults, and nothing required but in items of lists."""
    bare = {key: value for key, value in schema.items() if key not in ("default", "required")}
    if "properties" in bare:
        bare["properties"] = {name: without_defaults(child) for name, child in bare["properties"].items()}
    if "items" in bare:
        bare["items"] = {**schema["items"], "properties": _undefaulted(schema["items"].get("properties", {}))}
    return bare


def _undefaulted(properties: Mapping[str, Schema]) -> Schema:
    return {name: {key: value for key, value in each.items() if key != "default"} for name, each in properties.items()}


def leaves(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Every path of a schema that holds a value of its own; `[]` stands for an item, `[*]` for a map's value."""
    if schema.get("properties"):
        for name, child in schema["properties"].items():
            yield from leaves(child, (*path, name))
    elif "items" in schema:
        yield from leaves(schema["items"], (*path, "[]"))
    elif "additionalProperties" in schema:
        yield from leaves(schema["additionalProperties"], (*path, "[*]"))
    else:
        yield path, schema


def faults(schema: Schema, path: str = "") -> Iterator[str]:
    """What keeps a schema from being structural, described and bounded."""
    where = path or "."
    kind = schema.get("type")
    if kind is None and not schema.get("x-kubernetes-int-or-string"):
        yield f"{where}: no type"
    if "description" not in schema and not path.endswith("]") and path:
        yield f"{where}: no description"
    if kind == "integer" and not {"minimum", "maximum", "format"} <= set(schema):
        yield f"{where}: an integer needs minimum, maximum and format"
    if kind == "number":
        yield f"{where}: floating point numbers do not survive a round trip"
    if kind == "string" and not {"maxLength", "enum"} & set(schema):
        yield f"{where}: a string needs maxLength or enum"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{where}: a list needs maxItems"
        if schema["items"].get("type") == "object" and "x-kubernetes-list-type" not in schema:
            yield f"{where}: a list of objects needs its list type"
        yield from faults(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        if "properties" in schema:
            yield f"{where}: properties and additionalProperties exclude each other"
        if "maxProperties" not in schema:
            yield f"{where}: a map needs maxProperties"
        yield from faults(schema["additionalProperties"], f"{path}[*]")
    for name, child in schema.get("properties", {}).items():
        yield from faults(child, f"{path}.{name}")
