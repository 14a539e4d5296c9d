"""Send the asks of a workload to a router, read the streams, verify every token, keep the times.

A request counts as verified only if its whole text equals what the model's oracle says for that prompt: on a
transferred request the decode worker knows the prompt from nothing but the KV bytes it pulled, so the text proves
the transfer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from e2e.workload import Ask
from prfaas.worker.oracle import expected_text


@dataclass(frozen=True)
class Target:
    """A router and the model behind it."""

    url: str
    model: str
    """Name that clients put in a request."""
    loaded: str
    """Name that the engines loaded: answers are a function of it."""


@dataclass(frozen=True)
class Outcome:
    """What one request came to. Times are seconds on the client's monotonic clock."""

    ask: Ask
    status: int
    decision: str
    """The router's `x-prfaas-decision` header; empty when there was none."""
    ttft: float | None
    duration: float
    error: str | None
    verified: bool

    @property
    def remote(self) -> bool:
        """Whether the prompt was prefilled in the other datacenter."""
        return self.decision.startswith("remote")


async def send(session: aiohttp.ClientSession, target: Target, ask: Ask, *, timeout: float = 120.0) -> Outcome:
    """One streamed completion; never raises for what the server or the network does."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    status, decision, ttft, pieces, error, done = 0, "", None, [], None, False
    body = {
        "model": target.model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "stream": True,
    }
    try:
        async with session.post(
            f"{target.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=timeout)
        ) as response:
            status, decision = response.status, response.headers.get("x-prfaas-decision", "")
            if status != 200:
                error = f"HTTP {status}: {(await response.text())[:300]}"
            else:
                async for raw in response.content:
                    line = raw.strip()
                    if not line.startswith(b"data:"):
                        continue
                    if line == b"data: [DONE]":
                        done = True
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        error = f"error event: {event['error']}"
                        break
                    piece = event["choices"][0]["text"] if event.get("choices") else ""
                    if piece and ttft is None:
                        ttft = loop.time() - start
                    pieces.append(piece)
                if error is None and not done:
                    error = "the stream ended without [DONE]"
    except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    duration = loop.time() - start
    answer = "".join(pieces)
    expected = expected_text(ask.prompt, ask.output_tokens, model=target.loaded) if error is None else ""
    verified = error is None and answer == expected
    if error is None and not verified:
        error = f"wrong text: {answer[:60]!r} instead of {expected[:60]!r}"
    return Outcome(ask, status, decision, ttft, duration, error, verified)


async def replay(
    target: Target,
    asks: Sequence[Ask],
    *,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
    timeout: float = 120.0,
) -> list[Outcome]:
    """Send every ask at its own time, whatever the others do; outcomes in the order of `asks`."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        start = asyncio.get_running_loop().time()

        async def one(ask: Ask) -> Outcome:
            await asyncio.sleep(max(0.0, start + ask.at - asyncio.get_running_loop().time()))
            outcome = await send(session, target, ask, timeout=timeout)
            on_done(outcome)
            return outcome

        return list(await asyncio.gather(*(one(ask) for ask in asks)))
