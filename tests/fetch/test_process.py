"""The command as a process: killed without warning at any moment and run again, told to stop, two at a time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.model_source import ModelSource, serving, small_model
from prfaas.cli.main import main
from prfaas.fetch.download import CHUNK
from prfaas.fetch.run import FILES_AT_A_TIME

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MEGABYTES = 6.0
IN_FLIGHT = FILES_AT_A_TIME * (CHUNK + 2 * 1024 * 1024)
"""What a kill may cost at most: the piece that each connection was filling, and what the sockets held."""


class Program:
    """`prfaas fetch` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, url: str, to: Path, *arguments: str, environment: dict[str, str] | None = None) -> Program:
        command = [sys.executable, "-m", "prfaas.cli.main", "fetch", "hf://demo/model", "--to", str(to)]
        command += ["--endpoint", url, *arguments]
        clean = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**clean, "PYTHONPATH": str(ROOT / "operator"), **(environment or {})},
        )
        return cls(process)

    async def ended(self) -> tuple[int, list[str]]:
        """Status and lines."""
        out, _ = await asyncio.wait_for(self.process.communicate(), 60)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode().splitlines()


@pytest.fixture
async def source() -> AsyncIterator[tuple[ModelSource, str]]:
    made = ModelSource(small_model(MEGABYTES))
    async with serving(made) as url:
        yield made, url


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():  # noqa: ASYNC110  # it becomes true in another process
            await asyncio.sleep(0.01)


def on_disk(to: Path) -> int:
    """Bytes of content that are there."""
    files = [path for path in to.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    return sum(path.stat().st_size for path in files if path.name not in (".prfaas-lock", ".prfaas-complete.json"))


async def test_killed_twice_it_ends_whole_and_nothing_but_the_pieces_in_flight_came_twice(
    source: tuple[ModelSource, str], tmp_path: Path
) -> None:
    made, url = source
    size = sum(map(len, made.files.values()))
    to = tmp_path / "model"
    for share in (0.3, 0.6):
        made.rate = 2e6
        program = await Program.start(url, to)
        await until(lambda share=share: on_disk(to) >= share * size)  # type: ignore[misc]  # bound now, on purpose
        before = on_disk(to)
        program.process.send_signal(signal.SIGKILL)
        await program.ended()
        assert on_disk(to) >= before
        assert not (to / ".prfaas-complete.json").exists()
    made.rate = None
    made.sent = 0
    left = size - on_disk(to)
    status, _ = await (await Program.start(url, to)).ended()
    assert status == 0
    assert {path: (to / path).read_bytes() for path in made.files} == made.files
    assert made.sent == left < 0.4 * size


async def test_a_kill_costs_no_more_than_the_pieces_in_flight(source: tuple[ModelSource, str], tmp_path: Path) -> None:
    made, url = source
    made.rate = 3e6
    to = tmp_path / "model"
    program = await Program.start(url, to)
    await until(lambda: made.sent >= 4_000_000)
    program.process.send_signal(signal.SIGKILL)
    await program.ended()
    assert made.sent - on_disk(to) <= IN_FLIGHT
    assert on_disk(to) > 0


async def test_told_to_stop_it_stops_at_once_and_says_how_to_go_on(
    source: tuple[ModelSource, str], tmp_path: Path
) -> None:
    made, url = source
    made.rate = 1e6
    program = await Program.start(url, tmp_path)
    await until(lambda: made.sent > 0)
    program.process.send_signal(signal.SIGTERM)
    status, lines = await program.ended()
    assert (status, lines[-1]) == (143, "prfaas fetch: told to stop; run it again to go on")


async def test_of_two_writers_one_waits_and_finds_it_done(source: tuple[ModelSource, str], tmp_path: Path) -> None:
    made, url = source
    made.rate = 4e6
    programs = [await Program.start(url, tmp_path) for _ in range(2)]
    (first, _), (second, _) = await asyncio.gather(*(program.ended() for program in programs))
    assert (first, second) == (0, 0)
    assert made.sent == sum(map(len, made.files.values()))


async def test_the_report_and_the_log_are_for_machines_and_hold_no_secret(
    source: tuple[ModelSource, str], tmp_path: Path
) -> None:
    made, url = source
    made.token = "hf_right"
    report = tmp_path / "report"
    arguments = ("--report", str(report))
    wrong = await Program.start(url, tmp_path / "m", *arguments, environment={"HF_TOKEN": "hf_wrong"})
    status, lines = await wrong.ended()
    said: dict[str, Any] = json.loads(report.read_text())
    assert (status, said["reason"]) == (1, "Gated")
    assert lines[-1] == f"prfaas fetch: {said['message']}"
    assert "hf_wrong" not in "".join(lines) + report.read_text()
    right = await Program.start(url, tmp_path / "m", *arguments, environment={"HF_TOKEN": "hf_right"})
    status, lines = await right.ended()
    assert (status, json.loads(report.read_text())["reason"]) == (0, "Cached")
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    size = sum(map(len, made.files.values()))
    assert (first["done"], first["total"]) == (0, size)
    assert (last["done"], last["total"]) == (size, size)


@pytest.mark.parametrize("source", ["gpt2", "https://example.com/model", "pvc://models/a", "hf://a/b/c", "s3://"])
def test_what_is_no_source_is_refused(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", source, "--to", str(tmp_path)]) == 2
    assert "s3://BUCKET/PREFIX" in capsys.readouterr().err
