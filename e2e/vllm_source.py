"""vLLM's own argument parser, from its source distribution: what we render is read by what it is rendered for.

The source is fetched from the package index by pip, which holds it to the hash below, and kept in the cache root
outside the checkout; of it only the Python files stay. The parser runs in a process (`e2e/vllm_parser.py`) and a
virtual environment (`locks/vllm-parser.txt`) of its own, with neither torch nor a GPU: seconds to start, then
milliseconds for a command line. `python -m e2e.vllm_source` fetches what is missing; with words, it parses them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from e2e.datacenters.cache import Log, atomically, cache_root, locked, progress, say, used
from e2e.datacenters.errors import DatacentersError, in_words
from e2e.environments import environment

VERSION = "0.33.0"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
"""Of `vllm-0.33.0.tar.gz`."""
FETCH_SECONDS = 900.0
LOCKS = Path(__file__).parents[1] / "locks"
HARNESS = Path(__file__).with_name("vllm_parser.py")


class VllmSourceError(DatacentersError):
    """vLLM's source could not be had, or its parser did not start; the message ends with what the program printed."""


@dataclass(frozen=True)
class Parsed:
    """What vLLM makes of a command line: values, or a refusal."""

    values: dict[str, Any] | None = None
    """Every option by its name in vLLM's code; enumerations by name, configuration classes as maps. None when the
    parser refuses."""
    configured: dict[str, Any] | None = None
    """The configurations that vLLM makes of them, such as `scheduler_config`. None when it refuses."""
    error: str = ""
    status: int = 0
    """Exit status of the process: 2 when the parser refuses, 1 when a later check does."""

    def __getitem__(self, option: str) -> Any:
        """One value. Raises AssertionError with vLLM's words when the line was refused."""
        assert self.values is not None, f"vLLM refuses the command line: {self.error}"
        assert not self.status, f"vLLM refuses the command line: {self.error}"
        return self.values[option]


@in_words()
def source(log: Log = say) -> Path:
    """The folder that holds the package `vllm`, fetched first if the cache lacks it. Raises DatacentersError."""
    entry = cache_root() / f"vllm-{SHA256[:12]}"
    tree = entry / "source"
    with locked(entry, log):
        if not tree.is_dir():
            with (
                progress(f"fetching vLLM {VERSION}'s source distribution (47 MB)", log=log),
                atomically(tree) as partial,
            ):
                _fetch(partial)
    return used(entry) / "source"


def _fetch(target: Path) -> None:
    """Has pip download, verify and unpack it. pip also asks the distribution for its metadata, for which that wants
    torch: this failure is expected, and comes after the unpacking."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pip-") as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-clean", "--no-cache-dir"]
        options = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes", "--dest", folder]
        done = subprocess.run(
            [*pip, *options, "--requirement", str(requirements)],
            env=os.environ | {"TMPDIR": folder},
            capture_output=True,
            text=True,
            check=False,
            timeout=FETCH_SECONDS,
        )
        found = list(Path(folder).glob("*/vllm_*/vllm/entrypoints/common/cli_args.py"))
        if len(found) != 1:
            raise VllmSourceError(f"pip could not fetch vLLM {VERSION}: {(done.stderr or done.stdout).strip()[-2000:]}")
        package = found[0].parents[2]
        for file in package.rglob("*.py"):
            kept = target / file.relative_to(package.parent)
            kept.parent.mkdir(parents=True, exist_ok=True)
            file.rename(kept)


class VllmParser:
    """The parser's process, to be used in a `with` block."""

    def __init__(self, log: Log = say) -> None:
        self._command = [str(environment("vllm-parser", log, LOCKS).program("python")), "-I", str(HARNESS)]
        self._command.append(str(source(log)))
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # lives as long as the process

    def __enter__(self) -> Self:
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PATH": os.environ.get("PATH", "")}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=quiet
        )
        try:
            self._answer()
        except VllmSourceError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._log.close()

    def parse(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> Parsed:
        """What `vllm serve` would make of these words (without `vllm serve`), with these variables besides."""
        self._ask({"words": list(words), "environment": dict(environment or {})})
        return Parsed(**self._answer())

    def options(self) -> dict[str, Any]:
        """Every option by its name in vLLM's code: its `flags`, and its `default`."""
        self._ask(None)
        return self._answer()

    def _ask(self, request: dict[str, Any] | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise VllmSourceError(f"vLLM's parser ended: {self._log.read().strip()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(words: Sequence[str]) -> int:
    """Print what vLLM makes of the words: 0, or its exit status with its words on stderr."""
    try:
        with VllmParser() as parser:
            parsed = parser.parse(words) if words else Parsed({})
    except DatacentersError as error:
        say(f"error: {error}")
        return 1
    if parsed.error:
        say(parsed.error)
    else:
        print(json.dumps(parsed.values, indent=2))
    return parsed.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
