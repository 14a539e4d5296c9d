"""How vLLM reads one value of a flag: numbers with suffixes, optional values, JSON, objects with checked fields.

The messages are argparse's own wherever vLLM leaves them to argparse, which names a converter in them; so these
functions have the names of vLLM's converters.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Optional

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

Convert = Callable[[str], Any]

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_readable_int(text: str) -> int:
    """A whole number: `8192`, `8k` (8000), `1.5k` (1500), `8K` (8192; no decimals)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise argparse.ArgumentTypeError(
            f"Decimals are not allowed with binary suffixes like {suffix}; {number}{suffix.lower()} would be decimal."
        )
    return int(number) * _BINARY[suffix]


def human_readable_int_or_auto(text: str) -> int:
    """As `human_readable_int`; -1 for `auto`."""
    return -1 if text.strip().lower() == "auto" else human_readable_int(text)


def json_value(text: str) -> Any:
    """Any JSON; the error names the value as vLLM does."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to JSON: {error}") from error


def loads(text: str) -> Any:
    """JSON where vLLM leaves the message to argparse."""
    return json.loads(text)


def dict_or_text(text: str) -> Any:
    """JSON if it looks like an object, else the text."""
    return json_value(text) if re.fullmatch(r"(?s)\s*{.*}\s*", text) else text


def comma_separated(text: str) -> list[int | str]:
    """Device ids: numbers, or UUIDs."""
    return [int(part) if part.isdecimal() else part for part in (part.strip() for part in text.split(","))]


def optional(convert: Convert) -> Convert:
    """Empty and `None` mean no value; a failed conversion names the value and the type."""

    def read(text: str) -> Any:
        if text in ("", "None"):
            return None
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {convert}.") from error

    return read


def expand_numbers(text: str) -> str:
    """JSON in which bare numbers may have suffixes: `{"cpu_bytes_to_use": 80m}`."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(
            r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda match: str(human_readable_int(match.group())), parts[index]
        )
    return "".join(parts)


class Objects:
    """Readers for the flags that take an object: its fields are checked as vLLM's classes check them."""

    def __init__(self, classes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        self._classes = classes

    def reader(self, name: str) -> Convert:
        """Reads the JSON of one class; the value is the object of the fields that were given."""

        def read(text: str) -> Any:
            expanded = expand_numbers(text)
            try:
                value = self._adapter(name).validate_json(expanded)
            except ValidationError as error:
                raise argparse.ArgumentTypeError(repr(error)) from error
            given = json.loads(expanded)
            return {key: _plain(getattr(value, key)) for key in given} if isinstance(given, dict) else given

        return read

    @functools.cache  # noqa: B019 - there is one of these in a process
    def _adapter(self, name: str) -> TypeAdapter[Any]:
        return TypeAdapter(self._class(name))

    def _class(self, name: str) -> type:
        fields = [
            (field, self._type(description), dataclasses.field(default=description.get("default")))
            for field, description in self._classes[name].items()
        ]
        plain = dataclasses.make_dataclass(name, fields, namespace={"__post_init__": _AFTER.get(name, _nothing)})
        return checked(plain, config=ConfigDict(extra="forbid"))

    def _type(self, field: Mapping[str, Any]) -> Any:
        found = self._bare_type(field)
        if bounds := field.get("constraints"):
            limits: dict[str, Any] = {key: float(value) for key, value in bounds.items()}
            found = Annotated[found, Field(**limits)]
        return Optional[found] if field.get("optional") else found  # noqa: UP045 - `found` is a value

    def _bare_type(self, field: Mapping[str, Any]) -> Any:
        kind, annotation = field["kind"], field["annotation"]
        if kind == "config_object":
            nested = field.get("config_class", "")
            if nested in self._classes:
                return self._class(nested)
            return Any if annotation.startswith("SkipValidation") else dict[str, Any] | str
        if kind == "list":
            return _list(field)
        if "choices" in field and "| str" not in annotation:
            return Literal[tuple(field["choices"])]
        if "enum_members" in field:
            return Annotated[str | int, AfterValidator(_member(tuple(field["enum_members"])))]
        return _SIMPLE.get(kind, dict[str, Any])


def _list(field: Mapping[str, Any]) -> Any:
    inner = re.search(r"list\[(int|str|float)\]", field["annotation"])
    if "choices" in field:
        return types.GenericAlias(list, (Literal[tuple(field["choices"])],))
    return types.GenericAlias(list, (_SIMPLE[inner.group(1)],)) if inner else list[Any]


def _member(members: tuple[str, ...]) -> Callable[[Any], Any]:
    """An enum by its name in any case, or by a number where vLLM's enum has numbers."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value.upper() not in (*members, "AUTO"):
            raise ValueError(f"Unknown value: '{value}'. Valid options are: {', '.join(members)}")
        if isinstance(value, int) and not 0 <= value < len(members):
            raise ValueError(f"Unknown value: {value}. Valid options are: {', '.join(members)}")
        return value

    return check


_SIMPLE: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool}


def _nothing(_: Any) -> None:
    return None


def _kv_transfer(config: Any) -> None:
    if config.kv_connector is not None and config.kv_role is None:
        raise ValueError(
            "Please specify kv_role when kv_connector is set, supported roles are kv_producer, kv_both, kv_consumer"
        )


def _ec_transfer(config: Any) -> None:
    if config.ec_connector is not None and config.ec_role is None:
        raise ValueError(
            "Please specify ec_role when ec_connector is set, supported roles are ec_producer, ec_both, ec_consumer"
        )


def _profiler(config: Any) -> None:
    for kind, prefixes in (("torch", ("torch_profiler_dir", "capture_torch")), ("proton", ("proton_",))):
        for field in dataclasses.fields(config):
            name, value = field.name, getattr(config, field.name)
            if config.profiler != kind and name.startswith(prefixes) and value and value != field.default:
                raise ValueError(f"{name} is only applicable when profiler is set to '{kind}'")
    if config.profiler == "proton" and not config.proton_profiler_dir:
        raise ValueError("proton_profiler_dir must be set when profiler is 'proton'")


_AFTER: dict[str, Callable[[Any], None]] = {
    "KVTransferConfig": _kv_transfer,
    "ECTransferConfig": _ec_transfer,
    "ProfilerConfig": _profiler,
}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: given for key, given in dataclasses.asdict(value).items() if given is not None}
    return value
