"""What fake workers cost: CPU per streamed token, memory, and twelve of them at the load of the paper.

    python -m e2e.bench.worker [--streams 20] [--seconds 30] [--time-scale 1] [--long-prompts 4]
                               [--fleet-seconds 60] [--fleet-time-scale 1]

First one prefill worker (H200x8) and one decode worker (H20x8), as processes on loopback: `--long-prompts` prompts of
128k tokens go through both legs, so that memory is read after the largest requests; then `--streams` streams decode for
`--seconds`. Then the twelve of `e2e.bench.fleet`, if `--fleet-seconds` is not 0. CPU is user and system time of the
workers. Ends with 1 where a limit is not kept: 60 MB each and (at 20 streams and time scale 1) 10 % of a core while
streaming; (at time scale 1) 0.8 core for the twelve; every answer right. The last line has the figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from e2e.bench import fleet
from e2e.bench.engines import MODEL, Engine, Process, Scales, engines
from prfaas.worker.oracle import BYTES_PER_TOKEN, expected_text

MAX_MEGABYTES, MAX_PERCENT = 60.0, 10.0
LONG_TOKENS = 128_000
KV_BYTE_SCALE = 0.004
FLEET_KV_BYTE_SCALE = 0.0008
"""The demo's: a line of 0.4 Gbit/s stands for 100, five times faster."""
PAIR = (Engine("prefill", "H200x8", "kv_producer"), Engine("decode", "H20x8", "kv_both"))


async def complete(session: aiohttp.ClientSession, worker: Process, body: dict[str, Any]) -> dict[str, Any]:
    """One answer that is not streamed."""
    async with session.post(f"{worker.url}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        response.raise_for_status()
        return answer


async def both_legs(session: aiohttp.ClientSession, east: Process, west: Process, prompt: str) -> None:
    """Prefill there, decode here, verify."""
    leg = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = (await complete(session, east, leg))["kv_transfer_params"]
    asked = {"prompt": prompt, "max_tokens": 16, "kv_transfer_params": params}
    answer = await complete(session, west, asked)
    assert answer["choices"][0]["text"] == expected_text(prompt, 16, model=MODEL)


@dataclass
class Stream:
    """One stream that is read until it is cancelled, and the tokens that came."""

    tokens: int = 0

    async def read(self, session: aiohttp.ClientSession, worker: Process) -> None:
        """Ask for the longest answer there is, and count."""
        body = {"prompt": "Go on.", "max_tokens": 131_000, "stream": True}
        async with session.post(f"{worker.url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.tokens += len(json.loads(line[6:])["choices"][0]["text"]) // BYTES_PER_TOKEN


async def settled(streams: list[Stream]) -> None:
    """Until every stream has its first token: prefills run one by one."""
    while not all(each.tokens for each in streams):  # noqa: ASYNC110 - a benchmark's own pace
        await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Pair:
    """What one worker of each kind cost."""

    streams: int
    time_scale: float
    wall: float
    tokens: int
    rows: dict[str, dict[str, float]]
    """By worker: MB at rest, after the long prompts, at most; CPU seconds while streaming."""

    @property
    def cpu_per_thousand(self) -> float:
        """CPU seconds of the decode worker per 1,000 streamed tokens."""
        return 1_000 * self.rows["decode"]["cpu"] / self.tokens

    @property
    def kept(self) -> bool:
        """Whether the limits were kept."""
        limited = (self.streams, self.time_scale) == (20, 1)
        return all(
            row["most"] <= MAX_MEGABYTES and (not limited or 100 * row["cpu"] / self.wall <= MAX_PERCENT)
            for row in self.rows.values()
        )

    def table(self) -> list[str]:
        """Lines for a person."""
        rate = self.tokens / self.streams / self.wall
        lines = [
            f"{self.tokens} tokens in {self.wall:.1f} s: {self.streams} streams of {rate:.1f} tokens/s; "
            f"{1_000 * self.cpu_per_thousand:.1f} ms of CPU per 1,000 streamed tokens",
            "",
            "| worker | MB at rest | after prompts of 128k | at most | % of a core while streaming |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, row in self.rows.items():
            memory = f"{row['rest']:.1f} | {row['after']:.1f} | {row['most']:.1f} (limit {MAX_MEGABYTES:g})"
            lines.append(f"| {name} | {memory} | {100 * row['cpu'] / self.wall:.1f} |")
        return lines

    def summary(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "streams": self.streams,
            "time_scale": self.time_scale,
            "tokens_per_second_each": round(self.tokens / self.streams / self.wall, 1),
            "cpu_seconds_per_1000_tokens": round(self.cpu_per_thousand, 4),
            "megabytes": {
                name: {when: round(row[when], 1) for when in ("rest", "after", "most")}
                for name, row in self.rows.items()
            },
        }


async def measure(folder: Path, streams: int, seconds: float, time_scale: float, long_prompts: int) -> Pair:
    """One worker of each kind."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3), timeout=timeout) as session,
        engines(folder, PAIR, Scales(time_scale, KV_BYTE_SCALE)) as workers,
    ):
        east, west = workers
        rest = [worker.megabytes() for worker in workers]
        prompts = [f"{number:04d}" + "word" * (LONG_TOKENS - 1) for number in range(long_prompts)]
        await asyncio.gather(*(both_legs(session, east, west, prompt) for prompt in prompts))
        after = [worker.megabytes() for worker in workers]
        open_streams = [Stream() for _ in range(streams)]
        reading = [asyncio.create_task(each.read(session, west)) for each in open_streams]
        await settled(open_streams)
        before, had, began = [w.cpu_seconds() for w in workers], sum(s.tokens for s in open_streams), time.monotonic()
        await asyncio.sleep(seconds)
        wall, came = time.monotonic() - began, sum(s.tokens for s in open_streams) - had
        spent = [worker.cpu_seconds() - was for worker, was in zip(workers, before, strict=True)]
        most = [worker.megabytes("VmHWM") for worker in workers]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    rows = {
        worker.name: {"rest": rest[i], "after": after[i], "most": most[i], "cpu": spent[i]}
        for i, worker in enumerate(workers)
    }
    return Pair(streams, time_scale, wall, came, rows)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--time-scale", type=float, default=1)
    parser.add_argument("--long-prompts", type=int, default=4)
    parser.add_argument("--fleet-seconds", type=float, default=60, help="of the twelve workers; 0: leave them out")
    parser.add_argument("--fleet-time-scale", type=float, nargs="+", default=[1.0], help="one run for each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pair = asyncio.run(measure(Path(folder), args.streams, args.seconds, args.time_scale, args.long_prompts))
    print("\n".join(pair.table()), flush=True)
    runs = []
    for scale in args.fleet_time_scale if args.fleet_seconds else ():
        with tempfile.TemporaryDirectory() as folder:
            run = asyncio.run(fleet.measure(Path(folder), args.fleet_seconds, Scales(scale, FLEET_KV_BYTE_SCALE)))
        print("\n" + "\n".join(run.table()), flush=True)
        runs.append(run)
    figures = {"pair": pair.summary(), "fleet": [run.summary() for run in runs]}
    print(f"\n{json.dumps(figures)}")
    return 0 if pair.kept and all(run.kept for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
