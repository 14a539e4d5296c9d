"""What vLLM does to the words of a command line before argparse sees them.

* `--model X` becomes the positional; `--config FILE` is replaced by the file's content, behind the model.
* `_` and `-` are the same in a flag's name, up to its first dot; `-O2`, `-O 2` and `-O=2` set the optimization level.
* `--flag.a.b V` becomes an object of its own, at the end: it replaces a JSON value of the same flag, it is not merged.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Sequence
from typing import Any

import yaml

from prfaas.worker.commandline.values import human_readable_int

Warn = Callable[[str], None]
ReadText = Callable[[str], str]


class CommandLineError(ValueError):
    """vLLM ends with an exception (exit status 1) rather than with argparse's message (2)."""


def rewrite(words: Sequence[str], known: Collection[str], read_text: ReadText, warn: Warn) -> list[str]:
    """The words that argparse is to read. `known`: every option string; `read_text` reads a file."""
    given = _model_first(list(words), warn)
    if "--config" in given:
        given = _with_file(given, known, read_text)
    return _dotted_last(_same_spelling(given), warn)


def _model_first(words: list[str], warn: Warn) -> list[str]:
    at = next((i for i, word in enumerate(words) if re.match(r"--model(=.+|$)", word)), None)
    if at is not None:
        warn("With `vllm serve`, give the model as a positional argument or in a config file instead of `--model`.")
        if words[at] == "--model":
            if at + 1 == len(words):
                raise CommandLineError("--model needs a value")
            words = [words[at + 1], *words[:at], *words[at + 2 :]]
        else:
            words = [words[at].removeprefix("--model="), *words[:at], *words[at + 1 :]]
    elif (
        words
        and words[0].startswith("-")
        and not any(re.match(r"--config(=.+|$)", word) for word in words)
        and any(re.match(r"--served[-_]model[-_]name(=.+|$)", word) for word in words)
    ):
        raise CommandLineError(
            "`model` should be provided as the first positional argument: `vllm serve <model> --<arg> <value>`."
        )
    return words


def _with_file(words: list[str], known: Collection[str], read_text: ReadText) -> list[str]:
    if words.count("--config") > 1:
        raise CommandLineError("More than one config file specified!")
    at = words.index("--config")
    if at == len(words) - 1:
        raise CommandLineError("No config file specified! Please check your command-line arguments.")
    from_file = _file_words(words[at + 1], known, read_text)
    model_given = not words[0].startswith("-")
    if not model_given and "--model" not in from_file:
        raise CommandLineError("No model specified! Give it as a positional argument or in the config file.")
    head = words[:1] if model_given else []
    rest = words[len(head) : at] + words[at + 2 :]
    return head + from_file + rest


def _file_words(path: str, known: Collection[str], read_text: ReadText) -> list[str]:
    if not path.endswith((".yaml", ".yml")):
        raise CommandLineError(f"Config file must be of a yaml/yml type. {path.rsplit('.', 1)[-1]} supplied")
    try:
        content = yaml.safe_load(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandLineError(f"Unable to read the config file at {path}: {error}") from error
    if not isinstance(content, dict):
        raise CommandLineError(f"the config file at {path} must be a mapping of flags to values")
    words: list[str] = []
    for key, value in content.items():
        if isinstance(value, bool):
            if value:
                words.append(f"--{key}")
            elif f"--no-{key}" in known:
                words.append(f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *(str(item) for item in value)] if value else []
        else:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _same_spelling(words: list[str]) -> list[str]:
    spelled = []
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            head, dot, keys = name.partition(".")
            spelled.append(head.replace("_", "-") + dot + keys + equals + value)
        elif word.startswith("-O") and word != "-O":
            spelled += ["--optimization-level", word[3:] if word[2] == "=" else word[2:]]
        elif word == "-O" and words[index + 1 : index + 2] and words[index + 1] in ("0", "1", "2", "3"):
            spelled.append("--optimization-level")
        else:
            spelled.append(word)
    return spelled


def _dotted_last(words: list[str], warn: Warn) -> list[str]:
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    seen, repeated = set(), set()
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        name, equals, value = word.partition("=")
        if word.startswith("-") and "." in name:
            if not equals:
                if index == len(words):
                    raise CommandLineError(f"{name} needs a value")
                value, index = words[index], index + 1
            flag, keys, parsed = _dotted(name, value)
            repeated |= {f"{flag}.{key}" for key in _merge(objects.setdefault(flag, {}), _nest(keys, parsed))}
            continue
        if word.startswith("--") and "." not in word:
            if name in seen:
                repeated.add(name)
            seen.add(name)
        kept.append(word)
    if repeated:
        warn(f"Found duplicate keys {', '.join(sorted(repeated))}")
    for flag, value_of in objects.items():
        kept += [flag, json.dumps(value_of)]
    return kept


def _dotted(name: str, text: str) -> tuple[str, list[str], Any]:
    if name.endswith("+"):
        name, text = name[:-1], json.dumps(text.split(","))
    flag, *keys = name.split(".")
    try:
        return flag, keys, json.loads(text)
    except ValueError:
        pass
    try:
        return flag, keys, human_readable_int(text)
    except (ValueError, ArgumentTypeError):
        return flag, keys, text


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _merge(into: dict[str, Any], update: dict[str, Any]) -> set[str]:
    """Add; lists are joined, other values replaced. The keys of what was replaced."""
    replaced = set()
    for key, value in update.items():
        old = into.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            replaced |= {f"{key}.{inner}" for inner in _merge(old, value)}
        elif isinstance(value, list) and isinstance(old, list):
            into[key] = old + value
        else:
            if key in into:
                replaced.add(key)
            into[key] = value
    return replaced
