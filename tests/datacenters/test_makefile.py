"""What the Makefile says of a machine that lacks something, and what it makes of its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")]


def make(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else dict(os.environ)
    environment.pop("MAKEFLAGS", None)  # of the `make test` that runs this
    environment.pop("MAKELEVEL", None)
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("version", ["go1.19.8", "go1.25.9"])
def test_an_old_go_is_told(tmp_path: Path, version: str) -> None:
    program(tmp_path, "go", f"echo {version}")
    done = make("system", path=tmp_path)
    assert done.returncode != 0
    assert f"Go 1.26 or later is needed; go on PATH is {version}" in done.stderr


def test_a_go_that_cannot_fetch_the_modules_toolchain_is_told(tmp_path: Path) -> None:
    program(tmp_path, "go", 'test "$1" = version && echo go version go1.22.1 linux/amd64')
    assert "go on PATH is go1.22.1" in make("system", path=tmp_path).stderr


@pytest.mark.parametrize("version", ["go1.26", "go1.26.0", "go1.27.1", "go2.0"])
def test_a_new_go_will_do(tmp_path: Path, version: str) -> None:
    program(tmp_path, "go", f"echo {version}")
    assert make("system", path=tmp_path).returncode == 0


def test_an_old_python_is_told(tmp_path: Path) -> None:
    program(tmp_path, "go", "echo go1.26.8")
    program(tmp_path, "oldpython", 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    done = make("system", "PYTHON=oldpython", path=tmp_path)
    assert done.returncode != 0
    assert "Python 3.11 or later is needed; oldpython is Python 3.9.2" in done.stderr
    assert "nopython is not on PATH" in make("system", "PYTHON=nopython", path=tmp_path).stderr


def test_a_trace_may_have_a_space_in_its_name() -> None:
    done = make("--dry-run", "demo", "TRACE=my trace.jsonl")
    assert '--trace "my trace.jsonl"' in done.stdout
    assert "--trace" not in make("--dry-run", "demo").stdout


def test_a_test_run_ends_with_pytests_summary() -> None:
    for target in ("test", "test-long"):
        last = make("--dry-run", target).stdout.splitlines()[-1]
        assert last.startswith(".venv/bin/pytest tests e2e/scenarios")
