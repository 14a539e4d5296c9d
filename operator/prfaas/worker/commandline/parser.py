"""The parser: argparse over the table, behind vLLM's rewriting, with the fake worker's own flags beside.

Built only when a worker is started: other commands do not pay for it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prfaas.worker.commandline import values
from prfaas.worker.commandline.rewrite import Warn, rewrite
from prfaas.worker.commandline.table import POSITIONAL, Flag, table

AddOwn = Callable[[argparse.ArgumentParser], None]


def parse(words: Sequence[str], prog: str, add_own: AddOwn, warn: Warn) -> argparse.Namespace:
    """The namespace of `vllm serve`'s flags and the worker's own.

    Ends with exit status 2 where argparse refuses, CommandLineError where vLLM ends with an exception.
    """
    parser = build(prog, add_own)
    known = frozenset(parser._option_string_actions)
    given = rewrite(words, known, lambda path: Path(path).read_text(encoding="utf-8"), warn)
    args = parser.parse_args(given)
    for flag in table().flags:
        if flag.more.get("deprecated") and getattr(args, flag.dest, flag.default) != flag.default:
            warn(f"argument '{flag.dest}' is deprecated")
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


@functools.cache
def build(prog: str, add_own: AddOwn) -> argparse.ArgumentParser:
    """The argparse parser alone."""
    parser = argparse.ArgumentParser(prog=prog, description="Serve a model, with the arguments of `vllm serve`.")
    add_own(parser)
    vllm = parser.add_argument_group("vLLM's")
    objects = values.Objects(table().classes)
    for flag in table().flags:
        if flag.name == POSITIONAL:
            parser.add_argument(POSITIONAL, nargs="?", metavar="MODEL", help="name or path of the model")
        else:
            vllm.add_argument(*flag.names, **_options(flag, objects))
    return parser


class _Switch(argparse.Action):
    """`--enable-x`, `--no-enable-x`, `--disable-x`."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, negatives: Sequence[str], **kwargs: Any) -> None:
        super().__init__([*option_strings, *negatives], dest, nargs=0, **kwargs)
        self._negatives = frozenset(negatives)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        given: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self._negatives)


class _Adapters(argparse.Action):
    """`--lora-modules name=path ...`, or JSON objects."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        given: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [self._read(parser, str(item)) for item in given or () if item not in (None, "")])

    def _read(self, parser: argparse.ArgumentParser, item: str) -> dict[str, Any]:
        if "=" in item and "," not in item:
            name, path = item.split("=", 1)
            return {"name": name, "path": path}
        try:
            adapter = json.loads(item)
        except ValueError:
            parser.error(f"Invalid JSON format for --lora-modules: {item}")
        if not isinstance(adapter, dict) or not {"name", "path"} <= adapter.keys() <= _ADAPTER_FIELDS:
            parser.error(f"Invalid fields for --lora-modules: {item} - takes name, path and base_model_name")
        return adapter


_ADAPTER_FIELDS = {"name", "path", "base_model_name"}


def _options(flag: Flag, objects: values.Objects) -> dict[str, Any]:
    more, options = flag.more, {"dest": flag.dest, "default": flag.default, "help": argparse.SUPPRESS}
    if more.get("absent"):
        options["default"] = argparse.SUPPRESS
    if flag.kind == "bool":
        if flag.negatives:
            return options | {"action": _Switch, "negatives": flag.negatives}
        return options | {"action": "store_true"}
    convert = _converter(flag, objects)
    if more.get("optional"):
        convert = values.optional(convert)
    choices = list(more["choices"]) + ([None] if more.get("optional") else []) if "choices" in more else None
    options |= {"type": convert, "choices": choices}
    if flag.name == "--lora-modules":
        options["action"] = _Adapters
    if more.get("append"):
        options["action"] = "append"
    return options | {key: more[key] for key in ("nargs", "const") if key in more}


def _converter(flag: Flag, objects: values.Objects) -> values.Convert:
    if flag.dest == "max_model_len":
        return values.human_readable_int_or_auto
    if flag.dest == "reasoning_parser":
        return lambda text: "" if text.lower() == "none" else text
    if flag.more.get("normalised"):
        return lambda text: text.lower().replace("-", "_")
    if flag.more.get("human_readable"):
        return values.human_readable_int
    if flag.kind == "config_object":
        return objects.reader(flag.more["config_class"])
    if flag.kind == "list":
        return int if flag.more.get("element") == "int" else str
    return _CONVERTERS.get(flag.kind, str)


_CONVERTERS: dict[str, values.Convert] = {
    "int": int,
    "float": float,
    "json_dict": values.json_value,
    "json_list": values.loads,
    "str_or_json_dict": values.dict_or_text,
    "comma_separated_list": values.comma_separated,
}


@functools.cache
def _printed(text: str) -> None:
    print(text, file=sys.stderr)


def warn_once(text: str) -> None:
    """A warning, once, on standard error."""
    _printed(f"WARNING {text}")
