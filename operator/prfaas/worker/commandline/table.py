"""The flags of `vllm serve`, as data. `flags.json` is made from tests/data by `python -m tests.worker.tables`."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POSITIONAL = "model_tag"


@dataclass(frozen=True)
class Flag:
    """One flag."""

    names: tuple[str, ...]
    negatives: tuple[str, ...]
    """`--no-x`, and `--disable-x` for `--enable-x`."""
    dest: str
    kind: str
    default: Any
    more: Mapping[str, Any]
    """What only some have: nargs, const, choices, values, element, constraints, config_class, ..."""

    @property
    def name(self) -> str:
        """Its first, long name."""
        return self.names[0]


@dataclass(frozen=True)
class Table:
    """All flags, and the fields of the objects that some of them take, by class."""

    flags: tuple[Flag, ...]
    classes: Mapping[str, Mapping[str, Mapping[str, Any]]]


@functools.cache
def table() -> Table:
    """Read once."""
    text = importlib.resources.files("prfaas.worker.commandline").joinpath("flags.json").read_text(encoding="utf-8")
    document = json.loads(text)
    return Table(tuple(_flag(entry) for entry in document["flags"]), document["classes"])


def _flag(entry: dict[str, Any]) -> Flag:
    names, negatives = tuple(entry.pop("flags")), entry.pop("negative_flags", [])
    return Flag(
        names=names,
        negatives=(*negatives, *entry.pop("inverse_flags", [])),
        dest=entry.pop("dest"),
        kind=entry.pop("kind"),
        default=entry.pop("default"),
        more=entry,
    )
