"""The worker as a process, for tests: started on free ports, its log read line by line, killed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.worker.rig import profile


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_pair() -> int:
    """The first of two neighbouring ports that nobody listens on now, below those that the kernel hands out."""
    for port in range(20_000, 30_000, 2):
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two ports are free")


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`prfaas worker serve` with these flags, killed at the end if need be."""
    environment = os.environ | {"PYTHONPATH": "operator", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    command = (sys.executable, "-m", "prfaas.cli.main", "worker", "serve", *flags)
    running = await asyncio.create_subprocess_exec(
        *command, env=environment, stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


async def said(running: asyncio.subprocess.Process, words: str) -> str:
    """Read the log up to a line with these words."""
    assert running.stderr is not None
    lines = []
    async with asyncio.timeout(30):
        while line := (await running.stderr.readline()).decode():
            lines.append(line)
            if words in line:
                return "".join(lines)
    raise AssertionError(f"no {words!r} in {''.join(lines)}")


def flags(tmp_path: Path, port: int, startup: float = 0) -> list[str]:
    """Arguments of a worker with rig.profile, on loopback."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile(startupSeconds=startup).to_wire()))
    return ["org/model", "--profile", str(path), "--host", "127.0.0.1", "--port", str(port)]
