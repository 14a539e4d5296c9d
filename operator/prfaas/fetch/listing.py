"""What a source has: its files, how large they are, and what their content must be."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prfaas.api.conditions import Reason
from prfaas.fetch.errors import FetchError

OWN = ".prfaas-"
"""Names of our own files in a model's folder begin so."""


@dataclass(frozen=True)
class Checksum:
    """Of a whole file, as hex digits. `git` is Git's own name of a file: SHA-1 over its length and its content."""

    algorithm: Literal["sha256", "md5", "git"]
    value: str


@dataclass(frozen=True)
class RemoteFile:
    """One file of a model."""

    path: str
    """Relative, with `/`; `checked_path` has seen it."""
    size: int
    url: str
    checksum: Checksum | None = None
    """None: the source does not say; then only the size is compared."""
    version: str = ""
    """What changes with the content, so that pieces of two versions are never joined."""
    if_match: str = ""
    """ETag that the file must still have when it is asked for; empty: its URL is of one version."""


@dataclass(frozen=True)
class Listing:
    """A model as the source has it."""

    commit: str
    """What the revision stands for now, where the source knows such a thing."""
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Hash(Protocol):
    """The part of hashlib's objects that we use."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


def hasher(file: RemoteFile) -> Hash:
    """What computes the checksum of a file's content (SHA-256 where there is none to compare with)."""
    algorithm = file.checksum.algorithm if file.checksum else "sha256"
    if algorithm == "md5":
        return hashlib.md5(usedforsecurity=False)
    if algorithm == "git":
        return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    return hashlib.sha256()


def checked_path(path: str) -> str:
    """The path, if it stays within the model's folder and out of our own files. Raises FetchError."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts) or parts[0].startswith(OWN):
        raise FetchError(Reason.FETCH_FAILED, f"the source names a file that cannot be kept: {path!r}")
    return path
