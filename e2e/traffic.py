"""Traffic that goes on while something happens: a thread that asks until it is told to stop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import aiohttp

from e2e.client import Outcome, Target, send
from e2e.workload import Ask, text


class Traffic:
    """Requests one after the other on `streams` connections, prompt lengths in turn from `lengths` (tokens)."""

    def __init__(self, target: Target, lengths: Sequence[int], *, streams: int, output_tokens: int) -> None:
        self.outcomes: list[Outcome] = []
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(target, lengths, streams, output_tokens)), daemon=True
        )

    async def _run(self, target: Target, lengths: Sequence[int], streams: int, output_tokens: int) -> None:
        numbers = itertools.count()

        async def stream(session: aiohttp.ClientSession) -> None:
            while not self._ended.is_set():
                number = next(numbers)
                tokens = lengths[number % len(lengths)]
                ask = Ask(0.0, tokens, output_tokens, text(f"traffic {number}", tokens))
                outcome = await send(session, target, ask, timeout=60.0)
                with self._changed:
                    self.outcomes.append(outcome)
                    self._changed.notify_all()
                if outcome.error is not None:
                    await asyncio.sleep(0.1)  # a refusal is quick: do not turn it into a flood

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(stream(session) for _ in range(streams)))

    def mark(self) -> int:
        """A place in the outcomes; `since` gives those after it."""
        with self._changed:
            return len(self.outcomes)

    def since(self, mark: int) -> list[Outcome]:
        """Outcomes after a mark."""
        with self._changed:
            return self.outcomes[mark:]

    def wait_for(self, wanted: Callable[[Sequence[Outcome]], bool], mark: int, seconds: float) -> list[Outcome]:
        """The outcomes since a mark, once they are as wanted. Raises TimeoutError with the newest if they never are."""
        with self._changed:
            if not self._changed.wait_for(lambda: wanted(self.outcomes[mark:]), seconds):
                newest = [(each.decision, each.status, each.error) for each in self.outcomes[mark:]][-8:]
                raise TimeoutError(f"not as wanted within {seconds:.0f} s; the newest of {self.mark()}: {newest}")
            return self.outcomes[mark:]

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more, and wait for what is under way."""
        self._ended.set()
        self._thread.join(timeout=90)
        assert not self._thread.is_alive(), "requests never ended"


@contextmanager
def traffic(target: Target, lengths: Sequence[int], *, streams: int = 4, output_tokens: int = 24) -> Iterator[Traffic]:
    """Traffic for the time of the block. At its end every request that was sent has its outcome."""
    flowing = Traffic(target, lengths, streams=streams, output_tokens=output_tokens)
    flowing.start()
    try:
        yield flowing
    finally:
        flowing.stop()
