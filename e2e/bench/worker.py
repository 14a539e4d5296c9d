"""What one fake worker costs: memory, and CPU at 20 streams of 40 tokens/s.

    python -m e2e.bench.worker [--streams 20] [--seconds 30] [--time-scale 1] [--long-prompts 4]

Starts a prefill worker (H200x8) and a decode worker (H20x8) as processes on loopback. First `--long-prompts` prompts of
128k tokens go through both legs, so that memory is read after the largest requests; then `--streams` streams decode for
`--seconds`. CPU is user and system time of each process over the streaming time, in percent of one core. Ends with 1
where the limits of 60 MB and (at 20 streams and time scale 1) 10 % are not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.api.profiles import shipped
from prfaas.worker.oracle import BYTES_PER_TOKEN, expected_text

ROOT = Path(__file__).parents[2]
MODEL = "bench/model"
MAX_MEGABYTES, MAX_PERCENT = 60.0, 10.0
LONG_TOKENS = 128_000
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A worker process and where it listens."""

    name: str
    running: asyncio.subprocess.Process
    port: int

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


def quick_profile(folder: Path, name: str) -> Path:
    """A shipped profile without its startup time."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(shipped(name).to_wire() | {"startupSeconds": 0}))
    return path


async def start(name: str, profile: Path, role: str, port: int, time_scale: float) -> Process:
    """One worker, once its model is loaded."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "operator"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1_000),
    }
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "prfaas.cli.main", "worker", "serve", MODEL, "--profile", str(profile)),
        *("--time-scale", str(time_scale), "--kv-byte-scale", "0.004", "--host", "127.0.0.1", "--port", str(port)),
        *("--kv-transfer-config", transfer),
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    assert running.stderr is not None
    while b"serving on port" not in (line := await running.stderr.readline()):
        if not line:
            raise RuntimeError(f"{name} did not start")
    return Process(name, running, port)


async def complete(session: aiohttp.ClientSession, port: int, body: dict[str, Any]) -> dict[str, Any]:
    """One answer that is not streamed."""
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        response.raise_for_status()
        return answer


async def both_legs(session: aiohttp.ClientSession, east: Process, west: Process, prompt: str) -> None:
    """Prefill there, decode here, verify."""
    leg = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = (await complete(session, east.port, leg))["kv_transfer_params"]
    asked = {"prompt": prompt, "max_tokens": 16, "kv_transfer_params": params}
    answer = await complete(session, west.port, asked)
    assert answer["choices"][0]["text"] == expected_text(prompt, 16, model=MODEL)


@dataclass
class Stream:
    """One stream that is read until it is cancelled, and the tokens that came."""

    tokens: int = 0

    async def read(self, session: aiohttp.ClientSession, port: int) -> None:
        """Ask for the longest answer there is, and count."""
        body = {"prompt": "Go on.", "max_tokens": 131_000, "stream": True}
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.tokens += len(json.loads(line[6:])["choices"][0]["text"]) // BYTES_PER_TOKEN


async def settled(streams: list[Stream]) -> None:
    """Until every stream has its first token: prefills run one by one."""
    while not all(each.tokens for each in streams):  # noqa: ASYNC110 - a benchmark's own pace
        await asyncio.sleep(0.05)


async def measure(folder: Path, streams: int, seconds: float, time_scale: float, long_prompts: int) -> bool:
    """Run, print, and say whether the limits were kept."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        east = await start("prefill", quick_profile(folder, "H200x8"), "kv_producer", 21_000, time_scale)
        west = await start("decode", quick_profile(folder, "H20x8"), "kv_both", 21_001, time_scale)
        workers = (east, west)
        try:
            idle = [worker.megabytes() for worker in workers]
            prompts = [f"{number:04d}" + "word" * (LONG_TOKENS - 1) for number in range(long_prompts)]
            await asyncio.gather(*(both_legs(session, east, west, prompt) for prompt in prompts))
            open_streams = [Stream() for _ in range(streams)]
            reading = [asyncio.create_task(each.read(session, west.port)) for each in open_streams]
            await settled(open_streams)
            cpu, begun, began = (
                [w.cpu_seconds() for w in workers],
                sum(s.tokens for s in open_streams),
                time.monotonic(),
            )
            await asyncio.sleep(seconds)
            wall, came = time.monotonic() - began, sum(s.tokens for s in open_streams) - begun
            percent = [100 * (worker.cpu_seconds() - at) / wall for worker, at in zip(workers, cpu, strict=True)]
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            print(f"{came} tokens in {wall:.1f} s: {streams} streams of {came / streams / wall:.1f} tokens/s")
            kept = True
            for worker, rest, used in zip(workers, idle, percent, strict=True):
                most = worker.megabytes("VmHWM")
                memory = f"{rest:5.1f} MB at rest, {worker.megabytes():5.1f} after, {most:5.1f} at most"
                print(f"{worker.name:8} {memory}; {used:4.1f} % of a core while streaming")
                kept = kept and most <= MAX_MEGABYTES and (used <= MAX_PERCENT or (streams, time_scale) != (20, 1))
            return kept
        finally:
            for worker in workers:
                worker.running.terminate()
                await worker.running.wait()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--time-scale", type=float, default=1)
    parser.add_argument("--long-prompts", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = asyncio.run(measure(Path(folder), args.streams, args.seconds, args.time_scale, args.long_prompts))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
