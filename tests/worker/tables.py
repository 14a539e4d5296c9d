"""What the worker's package keeps of the facts about vLLM: made from tests/data by `python -m tests.worker.tables`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.facts import facts
from tests.worker import metric_table

PACKAGE = Path(__file__).parents[2] / "operator" / "prfaas" / "worker"
FLAGS = PACKAGE / "commandline" / "flags.json"
ENVIRONMENT = PACKAGE / "commandline" / "environment.json"
ROUTES = PACKAGE / "routes" / "routes.json"

_FLAG_KEYS = (
    *("flags", "negative_flags", "inverse_flags", "dest", "kind", "default", "nargs", "const", "choices", "element"),
    *("optional", "human_readable", "constraints", "config_class", "deprecated", "normalised", "enum_members"),
)
_FIELD_KEYS = ("kind", "optional", "choices", "config_class", "enum_members", "constraints", "annotation")
_DEFAULTS = {"log_error_stack": False}
"""VLLM_SERVER_DEV_MODE, which is off by default."""
_KINDS = {
    "model_loader_extra_config": "str_or_json_dict",
    "default_chat_template_kwargs": "json_list",
    "reasoning_effort_map": "json_list",
}
"""Where the parser showed another way of reading than the facts say: any JSON, or text that may be JSON."""
_NOT_OPTIONAL = ("hf_token", "default_chat_template_kwargs", "reasoning_effort_map")
_CLOSED = ("--kv-cache-dtype",)
"""Flags whose known values are all there are: plugins add none."""
_ENUMS = ("--attention-backend", "--mm-encoder-attn-backend", "--mamba-backend")


def flags() -> dict[str, Any]:
    """The table of flags and that of the objects that some take."""
    table: list[dict[str, Any]] = []
    classes: dict[str, Any] = {}
    for flag in facts("cli_flags")["flags"]:
        entry = {key: flag[key] for key in _FLAG_KEYS if flag.get(key) not in (None, [], False)}
        entry["default"] = _DEFAULTS.get(flag["dest"], flag["default"])
        if isinstance(entry["default"], dict) and "object" in entry["default"]:
            entry["default"] = None
        entry["kind"] = _KINDS.get(flag["dest"], flag["kind"])
        if flag["dest"] == "mm_processor_device":
            entry["choices"] = ["auto", "cpu", "cuda"]
        if flag["dest"] in _NOT_OPTIONAL:
            entry.pop("optional")
        if flag.get("default_kind"):
            entry["absent"] = True
        if flag["flags"][0] in _CLOSED:
            entry["values"] = flag["known_values"]
        if flag.get("action") == "append":
            entry["append"] = True
        if flag["flags"][0] not in _ENUMS:
            entry.pop("enum_members", None)
        table.append(entry)
        if flag.get("fields") and flag["kind"] == "config_object":
            classes |= _classes(flag)
    return {"flags": table, "classes": classes}


def routes() -> list[dict[str, Any]]:
    """Method, path and condition of every route."""
    return [
        {"method": route["method"], "path": route["path"], "condition": route["condition"]}
        for route in facts("routes")["routes"]
    ]


def environment() -> list[str]:
    """Every VLLM_ name that vLLM reads."""
    env = facts("env")
    named = [entry["name"] for entry in (*env["operator"], *env["all_other_vllm_names"])]
    return sorted(name for name in named if name.startswith("VLLM_"))


def rendered(value: object) -> str:
    """A table as it is kept: one entry a line."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in value) + "\n]\n"
    assert isinstance(value, dict)
    flags_part = ",\n".join(f"  {json.dumps(entry)}" for entry in value["flags"])
    classes = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in value["classes"].items())
    return f'{{\n "flags": [\n{flags_part}\n ],\n "classes": {{\n{classes}\n }}\n}}\n'


def _classes(owner: dict[str, Any]) -> dict[str, Any]:
    """The class of a flag or a field, and those of its fields. A quantization may also be a name: left out."""
    if owner["config_class"].startswith("Quant") and "flags" not in owner:
        return {}
    found = {owner["config_class"]: {each["name"]: _field(each) for each in owner["fields"]}}
    for each in owner["fields"]:
        if each["kind"] == "config_object" and each.get("fields"):
            found |= _classes(each)
    return found


def _field(field: dict[str, Any]) -> dict[str, Any]:
    entry = {key: field[key] for key in _FIELD_KEYS if field.get(key) not in (None, [], False)}
    if isinstance(field["default"], str | int | float) and field["default"]:
        entry["default"] = field["default"]
    unset = field["default"] is None and field["kind"] == "bool"
    return entry | ({"optional": True} if unset else {})


if __name__ == "__main__":
    FLAGS.write_text(rendered(flags()))
    ENVIRONMENT.write_text(rendered(environment()))
    ROUTES.write_text(rendered(routes()))
    metric_table.PACKAGE.write_text(metric_table.text())
