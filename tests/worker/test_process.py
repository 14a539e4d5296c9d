"""The worker as a process: nothing listens before the model is loaded, SIGTERM drains, wrong arguments exit with 2."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from prfaas.cli.main import main
from prfaas.worker.oracle import expected_text
from tests.worker.process import flags, free_pair, free_port, process, said

pytestmark = pytest.mark.slow


async def test_serves_then_drains_on_sigterm(tmp_path: Path) -> None:
    port = free_port()
    given = [*flags(tmp_path, port), "--time-scale", "10", "--shutdown-timeout", "30"]
    async with process(*given) as running, aiohttp.ClientSession() as session:
        assert "time scale 10, KV byte scale 1" in await said(running, f"serving on port {port}")
        asked = {"prompt": "Hello", "max_tokens": 100, "stream": True}
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=asked) as response:
            begun = await response.content.readuntil(b"\n\n")
            running.send_signal(signal.SIGTERM)
            await said(running, "draining for up to 30 s")
            rest = (await response.content.read()).decode()
        events = [json.loads(line[6:]) for line in (begun.decode() + rest).split("\n\n") if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert (text, events[-1]["choices"][0]["finish_reason"]) == (
            expected_text("Hello", 100, model="org/model"),
            "length",
        )
        assert await asyncio.wait_for(running.wait(), 30) == 0


async def test_without_a_shutdown_timeout_sigterm_aborts(tmp_path: Path) -> None:
    port = free_port()
    async with process(*flags(tmp_path, port)) as running, aiohttp.ClientSession() as session:
        await said(running, "serving on port")
        asked = {"prompt": "Hello", "max_tokens": 100_000, "stream": True}
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=asked) as response:
            await response.content.readuntil(b"\n\n")
            running.send_signal(signal.SIGTERM)
            *_, last, done = (await response.content.read()).decode().strip().split("\n\n")
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "abort"
        assert done == "data: [DONE]"
        assert await asyncio.wait_for(running.wait(), 30) == 0


async def test_nothing_listens_before_the_model_is_loaded(tmp_path: Path) -> None:
    port = free_port()
    async with process(*flags(tmp_path, port, startup=3_600)) as running:
        await said(running, "model org/model")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 30) == 0, "and SIGTERM ends the loading"


async def test_wrong_values_exit_with_2() -> None:
    async with process("m", "--profile", "H20x8", "--kv-byte-scale", "0") as running:
        error = await said(running, "error")
        assert "--kv-byte-scale must be a finite number above 0, got 0.0" in error
        assert await running.wait() == 2


@pytest.mark.parametrize(
    ("flags", "words", "status"),
    [
        (["m", "--profile", "H20x8", "--swap-space", "4"], "unrecognized arguments: --swap-space 4", 2),
        (["m"], "the following arguments are required: --profile", 2),
        (["m", "--profile", "H20x8", "--kv-cache-dtype", "foo"], "--kv-cache-dtype: unknown value 'foo'", 1),
        (["/nowhere", "--profile", "H20x8"], "Invalid repository ID or local directory specified: '/nowhere'", 1),
        (["m", "--profile", "H20x8", "--config", "none.yaml"], "Unable to read the config file at none.yaml", 1),
    ],
)
def test_exit_statuses_are_vllms(flags: list[str], words: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ended: object = main(["worker", "serve", *flags])
    except SystemExit as exited:
        ended = exited.code
    assert ended == status
    assert words in capsys.readouterr().err


async def test_a_port_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with process(*flags(tmp_path, taken.getsockname()[1])) as running:
            await said(running, "address already in use")
            assert await running.wait() == 1


async def test_a_further_node_serves_nothing(tmp_path: Path) -> None:
    port = free_port()
    given = [*flags(tmp_path, port), "--headless", "--nnodes", "2", "--node-rank", "1", "-tp", "2"]
    async with process(*given) as running:
        await said(running, "headless: a further node of an instance serves nothing")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 30) == 0


async def test_a_model_on_disk_is_served_by_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "org--model" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    port = free_port()
    given = [str(folder), *flags(tmp_path, port)[1:], "--served-model-name", "org/model"]
    async with process(*given) as running, aiohttp.ClientSession() as session:
        await said(running, f"serving on port {port}")
        async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["root"]) == ("org/model", str(folder))


async def test_a_server_per_rank_and_their_supervisor(tmp_path: Path) -> None:
    first = free_pair()
    health = free_port()
    given = [*flags(tmp_path, first), "--data-parallel-multi-port-external-lb", "-dp", "2"]
    given += ["--data-parallel-size-local", "2", "--data-parallel-supervisor-port", str(health)]
    async with process(*given) as running, aiohttp.ClientSession() as session:
        await said(running, f"serving on port {first}, {first + 1}")
        for port, path in ((first, "/health"), (first + 1, "/health"), (health, "/ready")):
            async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                assert response.status == 200
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 30) == 0
