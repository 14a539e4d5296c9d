"""Objects in files, as a person gives them to a command: several documents, lists, folders, standard input.

Every object knows where it stands, so that whatever is wrong with it can be said with its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DocumentError(ValueError):
    """A file that cannot be read as objects: which, where in it, and why."""


@dataclass(frozen=True)
class Document:
    """One object, as written."""

    place: str
    """The file, and which of its documents."""
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        """What it says it is."""
        return str(self.content.get("kind", ""))

    @property
    def title(self) -> str:
        """Its place, kind and name: how a message about it begins."""
        metadata = self.content.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return f"{self.place} ({self.kind or 'no kind'}{f' {name}' if name else ''})"


def read(files: Sequence[str]) -> list[Document]:
    """All objects in files, in folders of YAML files, and in standard input (`-`). Raises DocumentError."""
    return [document for file in files for document in _in_one(file)]


def _in_one(name: str) -> Iterator[Document]:
    if name == "-":
        yield from _parse("standard input", _text_of(None, name))
        return
    path = Path(name)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
        if not found:
            raise DocumentError(f"{name}: no *.yaml in this folder")
        for each in found:
            yield from _parse(str(each), _text_of(each, str(each)))
        return
    yield from _parse(name, _text_of(path, name))


def _text_of(path: Path | None, name: str) -> str:
    try:
        return sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentError(f"{name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{name}: is not text: {error.reason} at byte {error.start}") from error


def _parse(name: str, text: str) -> Iterator[Document]:
    import yaml

    try:
        contents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise DocumentError(f"{name}: is no YAML: {' '.join(str(error).split())}") from error
    several = len(contents) > 1
    for number, content in enumerate(contents, start=1):
        place = f"{name}, document {number}" if several else name
        if content is not None:  # nothing but comments between two `---`
            yield from _objects(place, content)


def _objects(place: str, content: Any) -> Iterator[Document]:
    """A list, as `kubectl get -o yaml` prints it, is its items."""
    if not isinstance(content, dict):
        raise DocumentError(f"{place}: is no object: a mapping with apiVersion, kind, metadata and spec is wanted")
    items = content.get("items")
    if str(content.get("kind", "")).endswith("List") and isinstance(items, list):
        for index, item in enumerate(items):
            yield from _objects(f"{place}, items[{index}]", item)
        return
    yield Document(place, content)
