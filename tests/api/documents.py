"""The full examples, and how a test makes a variation of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from prfaas.api.kinds import KINDS

FULL = Path(__file__).parent / "full"
REMOVE: Final = object()
Document = dict[str, Any]


def full_examples() -> dict[str, list[Document]]:
    """By kind: the example with every field first, then those with what excludes something in it."""
    examples: dict[str, list[Document]] = {kind: [] for kind in KINDS}
    for file in sorted(FULL.glob("*.yaml")):
        document = yaml.safe_load(file.read_text())
        examples[document["kind"]].append(document)
    return examples


EXAMPLES = full_examples()


def example(kind: str, changes: Mapping[str, Any] | None = None, *, name: str | None = None) -> Document:
    """The full example of a kind, changed: `{"spec.engine.env.0.value": "2", "spec.paused": REMOVE}`."""
    document = copy.deepcopy(EXAMPLES[kind][0])
    del document["status"]
    if name is not None:
        document["metadata"]["name"] = name
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place: Any = document
        for each in parents:
            place = place[int(each)] if isinstance(place, list) else place.setdefault(each, {})
        if value is REMOVE:
            del place[last]
        elif isinstance(place, list):
            index = int(last)
            place[index : index + 1] = [value]
        else:
            place[last] = value
    return document


def values(document: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """Every value at a schema path (`[]` an item, `[*]` a map's value) of a document."""
    if not path:
        yield document
    elif path[0] == "[]":
        for item in document:
            yield from values(item, path[1:])
    elif path[0] == "[*]":
        for value in document.values():
            yield from values(value, path[1:])
    elif path[0] in document:
        yield from values(document[path[0]], path[1:])


def collection(kind: str, namespace: str, name: str | None = None) -> str:
    """URL path of a kind's objects in a namespace, or of one object."""
    return KINDS[kind].resource.path(namespace, name)
