"""Where built things are kept, and how several processes share them.

One folder per state of the inputs, `${XDG_CACHE_HOME:-~/.cache}/prfaas/<hash>`: nothing is rebuilt when nothing
changed, and two checkouts with different versions do not disturb each other. A finished thing appears by an atomic
rename, so its presence means that it is whole; whoever builds holds the folder's lock. What nobody used for two weeks
is forgotten.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERSIONS_FILE = HERE / "versions.toml"
TOOLCHAIN = HERE / "toolchain"
NODE_FILES = HERE / "node"

UNUSED_DAYS = 14
ENTRY = re.compile(r"([0-9a-f]{12}|debian-[0-9a-f]{12}|env-[0-9a-f]{12}|node-[0-9a-f]{12}|vllm-[0-9a-f]{12})")
"""Names of entries that are made again when they are missing."""

Log = Callable[[str], None]


def say(message: str) -> None:
    """Print one progress line at once, on stderr: stdout is for answers."""
    print(message, file=sys.stderr, flush=True)


def versions() -> dict[str, Any]:
    """The versions file, parsed."""
    return tomllib.loads(VERSIONS_FILE.read_text())


def tree_hash(paths: Iterable[Path], *recipe: str) -> str:
    """Twelve hex digits over the names, modes and contents of the files and folders named, and of a recipe's words."""
    digest = hashlib.sha256("\0".join(recipe).encode())
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            data = file.read_bytes()
            name = file.relative_to(path.parent).as_posix()
            executable = os.access(file, os.X_OK)
            digest.update(f"{name}\0{executable}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()[:12]


def cache_root() -> Path:
    """The folder of all our cached builds (not made here)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prfaas"


def used(entry: Path) -> Path:
    """The entry, with a note that it was used now (its modification time)."""
    with contextlib.suppress(OSError):  # not there yet, or not ours to write
        os.utime(entry)
    return entry


def forget_unused(log: Log = say) -> None:
    """Remove entries that nobody used for UNUSED_DAYS. The private daemon's store has its own rule, and stays."""
    root = cache_root()
    entries = [entry for entry in root.glob("*") if ENTRY.fullmatch(entry.name)]
    entries += [*root.glob("image/*.tar")]
    oldest = time.time() - UNUSED_DAYS * 86_400
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another process may do the same
            if entry.lstat().st_mtime < oldest:
                log(f"forgetting {entry}: not used for {UNUSED_DAYS} days")
                remove(entry)


@contextlib.contextmanager
def locked(folder: Path, log: Log = say) -> Iterator[None]:
    """Hold the folder's lock; say so once when another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that builds in {folder}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomically(target: Path) -> Iterator[Path]:
    """A temporary path beside target that becomes target when the block ends well, and vanishes when not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    remove(partial)
    try:
        yield partial
        if target.is_dir() and not target.is_symlink():
            remove(target)
        partial.replace(target)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file, link or whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def progress(what: str, detail: Callable[[], str] = str, log: Log = say, every: float = 20.0) -> Iterator[None]:
    """Say that work started, how far it is every `every` seconds, and in the end how long it took."""
    started = time.monotonic()
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(every):
            log(f"  {what}: {detail() or 'running'}, {elapsed(time.monotonic() - started)}")

    log(f"{what} ...")
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        stop.set()
        ticker.join()
    log(f"{what}: done in {elapsed(time.monotonic() - started)}")


def elapsed(seconds: float) -> str:
    """Seconds below one minute, minutes above: `42 s`, `3.5 min`."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
