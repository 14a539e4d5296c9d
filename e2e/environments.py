"""Third-party tools that our tests and benches use as their users do: each in a virtual environment of its own.

`locks/clients/NAME.in` pins a tool, `locks/clients/NAME.txt` all that comes with it, by hash. An environment is made
once from wheels alone, under a lock, and kept in the cache root (`e2e.datacenters.cache`) under the hash of its lock;
what a tool needs never meets what we need. `python -m e2e.environments` makes those that are missing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from e2e.datacenters.cache import Log, atomically, cache_root, locked, progress, say, tree_hash, used
from e2e.datacenters.errors import DatacentersError, in_words

LOCKS = Path(__file__).parents[1] / "locks" / "clients"
INSTALL_SECONDS = 900.0
_OPTIONS = ("--quiet", "--no-build", "--require-hashes", "--no-cache")
"""Wheels only: nothing of a tool runs before a test runs it. uv's own cache would keep everything twice."""


@dataclass(frozen=True)
class Environment:
    """An installed tool."""

    folder: Path

    def program(self, name: str) -> Path:
        """One of its commands."""
        found = self.folder / "bin" / name
        if not found.exists():
            raise DatacentersError(f"{self.folder} has no command {name}")
        return found


def names() -> tuple[str, ...]:
    """Every tool that has a lock."""
    return tuple(sorted(file.stem for file in LOCKS.glob("*.txt")))


def environment(name: str, log: Log = say, locks: Path = LOCKS) -> Environment:
    """The environment of a tool, made now if nobody made it before. Raises DatacentersError when it cannot be made."""
    lock = locks / f"{name}.txt"
    if not lock.exists():
        raise DatacentersError(f"{lock} does not exist: there are locks for {', '.join(names())}")
    python = _python()
    entry = cache_root() / f"env-{tree_hash([lock], platform.python_version(), python, *_OPTIONS)}"
    folder = entry / "venv"
    with locked(entry, log):
        if not folder.is_dir():
            _make(name, lock, folder, python, log)
    return Environment(used(entry) / "venv")


def _python() -> str:
    """The interpreter behind our own environment: an environment must not depend on a checkout's."""
    return str(getattr(sys, "_base_executable", "") or sys.executable)


@in_words()
def _make(name: str, lock: Path, folder: Path, python: str, log: Log) -> None:
    packages = sum("==" in line for line in lock.read_text(encoding="utf-8").splitlines())
    with atomically(folder) as partial, progress(f"installing {name} ({packages} packages) to run it", log=log):
        _uv("venv", "--quiet", "--relocatable", "--python", python, str(partial))
        _uv("pip", "install", *_OPTIONS, "--python", str(partial / "bin" / "python"), "--requirement", str(lock))


def _uv(*arguments: str) -> None:
    # A project's own settings (a folder above, a variable) must not reach into the environment.
    settings = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")}
    subprocess.run(
        [find_uv_bin(), "--no-config", *arguments],
        env=settings,
        check=True,
        capture_output=True,
        timeout=INSTALL_SECONDS,
    )


def main(chosen: Sequence[str]) -> int:
    """Make the environments named, or all; 1 when one cannot be made."""
    try:
        for name in chosen or names():
            environment(name)
    except DatacentersError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
