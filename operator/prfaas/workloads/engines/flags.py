"""What words on a command line mean to vLLM 0.33: the flags a user gave, under their full names.

vLLM's parser takes a flag in many forms: with underscores, with `=`, shortened to any unambiguous beginning, negated,
and as a path into a JSON flag (`--kv-transfer-config.kv_port 1`). A rule about a flag must see all of them. The table
`vllm_flags.json` has vLLM's option strings and how many words follow each; a test compares it with vLLM's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option string of vLLM."""

    flag: str
    """The flag's first name."""
    takes: str
    """Words that follow it: `0`, `1`, `?` (one or none) or `+` (one or more)."""
    negated: bool = False


@dataclass(frozen=True)
class Given:
    """A flag as it was given."""

    flag: str
    """Its first name; what was written where vLLM has no such flag."""
    written: str
    """The word as written, without a value after `=`."""
    values: tuple[str, ...] = ()
    key: str | None = None
    """Path into the flag's JSON, of a flag such as `--kv-transfer-config.kv_port`."""
    known: bool = True
    negated: bool = False

    @property
    def value(self) -> str | None:
        """Its one value, or the last of several."""
        return self.values[-1] if self.values else None


@dataclass(frozen=True)
class Reading:
    """All that was given, in order, and the words that belong to no flag."""

    given: tuple[Given, ...]
    stray: tuple[str, ...] = ()

    def all(self, *flags: str) -> Iterator[Given]:
        """Each time that one of these flags was given."""
        return (each for each in self.given if each.flag in flags)

    def last(self, flag: str) -> Given | None:
        """The one that counts: the last."""
        return next((each for each in reversed(self.given) if each.flag == flag), None)

    def text(self, flag: str) -> str | None:
        """The value that counts; None where the flag was not given."""
        found = self.last(flag)
        return None if found is None else found.value or ""

    def json(self, flag: str) -> Any:
        """The value of a JSON flag: what the dotted forms build, for they replace any JSON beside them; else the JSON
        given, or its text where that is not JSON; None where the flag was not given."""
        dotted = [each for each in self.all(flag) if each.key is not None]
        if dotted:
            built: dict[str, Any] = {}
            for each in dotted:
                _put(built, str(each.key).split("."), _value(each.value or ""))
            return built
        text = self.text(flag)
        return None if text is None else _value(text)

    def switch(self, flag: str) -> bool | None:
        """Whether a switch is on; None where it was not given."""
        found = self.last(flag)
        return None if found is None else not found.negated


def read(words: Sequence[str]) -> Reading:
    """Read arguments as vLLM would. A flag that it does not know takes all words up to the next flag."""
    given: list[Given] = []
    stray: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_flag(word):
            stray.append(word)
            continue
        written, equals, value = word.partition("=")
        if re.match("-O.", written) and not equals:  # -O3
            written, equals, value = "-O", "=", word[2:]
        name, dot, key = ("--optimization-level" if written == "-O" else written).partition(".")
        option = find(name)
        takes = "*" if option is None else "1" if dot else option.takes
        values = [value] if equals else []
        limit = {"0": 0, "1": 1, "?": 1}.get(takes, len(words))
        while not equals and len(values) < limit and index < len(words) and not _is_flag(words[index]):
            values.append(words[index])
            index += 1
        flag, negated = (written, False) if option is None else (option.flag, option.negated)
        given.append(Given(flag, written, tuple(values), key if dot else None, option is not None, negated))
    return Reading(tuple(given), tuple(stray))


def find(name: str) -> Option | None:
    """The option that a name means: exact, else the only one that it is the beginning of."""
    name = name.replace("_", "-")
    options = _options()
    if name in options:
        return options[name]
    if not name.startswith("--"):
        return None
    flags = {(each.flag, each.negated): each for full, each in options.items() if full.startswith(name)}
    return next(iter(flags.values())) if len(flags) == 1 else None


def removed() -> frozenset[str]:
    """Flags of earlier versions that vLLM 0.33 does not accept."""
    return frozenset(_table()["removed"])


def values(flag: str) -> frozenset[str]:
    """What vLLM 0.33 takes for `--kv-cache-dtype` and `--attention-backend`; its parser takes anything, and it ends
    with an error later."""
    return frozenset(_table()["values"][flag])


@cache
def _options() -> dict[str, Option]:
    return {name: Option(*entry) for name, entry in _table()["options"].items()}


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("vllm_flags.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _is_flag(word: str) -> bool:
    """Whether argparse takes a word for a flag: a dash, and neither a number nor several words."""
    if not word.startswith("-") or word == "-" or " " in word:
        return False
    return not word[1:].replace(".", "", 1).isdigit()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = target.setdefault(name, {})
        if not isinstance(inner, dict):
            inner = target[name] = {}
        target = inner
    target[path[-1]] = value
