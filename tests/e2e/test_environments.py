"""Environments of third-party tools: pinned by hash, made once, whole or not at all."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from e2e.datacenters.cache import ENTRY, cache_root
from e2e.datacenters.errors import DatacentersError
from e2e.environments import LOCKS, environment, names


def test_every_lock_pins_its_tool_and_hashes_all_that_comes_with_it() -> None:
    assert names() == ("aiperf", "openai", "smg", "vllm-router")
    for name in names():
        pinned = (LOCKS / f"{name}.in").read_text().split()[0]
        lock = (LOCKS / f"{name}.txt").read_text()
        assert pinned.startswith(f"{name}==")
        assert f"{pinned} \\" in lock
        pins = [line for line in lock.splitlines() if "==" in line]
        hashed = re.findall(r"^[a-z0-9-]+==\S+ \\\n    --hash=sha256:", lock, re.MULTILINE)
        assert len(hashed) == len(pins)
        assert "://" not in lock, "no address of a registry"


def test_a_tool_without_a_lock_is_told() -> None:
    with pytest.raises(DatacentersError, match=r"nothing\.txt does not exist: there are locks for aiperf, openai"):
        environment("nothing")


@pytest.mark.clients
def test_an_environment_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    block = re.search(r"^sniffio==.*\n( +--hash=.*\n)+", (LOCKS / "openai.txt").read_text(), re.MULTILINE)
    assert block is not None
    (tmp_path / "small.txt").write_text(block[0])
    said: list[str] = []
    made = environment("small", said.append, tmp_path)
    assert said[0] == "installing small (1 packages) to run it ..."
    assert said[-1].startswith("installing small (1 packages) to run it: done in ")
    told = len(said)
    assert environment("small", said.append, tmp_path) == made
    assert len(said) == told, "the second time there is nothing to do"
    assert ENTRY.fullmatch(made.folder.parent.name), "an entry that is forgotten when nobody uses it"
    assert made.folder.is_relative_to(cache_root())
    asked = [str(made.program("python")), "-c", "import sniffio, sys; print(sniffio.__version__, sys.prefix)"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["1.3.1", str(made.folder)]
    with pytest.raises(DatacentersError, match="has no command aiperf"):
        made.program("aiperf")


@pytest.mark.clients
def test_what_is_not_what_was_locked_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "wrong.txt").write_text(f"sniffio==1.3.1 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(DatacentersError, match=r"(?s)failed with status.*[Hh]ash"):
        environment("wrong", lambda _: None, tmp_path)
    assert not list(cache_root().glob("env-*/venv"))
