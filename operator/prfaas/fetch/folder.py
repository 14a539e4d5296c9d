"""A model's folder: what is whole, what is there in part, and who may write.

    <file>                      whole and checked: it got its name only then
    .prfaas-part/<hash>         the beginning of a file, named after its path and version
    .prfaas-part/checked.jsonl  files that were checked, so that no later start reads them again
    .prfaas-lock                held (flock) by the one who writes; gone with its process, however that ends
    .prfaas-complete.json       written last: the model is whole

Killed anywhere, what is there is right: bytes are only appended, names are only given to what was checked.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.api.conditions import Reason
from prfaas.api.model import MARKER
from prfaas.fetch.errors import FetchError, gigabytes
from prfaas.fetch.listing import OWN, Listing, RemoteFile
from prfaas.fetch.remote import Sleep

LOCK_POLL_SECONDS = 1.0
SPARE_BYTES = 1 << 20
"""What must be left over for the file system's and our own small things."""


def free_bytes(path: Path) -> int:
    """Bytes that may still be written below a path."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class Folder:
    """One model's folder."""

    root: Path
    free: Callable[[Path], int] = free_bytes
    size_limit: int | None = None
    """Most bytes that the model may take, whatever the disk has."""

    @property
    def _parts(self) -> Path:
        return self.root / f"{OWN}part"

    @property
    def _journal(self) -> Path:
        return self._parts / "checked.jsonl"

    def make(self) -> None:
        """Make it, readable for all: engines run under users of their own. Raises FetchError."""
        with disk(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._parts.mkdir(exist_ok=True)

    @asynccontextmanager
    async def locked(self, sleep: Sleep, waiting: Callable[[], None]) -> AsyncIterator[None]:
        """The one writer; `waiting` is called once if somebody else writes now. Raises FetchError."""
        with disk(self.root):
            handle = (self.root / f"{OWN}lock").open("ab")
        with handle:
            told = False
            while not _lock(handle.fileno(), self.root):
                if not told:
                    waiting()
                told = True
                await sleep(LOCK_POLL_SECONDS)
            yield

    # Whole

    def marker(self) -> dict[str, Any] | None:
        """What the marker says; None while the model is not whole."""
        try:
            found = json.loads((self.root / MARKER).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def holds(self, marker: dict[str, Any]) -> bool:
        """Whether the files of a marker are there, as long as they should be: somebody may have removed one since."""
        try:
            return all((self.root / file["path"]).stat().st_size == file["size"] for file in marker["files"])
        except (OSError, KeyError, TypeError):
            return False

    def unmark(self) -> None:
        """Not whole any more: it is about to change."""
        (self.root / MARKER).unlink(missing_ok=True)

    def mark(self, content: dict[str, Any]) -> None:
        """Everything is on the disk: say so, and forget how it came. Raises FetchError."""
        with disk(self.root):
            shutil.rmtree(self._parts, ignore_errors=True)
            partial = self.root / f"{OWN}complete.partial"
            with partial.open("w") as handle:
                json.dump(content, handle, indent=1)
                handle.flush()
                os.fsync(handle.fileno())
            partial.replace(self.root / MARKER)
            _sync(self.root)

    # In part

    def part(self, file: RemoteFile) -> Path:
        """Where the beginning of a file is kept."""
        return self._parts / hashlib.sha256(f"{file.path}\0{file.version}\0{file.size}".encode()).hexdigest()[:32]

    def have(self, file: RemoteFile) -> int:
        """Bytes of a file that are there, whole or in part."""
        whole = self.root / file.path
        if whole.is_file() and whole.stat().st_size == file.size:
            return file.size
        part = self.part(file)
        return min(part.stat().st_size, file.size) if part.is_file() else 0

    def forget_other_parts(self, files: Iterable[RemoteFile]) -> None:
        """Beginnings of files that are no longer wanted only take room."""
        keep = {self.part(file) for file in files} | {self._journal}
        for path in self._parts.iterdir():
            if path not in keep:
                path.unlink()

    def check_room(self, listing: Listing) -> None:
        """Whether what is missing fits, before the first byte of it. Raises FetchError."""
        have = sum(self.have(file) for file in listing.files)
        missing = listing.size - have
        free = self.free(self.root)
        if self.size_limit is not None:
            free = min(free, self.size_limit - have)
        if missing and missing + SPARE_BYTES > free:
            limit = "within model.cache.ephemeral.sizeLimit" if self.size_limit is not None else "on the disk"
            text = f"no room for the model: it needs {gigabytes(missing)} more, and {gigabytes(max(0, free))} are free"
            raise FetchError(Reason.DISK_FULL, f"{text} {limit}; make room, or keep it elsewhere")

    # Checked

    def checked(self, file: RemoteFile) -> bool:
        """Whether the file is there and was checked in an earlier start, and nobody has touched it since."""
        state = self._state(file)
        return state is not None and state in self._read_journal()

    def note(self, file: RemoteFile) -> None:
        """The file is there and checked. Raises FetchError."""
        with disk(self.root), self._journal.open("a") as handle:
            handle.write(json.dumps(self._state(file)) + "\n")

    def _state(self, file: RemoteFile) -> list[Any] | None:
        try:
            found = (self.root / file.path).stat()
        except OSError:
            return None
        checksum = file.checksum.value if file.checksum else file.version
        return [file.path, found.st_size, found.st_mtime_ns, checksum]

    def _read_journal(self) -> list[Any]:
        try:
            lines = self._journal.read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # the last line, when its writer was killed
                continue
        return found

    def finish(self, file: RemoteFile) -> None:
        """The part is checked: it is the file now. Raises FetchError."""
        whole = self.root / file.path
        with disk(self.root):
            whole.parent.mkdir(parents=True, exist_ok=True)
            self.part(file).replace(whole)
            _sync(whole.parent)
        self.note(file)


def _lock(descriptor: int, root: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        text = f"the volume of {root} does not support locks ({error.strerror}), and two writers would spoil the model"
        raise FetchError(Reason.FETCH_FAILED, f"{text}; keep it on another kind of volume") from error
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk(root: Path) -> Iterator[None]:
    """Within this block, what the file system refuses is a FetchError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"the disk is full at {root}; make room, or keep the model elsewhere"
            raise FetchError(Reason.DISK_FULL, text) from error
        text = f"cannot write below {root}: {error.strerror or error}"
        raise FetchError(Reason.FETCH_FAILED, f"{text}; see to the rights on the volume, or take another") from error
