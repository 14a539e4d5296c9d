"""What twelve workers cost together at the load of the paper's case study (arXiv:2604.15039, section 4).

Four prefill workers of 8 H200, three of 8 H20 and five decode workers of 8 H20, as processes on loopback. Requests
arrive as a Poisson process at the paper's rate, with its lengths and 1,024 tokens of output each; prompts above 19,400
tokens are prefilled on H200. Both legs of every request are made here, as a router would, and every answer is verified.
CPU is user and system time of the twelve processes alone, over a window that begins when as many answers end as begin;
this driver, which shares the machine with them, is not counted.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from e2e.bench.engines import MODEL, Engine, Process, Scales, engines
from e2e.bench.router import busy
from e2e.workload import Ask, from_paper
from prfaas.worker.oracle import expected_text

FLEET = (
    *[Engine("prefill H200", "H200x8", "kv_producer")] * 4,
    *[Engine("prefill H20", "H20x8", "kv_producer")] * 3,
    *[Engine("decode H20", "H20x8", "kv_consumer")] * 5,
)
REQUESTS_PER_SECOND = 3.24
"""The paper's highest rate, table 6; modelled."""
THRESHOLD_TOKENS = 19_400
OUTPUT_TOKENS = 1_024
SETTLING_SECONDS = 40.0
"""Modelled: from the start of a run until as many answers end as begin (prefill, and 1,024 tokens of 25 ms)."""
MAX_CORES = 0.8


class AnswerError(Exception):
    """A request did not end as it should; the message says how."""


@dataclass(frozen=True)
class Outcome:
    """One request: seconds of the clock to its first token, and what is wrong with it ("": nothing)."""

    first_token: float
    wrong: str = ""


@dataclass(frozen=True)
class Measured:
    """The window: seconds of the clock, then by kind of worker CPU seconds, tokens, and MB now, of each."""

    scales: Scales
    wall: float
    requests: int
    cpu: dict[str, list[float]]
    tokens: dict[str, float]
    megabytes: dict[str, list[float]]
    others: float
    """Cores that neither the workers nor this driver used."""
    outcomes: list[Outcome]

    @property
    def cores(self) -> float:
        """What all workers used together."""
        return sum(map(sum, self.cpu.values())) / self.wall

    @property
    def wrong(self) -> Counter[str]:
        """Requests that failed, or whose answer is not what the model says, by what happened."""
        return Counter(outcome.wrong for outcome in self.outcomes if outcome.wrong)

    @property
    def kept(self) -> bool:
        """Whether every answer was right and, at the paper's own pace, the limit was kept."""
        return not self.wrong and (self.scales.time != 1 or self.cores <= MAX_CORES)

    def table(self) -> list[str]:
        """Lines for a person."""
        first = sorted(outcome.first_token * self.scales.time for outcome in self.outcomes)
        lines = [
            f"12 workers, time 1:{self.scales.time:g}, KV bytes 1:{1 / self.scales.kv_bytes:,.0f}: "
            f"{self.requests / self.wall:.2f} requests/s over {self.wall:.0f} s, {len(self.outcomes)} answers, "
            f"{self.wrong.total()} wrong; first token after {first[len(first) // 2]:.1f} s (p50, modelled)",
            *(f"{number} times: {what}" for what, number in self.wrong.most_common()),
            "",
            "| workers | cores together | tokens/s together | MB each, under load |",
            "| --- | --- | --- | --- |",
        ]
        for name, spent in self.cpu.items():
            low, high = min(self.megabytes[name]), max(self.megabytes[name])
            memory = f"{low:.1f} to {high:.1f}"
            rate = f"{self.tokens[name] / self.wall:,.0f}"
            lines.append(f"| {len(spent)} {name} | {sum(spent) / self.wall:.3f} | {rate} | {memory} |")
        lines.append(f"| all | {self.cores:.3f} | {self._rate():,.0f} | |")
        limit = f"; limit {MAX_CORES:g}" if self.scales.time == 1 else ""
        lines += ["", f"all: {self.cores:.2f} core{limit}; cores that others used: {self.others:.2f}"]
        return lines

    def summary(self) -> dict[str, Any]:
        """The figures as JSON."""
        first = sorted(outcome.first_token for outcome in self.outcomes)
        return {
            "time_scale": self.scales.time,
            "kv_byte_scale": self.scales.kv_bytes,
            "window_seconds": round(self.wall, 1),
            "cores": round(self.cores, 3),
            "cores_by_kind": {name: round(sum(spent) / self.wall, 3) for name, spent in self.cpu.items()},
            "tokens_per_second": round(self._rate(), 1),
            "requests_per_second": round(self.requests / self.wall, 2),
            "megabytes": {name: round(max(each), 1) for name, each in self.megabytes.items()},
            "answers": len(self.outcomes),
            "wrong": dict(self.wrong),
            "ttft_p50_modelled_seconds": round(statistics.median(first) * self.scales.time, 2),
            "others_cores": round(self.others, 2),
        }

    def _rate(self) -> float:
        return sum(self.tokens.values()) / self.wall


@dataclass
class Driver:
    """A router's two legs without a router: the least busy of each pool."""

    session: aiohttp.ClientSession
    workers: Sequence[Process]
    busy: Counter[Process] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)

    async def request(self, ask: Ask) -> None:
        """Both legs of one request, its answer verified."""
        began = time.monotonic()
        leg = {"prompt": ask.prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        asked = {"prompt": ask.prompt, "max_tokens": ask.output_tokens, "stream": True}
        first = 0.0
        try:
            async with self._at("prefill H200" if ask.prompt_tokens > THRESHOLD_TOKENS else "prefill H20", leg) as one:
                params = (await one.json())["kv_transfer_params"]
            parts = []
            async with self._at("decode H20", asked | {"kv_transfer_params": params}) as two:
                async for part in two.content.iter_any():
                    first = first or time.monotonic() - began
                    parts.append(part)
            right = streamed_text(b"".join(parts)) == expected_text(ask.prompt, ask.output_tokens, model=MODEL)
            self.outcomes.append(Outcome(first, "" if right else "another text"))
        except (AnswerError, aiohttp.ClientError) as error:
            self.outcomes.append(Outcome(first, f"{type(error).__name__}: {error}"))

    @asynccontextmanager
    async def _at(self, pool: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        worker = min((each for each in self.workers if each.name == pool), key=lambda each: self.busy[each])
        self.busy[worker] += 1
        try:
            async with self.session.post(f"{worker.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise AnswerError(f"{pool}: {response.status} {(await response.text())[:200]}")
                yield response
        finally:
            self.busy[worker] -= 1


def streamed_text(body: bytes) -> str:
    """The text of a streamed completion. Raises AnswerError where the stream holds an error, or was cut."""
    events = body.split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        raise AnswerError("the stream was cut")
    parsed = [json.loads(line.removeprefix(b"data: ")) for line in events[:-2]]
    if errors := [event["error"] for event in parsed if "error" in event]:
        raise AnswerError(f"in the stream: {errors[0]}")
    return "".join(event["choices"][0]["text"] for event in parsed)


async def measure(folder: Path, seconds: float, scales: Scales, rate: float = REQUESTS_PER_SECOND) -> Measured:
    """Run the load; the window is `seconds` of the clock long."""
    settling = SETTLING_SECONDS / scales.time
    count = round((settling + seconds) * rate * scales.time * 1.3)
    asks = from_paper(count, rate=rate * scales.time, output_tokens=OUTPUT_TOKENS)
    timeout = aiohttp.ClientTimeout(total=None)
    # vLLM closes a connection that is idle for five seconds: what is kept for less is never closed while it is used.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        engines(folder, FLEET, scales) as workers,
    ):
        driver = Driver(session, workers)
        arriving = asyncio.create_task(_arrive(driver, asks))
        await asyncio.sleep(settling)
        before_tokens = [await worker.tokens(session) for worker in workers]
        before, machine, own, began = [w.cpu_seconds() for w in workers], busy(), time.process_time(), time.monotonic()
        answered = len(driver.outcomes)
        await asyncio.sleep(seconds)
        wall = time.monotonic() - began
        spent = [worker.cpu_seconds() - was for worker, was in zip(workers, before, strict=True)]
        others = (busy() - machine - sum(spent) - (time.process_time() - own)) / wall
        requests = len(driver.outcomes) - answered
        made = [await worker.tokens(session) - was for worker, was in zip(workers, before_tokens, strict=True)]
        memory = [worker.megabytes() for worker in workers]
        if arriving.done():
            await arriving  # it failed: say why
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
    by_kind: dict[str, list[int]] = {}
    for index, worker in enumerate(workers):
        by_kind.setdefault(worker.name, []).append(index)
    return Measured(
        scales,
        wall,
        requests,
        {name: [spent[index] for index in indices] for name, indices in by_kind.items()},
        {name: sum(made[index] for index in indices) for name, indices in by_kind.items()},
        {name: [memory[index] for index in indices] for name, indices in by_kind.items()},
        max(0.0, others),
        driver.outcomes,
    )


async def _arrive(driver: Driver, asks: Sequence[Ask]) -> None:
    """Every request at its time."""
    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for ask in asks:
            await asyncio.sleep(start + ask.at - time.monotonic())
            group.create_task(driver.request(ask))
