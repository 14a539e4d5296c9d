"""What the worker's tests share: workers on loopback, a clock that moves when told to, waiting without sleeping."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from prfaas.api.profile import Profile
from prfaas.api.profiles import shipped
from prfaas.worker.clock import Clock
from prfaas.worker.config import KVTransfer, Role, WorkerConfig
from prfaas.worker.oracle import Sampling, answer_words, expected_text, last_token, prompt_state
from prfaas.worker.serve import Worker

MODEL = "org/model"


def profile(**changes: Any) -> Profile:
    """Round figures: a prefill of 1 s + 1 ms per token, 10 steps/s, batches of up to 4, no startup."""
    document = shipped("H20x8").to_wire() | {
        "prefill": {"coefficients": {"a": 1.0, "b": 1.0, "c": 0.0}},
        "decode": {"steps": [{"batch": 1, "seconds": 0.1}], "maxBatch": 4},
        "kv": {"fixedBytes": 1_000, "bytesPerToken": 100},
        "startupSeconds": 0,
    }
    return Profile.model_validate(document | changes)


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    """Let everything else run until the condition holds; fails after five seconds."""
    try:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is awaited is on the far side of a socket
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"still not: {what}") from None


class ManualClock:
    """A Clock that stands still until `advance`."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._waiting: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        """See Clock."""
        return self._now

    async def wait(self, event: asyncio.Event, deadline: float | None) -> bool:
        """See Clock."""
        due = asyncio.Event()
        if deadline is not None:
            if deadline <= self._now:
                await asyncio.sleep(0)
                return event.is_set()
            self._waiting.append((deadline, due))
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(due.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            self._waiting = [entry for entry in self._waiting if entry[1] is not due]
        return event.is_set()

    def next_deadline(self) -> float | None:
        """The earliest moment that somebody waits for."""
        return min((deadline for deadline, _ in self._waiting), default=None)

    def advance(self, seconds: float) -> None:
        """Move the time; whoever waited for a moment up to then goes on."""
        self._now += seconds
        for deadline, due in self._waiting:
            if deadline <= self._now:
                due.set()


def config(role: Role | None = None, *, lease: float = 80_000, **changes: Any) -> WorkerConfig:
    """A worker on loopback with free ports, a thousand times faster than its profile."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "profile": profile(),
        "time_scale": 1_000,
        "host": "127.0.0.1",
        "port": 0,
        "kv_transfer": None
        if role is None
        else KVTransfer(role=role, host="127.0.0.1", port=0, lease_seconds=lease, **changes.pop("transfer", {})),
    }
    return WorkerConfig(**(fields | changes))


@dataclass
class Client:
    """HTTP to one worker."""

    worker: Worker
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.worker.port}"

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request that is not streamed."""
        async with self.session.post(f"{self.url}{path}", json=body, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            return response.status, answer

    async def complete(self, prompt: str, max_tokens: int = 8, **fields: Any) -> tuple[int, dict[str, Any]]:
        """One completion."""
        return await self.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **fields})

    async def prefill(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """The prefill leg: the `kv_transfer_params` of its answer."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        status, answer = await self.complete(prompt, 1, kv_transfer_params=params, **fields)
        assert status == 200, answer
        kv: dict[str, Any] = answer["kv_transfer_params"]
        return kv

    async def stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """The payloads of a stream's events, in order."""
        async with self.session.post(f"{self.url}{path}", json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = await response.text()
        events = text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON events of a stream, which must end with [DONE]."""
        said = await self.stream(path, body)
        assert said[-1] == "[DONE]"
        return [json.loads(event) for event in said[:-1]]

    async def metric(self, name: str, **labels: str) -> float:
        """The value of one series; AssertionError if it is not there."""
        async with self.session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"no {name} {labels}")


@asynccontextmanager
async def serving(*configs: WorkerConfig, clock: Clock | None = None) -> AsyncIterator[Sequence[Client]]:
    """Workers that serve; stopped at the end."""
    workers = [Worker(each, clock) for each in configs]
    async with aiohttp.ClientSession() as session:
        try:
            for worker in workers:
                await worker.start()
            yield [Client(worker, session) for worker in workers]
        finally:
            for worker in workers:
                await worker.shutdown()


PROMPT = "Tell me about the sea, and take your time. " * 40
OTHER = "Tell me about the sky, and take your time. " * 40
"""As long as PROMPT, with the same last token."""
PREFILL, DECODE = config("kv_producer"), config("kv_consumer")


def gone(tokens: int) -> dict[str, Any]:
    """NIXL's parameters of a prompt of so many tokens, whose prefill worker is not there any more."""
    return {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "gone",
        "remote_request_id": "gone",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "remote_num_tokens": tokens,
    }


def words_of(prompt: str, count: int, choice: int = 0) -> list[str]:
    """The first tokens of an answer."""
    raw = prompt.encode()
    every = answer_words(prompt_state(MODEL, raw), last_token(raw), choice)
    return [next(every) for _ in range(count)]


def chosen(prompt: str, tokens: int, choice: int) -> str:
    """The text of one of several answers."""
    return expected_text(prompt, tokens, model=MODEL, sampling=Sampling(choice=choice))


def failed(answer: tuple[int, dict[str, Any]]) -> bool:
    """Whether a request failed as one whose KV did not load."""
    status, body = answer
    return status == 500 and body == {
        "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    }
