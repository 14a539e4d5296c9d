"""vLLM's source in the cache, and the parser's process: what fails is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e import vllm_source
from e2e.datacenters.cache import ENTRY, cache_root
from e2e.vllm_source import Parsed, VllmParser, VllmSourceError, main, source

pytestmark = pytest.mark.clients


def test_only_python_is_kept_and_outside_the_checkout(vllm: VllmParser) -> None:
    tree = source()
    assert tree.is_relative_to(cache_root())
    assert ENTRY.fullmatch(tree.parent.name), "an entry that is forgotten when nobody uses it"
    assert [each.name for each in tree.iterdir()] == ["vllm"]
    assert {file.suffix for file in tree.rglob("*") if file.is_file()} <= {".py", ".pyc"}


def test_without_an_index_it_says_what_could_not_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {
        "INDEX_URL": "http://127.0.0.1:9/",
        "RETRIES": "0",
        "FIND_LINKS": "",
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    said: list[str] = []
    with pytest.raises(VllmSourceError, match=r"pip could not fetch vLLM 0\.33\.0: "):
        source(said.append)
    assert said[0] == "fetching vLLM 0.33.0's source distribution (47 MB) ..."
    assert not list(tmp_path.rglob("vllm_*")), "nothing is left behind"
    assert not list(tmp_path.rglob("source"))


def test_a_parser_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_source, "source", lambda _log: tmp_path)
    with pytest.raises(VllmSourceError, match="No module named 'vllm'"):
        VllmParser().__enter__()


def test_a_parser_that_ends_says_so() -> None:
    with VllmParser() as parser:
        parser._process.kill()
        parser._process.wait()
        with pytest.raises(VllmSourceError, match="vLLM's parser ended"):
            parser.parse(["org/model"])


def test_values_of_a_refused_line_are_no_values() -> None:
    with pytest.raises(AssertionError, match="vLLM refuses the command line: no such flag"):
        Parsed(error="no such flag", status=2)["port"]


def test_the_command_prints_values_or_what_vllm_says(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["org/model", "--port", "8123"]) == 0
    assert '"port": 8123' in capfd.readouterr().out
    assert main(["org/model", "--swap-space", "4"]) == 2
    assert capfd.readouterr().err == "unrecognized arguments: --swap-space 4\n"
