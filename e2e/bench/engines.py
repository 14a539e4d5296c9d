"""Fake workers as processes, for the benches: what each has used of CPU and memory, by the kernel's books."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas.api.profiles import shipped

ROOT = Path(__file__).parents[2]
MODEL = "bench/model"
TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 60.0
GENERATED = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Engine:
    """What is started: a name for the table, a shipped profile, vLLM's KV role."""

    name: str
    profile: str
    role: str


@dataclass(frozen=True)
class Scales:
    """What stands for what: modelled seconds per second of the clock, and bytes on the wire per byte of KV."""

    time: float
    kv_bytes: float


@dataclass(frozen=True)
class Process:
    """A worker process and where it listens."""

    name: str
    running: asyncio.subprocess.Process
    port: int

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.running.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def megabytes(self, field: str = "VmRSS") -> float:
        """Resident memory now (VmRSS) or at most (VmHWM), MB of 10^6 bytes."""
        for line in Path(f"/proc/{self.running.pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024 / 1e6
        raise KeyError(field)

    async def tokens(self, session: aiohttp.ClientSession) -> float:
        """Tokens that it says it has generated."""
        async with session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        found = re.search(rf"^{GENERATED}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"{self.name} has no {GENERATED}"
        return float(found[1])


def quick_profile(folder: Path, name: str) -> Path:
    """A shipped profile without its startup time."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(shipped(name).to_wire() | {"startupSeconds": 0}))
    return path


@asynccontextmanager
async def engines(folder: Path, wanted: Sequence[Engine], scales: Scales) -> AsyncIterator[list[Process]]:
    """Workers that serve, each on ports that were free; ended at the end."""
    started: list[Process] = []
    try:
        for number, engine in enumerate(wanted):
            started.append(await _start(folder, number, engine, scales))
        yield started
    finally:
        for process in started:
            if process.running.returncode is None:
                process.running.terminate()
        for process in started:
            await process.running.wait()


async def _start(folder: Path, number: int, engine: Engine, scales: Scales) -> Process:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "operator"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "0",
    }
    log = folder / f"{number}.log"
    with log.open("wb") as output:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "prfaas.cli.main", "worker", "serve", MODEL),
            *("--profile", str(quick_profile(folder, engine.profile)), "--host", "127.0.0.1", "--port", "0"),
            *("--time-scale", str(scales.time), "--kv-byte-scale", str(scales.kv_bytes), "--max-model-len", "135168"),
            *("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": engine.role})),
            env=environment,
            stderr=output,
        )
    async with asyncio.timeout(START_SECONDS):
        while not (said := re.search(r"serving on port (\d+)", log.read_text())):
            if running.returncode is not None:
                raise RuntimeError(f"{engine.name} did not start:\n{log.read_text()}")
            await asyncio.sleep(0.05)
    return Process(engine.name, running, int(said[1]))
