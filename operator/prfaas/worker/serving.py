"""From a checked request to answers: submits to the engine, waits, counts; streams or answers at once.

A request is one or more generations: one per prompt and answer asked for. The common one, a single stream of text, has
a way of its own that does nothing more than it must.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from aiohttp import web

from prfaas.worker.answers import DONE, Chunks, Head, Outcome, error_event, usage, whole_answer
from prfaas.worker.config import WorkerConfig
from prfaas.worker.engine import AdmissionError, Engine
from prfaas.worker.errors import ApiError, bad_request, internal_error, overloaded, paused
from prfaas.worker.fields import Limits, parse_object
from prfaas.worker.generation import Ask, Generation, Parent, internal_id
from prfaas.worker.hashing import Lora
from prfaas.worker.openai import Asked
from prfaas.worker.oracle import answer_words

KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True)
class Run:
    """A request under way."""

    asked: Asked
    head: Head
    generations: tuple[Generation, ...]
    prompts: tuple[bytes, ...]
    """One per generation; empty unless the answer shows the prompt."""


class Adapters:
    """The LoRA adapters by name; numbered in the order of loading."""

    def __init__(self, config: WorkerConfig) -> None:
        self._known: dict[str, Lora] = {}
        self._count = 0
        for adapter in config.front.adapters:
            self.load(adapter.name, adapter.path)

    def load(self, name: str, path: str) -> Lora:
        """Load, or load again under the same number."""
        old = self._known.get(name)
        if old is None:
            self._count += 1
        self._known[name] = loaded = Lora(name, path, old.number if old else self._count)
        return loaded

    def unload(self, name: str) -> bool:
        """Whether there was one."""
        return self._known.pop(name, None) is not None

    def get(self, name: str | None) -> Lora | None:
        """The adapter of that name."""
        return self._known.get(name) if name else None

    def __iter__(self) -> Iterator[Lora]:
        return iter(self._known.values())


class Serving:
    """What the routes that generate share."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.config = engine, engine.config
        self.adapters = Adapters(engine.config)
        self.load = 0
        self.idle = asyncio.Event()
        """Set while nothing is under way."""
        self.idle.set()
        self.held: asyncio.Event | None = None
        """Set where the engine is paused and keeps what comes: `pause?mode=keep`."""
        self.paused = False
        self.scaling = False
        """While `/scale_elastic_ep` is at it, everything but health is refused."""
        self._running: dict[str, tuple[Generation, ...]] = {}

    def limits(self) -> Limits:
        """What requests may ask for now."""
        names = frozenset(lora.name for lora in self.adapters)
        return Limits(self.config.names, names, self.config.max_model_len, self.config.front)

    async def begin(self, http: web.Request, asked: Asked, answer_id: str, *, indexed: bool) -> Run:
        """Submit every generation; ApiError where a limit refuses one. The long prompts are not kept.

        `indexed`: the engine's id of a prompt has the prompt's number, as a completion's has.
        """
        if self.held is not None:
            await self.held.wait()
        if self.paused:
            self.engine.release_refused(asked.kv_params)
            raise paused()
        session = asked.session_id or http.headers.get("X-Session-ID")
        asked = replace(asked, priority=self._priority(http, asked.priority), session_id=session)
        generations: list[Generation] = []
        try:
            for number, prompt in enumerate(asked.prompts):
                base = f"{answer_id}-{number}" if indexed else answer_id
                self.engine.check_admission(asked.n)
                parent = Parent(asked.n, asked.n)
                for choice in range(asked.n):
                    external = base if asked.n == 1 else f"{choice}_{base}"
                    ask = self._ask(asked, external, number, prompt, choice, parent)
                    generations.append(self.engine.submit(ask, admitted=True))
        except AdmissionError as error:
            for generation in generations:
                self.engine.abort(generation)
            self.engine.release_refused(asked.kv_params)
            raise overloaded(str(error)) from error
        shows_prompt = asked.echo or asked.return_ids or asked.prompt_logprobs is not None
        prompts = tuple(prompt if shows_prompt else b"" for prompt in asked.prompts for _ in range(asked.n))
        head = Head(answer_id, int(time.time()), asked.model, self.config.front.fingerprint)
        run = Run(asked.without_prompt(), head, tuple(generations), prompts)
        self._running[answer_id] = run.generations
        self.load += 1
        self.idle.clear()
        return run

    def end(self, run: Run) -> None:
        """The answer is out, or its client has left: nothing of the request may stay."""
        for generation in run.generations:
            self.engine.abort(generation)
        self._running.pop(run.head.answer_id, None)
        self.load -= 1
        if not self.load:
            self.idle.set()

    def abort(self, ids: Sequence[str] | None = None) -> int:
        """End requests by the ids that clients see, or by their own; None: all. How many there were."""
        wanted = [known for known in self._running if ids is None or any(_same(known, given) for given in ids)]
        for known in wanted:
            for generation in self._running[known]:
                self.engine.abort(generation)
        return len(wanted)

    def refused(self, raw: bytes) -> None:
        """A request that was refused: the prefill worker must not keep its KV until the lease ends."""
        try:
            params = parse_object(raw).get("kv_transfer_params")
        except ApiError:
            return
        if isinstance(params, dict):
            self.engine.release_refused(params)

    async def outcomes(self, run: Run) -> list[Outcome]:
        """Wait for all; ApiError if one failed."""
        return [await self._outcome(run, index) for index in range(len(run.generations))]

    async def whole(self, run: Run) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        outcomes = await self.outcomes(run)
        first = run.generations[0]
        counted = self.usage(run, details=True)
        return whole_answer(run.asked, run.head, outcomes, counted, first.kv_params, self.metrics(run))

    async def events(self, run: Run) -> AsyncIterator[bytes]:
        """The stream's bytes, in pieces that belong together; the error event and `[DONE]` included."""
        asked = run.asked
        continuous = asked.continuous_usage or self.config.force_include_usage
        last_usage = asked.include_usage or self.config.force_include_usage
        plain = asked.plain
        chunks = [Chunks(asked, run.head, index, prompt) for index, prompt in enumerate(run.prompts)]
        begun = [False] * len(chunks)
        words = [answer_words(b"", b"") for _ in chunks]
        open_choices = len(chunks)
        async for index, fresh, reason in self.merged(run):
            generation, chunk = run.generations[index], chunks[index]
            if reason == "error":
                yield error_event(internal_error()) + DONE
                return
            events = []
            counted = self._counted(run, index) if continuous else None
            if not begun[index]:
                begun[index] = True
                words[index] = self.words(generation)
                if asked.chat:
                    events.append(chunk.role())
                elif asked.echo:
                    events.append(chunk.echo(counted))
            said = () if plain else tuple(islice(words[index], len(fresh)))
            text = "" if asked.max_tokens == 0 else "".join(fresh)
            if reason is None:
                events.append(chunk.token(text, said, counted))
            else:
                open_choices -= 1
                events.append(
                    chunk.last(
                        *(text, said, reason, generation.stop_reason, generation.kv_params, counted),
                        stamped=not last_usage,
                    )
                )
                if not open_choices:
                    if last_usage:
                        events.append(chunk.usage(self.usage(run, details=True), self.metrics(run)))
                    events.append(DONE)
            yield b"".join(events)

    async def stream(self, http: web.Request, run: Run, headers: dict[str, str]) -> web.StreamResponse:
        """Answer with the events, and with comments where nothing happens for long."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"} | headers)
        await response.prepare(http)
        async for part in with_keep_alive(self.events(run), self.config.front.sse_keep_alive):
            await response.write(part)
        await response.write_eof()
        return response

    def usage(self, run: Run, *, details: bool) -> dict[str, Any]:
        """Over all choices; the prompt counts once per prompt."""
        asked = run.asked
        cached, created = None, None
        if details and self.config.prompt_tokens_details:
            cached = self.cached_tokens(run)
            created = self.created_cache_tokens(run) if asked.chat else None
        generated = sum(each.sequence.generated for each in run.generations)
        return usage(sum(asked.prompt_tokens), generated, cached, created)

    def cached_tokens(self, run: Run) -> int:
        """Prompt tokens that were not computed for this request, here or, where the prefill worker told, there."""
        told = run.asked.reported_cached
        return run.generations[-1].cached_tokens if told is None else told

    def created_cache_tokens(self, run: Run) -> int:
        """Prompt tokens that this request added to the prefix cache: whole blocks that were not in it."""
        last = run.generations[-1]
        whole = last.sequence.prompt_tokens // self.config.block_size * self.config.block_size
        return max(0, whole - last.cached_tokens) if self.config.prefix_caching else 0

    def metrics(self, run: Run) -> dict[str, Any] | None:
        """`--enable-per-request-metrics`, where they are one generation's."""
        if not self.config.front.per_request_metrics or len(run.generations) != 1:
            return None
        generation = run.generations[0]
        sequence, first, last = generation.sequence, generation.first_token, generation.last_token
        if first is None or last is None:
            return None
        started = sequence.started if sequence.started is not None else first
        seconds = last - started
        return {
            "time_to_first_token_ms": (first - sequence.arrived) * 1000,
            "generation_time_ms": (last - first) * 1000,
            "queue_time_ms": (started - sequence.arrived) * 1000,
            "mean_itl_ms": (last - first) * 1000 / (sequence.generated - 1) if sequence.generated > 1 else None,
            "tokens_per_second": sequence.generated / seconds if seconds > 0 else None,
            "speculative_decoding": None,
        }

    def _ask(self, asked: Asked, external: str, number: int, prompt: bytes, choice: int, parent: Parent) -> Ask:
        return Ask(
            request_id=internal_id(external) if self.config.front.random_request_ids else external,
            prompt=prompt,
            prompt_tokens=asked.prompt_tokens[number],
            max_tokens=1 if asked.max_tokens == 0 else asked.max_tokens,
            sampling=replace(asked.sampling, choice=choice),
            kv_params=asked.kv_params,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            lora=self.adapters.get(asked.adapter),
            reads_cache=asked.prompt_logprobs is None,
            reports_found=asked.reports_found,
            session_id=asked.session_id,
            parent=parent,
        )

    def _priority(self, http: web.Request, asked: int) -> int:
        try:
            priority = int(http.headers.get("X-Vllm-Priority", asked))
        except ValueError:
            return asked
        if priority and not self.config.front.priorities:
            raise bad_request(f"Got priority {priority} but Priority scheduling is not enabled.", "priority")
        return priority

    async def _outcome(self, run: Run, index: int) -> Outcome:
        generation = run.generations[index]
        texts: list[str] = []
        reason: str | None = None
        while reason is None:
            fresh, reason = await generation.next()
            texts.extend(fresh)
        if reason == "error":
            raise internal_error()
        words = () if run.asked.plain else tuple(islice(self.words(generation), len(texts)))
        return Outcome("".join(texts), words, reason, generation.stop_reason, run.prompts[index])

    def words(self, generation: Generation) -> Iterator[str]:
        """The whole text of every token of an answer whose state is known."""
        return answer_words(generation.state, generation.last, generation.sampling.choice)

    def _counted(self, run: Run, index: int) -> dict[str, Any]:
        tokens = run.asked.prompt_tokens[index // run.asked.n]
        return usage(tokens, run.generations[index].sequence.generated)

    async def merged(self, run: Run) -> AsyncIterator[tuple[int, list[str], str | None]]:
        """What every generation says, as it says it."""
        if len(run.generations) == 1:
            generation, reason = run.generations[0], None
            while reason is None:
                fresh, reason = await generation.next()
                yield 0, fresh, reason
            return
        waiting = {asyncio.ensure_future(each.next()): index for index, each in enumerate(run.generations)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index = waiting.pop(task)
                    fresh, reason = task.result()
                    if reason is None:
                        waiting[asyncio.ensure_future(run.generations[index].next())] = index
                    yield index, fresh, reason
        finally:
            for task in waiting:
                task.cancel()


def answer_base(http: web.Request, given: str | None) -> str:
    """The base of an answer's id: the header, then the body's `request_id`, then random."""
    return http.headers.get("X-Request-Id") or given or uuid.uuid4().hex


async def with_keep_alive(parts: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """The same, with a comment for every so many seconds of silence; 0: none."""
    if not seconds:
        async for part in parts:
            yield part
        return
    following = asyncio.ensure_future(anext(parts, None))
    try:
        while True:
            await asyncio.wait((following,), timeout=seconds)
            if not following.done():
                yield KEEP_ALIVE
                continue
            following_part = following.result()
            if following_part is None:
                return
            yield following_part
            following = asyncio.ensure_future(anext(parts, None))
    finally:
        following.cancel()


def _same(known: str, given: str) -> bool:
    return given in (known, known.partition("-")[2])
