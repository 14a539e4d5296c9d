"""The engine: drives the scheduler by the clock, moves KV, hands tokens to whoever serves them.

One loop sleeps until the next thing the scheduler or a lease has to do; a transfer is a task of its own (kv.transfers)
and reports back when its bytes are here. Everything else is synchronous, in the loop's turn or in a call of a request's
handler.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from typing import Any

from prfaas.worker.accounts import Accounts, adapters
from prfaas.worker.blocks import BlockPool
from prfaas.worker.clock import Clock
from prfaas.worker.config import WorkerConfig
from prfaas.worker.events import Publisher
from prfaas.worker.faults import FaultBox
from prfaas.worker.generation import LONGEST_NATURAL, Ask, Generation
from prfaas.worker.hashing import Chain, Hasher, whole_tokens
from prfaas.worker.kv.connector import Services
from prfaas.worker.kv.params import FatalParamsError, ParamsError
from prfaas.worker.kv.transfers import connector
from prfaas.worker.metrics import Metrics
from prfaas.worker.oracle import adapted, last_token, prompt_state
from prfaas.worker.prefix import PrefixCache
from prfaas.worker.residency import Residency
from prfaas.worker.scheduler import Advanced, Scheduler
from prfaas.worker.sequence import Sequence

log = logging.getLogger(__name__)


class AdmissionError(Exception):
    """The queue limits refuse a request; `reason` is vLLM's label for which."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Engine:
    """One model replica. Create, `start`, `submit` and read; `drain`, `stop`."""

    def __init__(self, config: WorkerConfig, clock: Clock) -> None:
        self.config, self.clock = config, clock
        self.metrics = Metrics(config.names[0], config.max_model_len, config.metric_conditions, config.exposed)
        self._accounts = Accounts(config, self.metrics)
        self.pool = BlockPool(config.total_blocks, config.block_size)
        events = config.kv_events
        self.events = Publisher(events, config.event_host) if events is not None and events.on else None
        self._hasher = Hasher(
            config.hash_algorithm,
            config.block_size,
            python_hash_seed=config.python_hash_seed,
            random_seed=secrets.token_bytes(32),
        )
        self.cache = PrefixCache(
            self.pool,
            hybrid=config.attention == "hybrid",
            retention=config.retention_interval,
            journal=self.events.note if self.events is not None else None,
            whole_hashes=events is not None and not events.int_hashes,
        )
        self.scheduler = Scheduler(
            config.profile,
            self.cache,
            config.batch_limit,
            config.time_scale,
            chunk_tokens=config.max_num_batched_tokens if config.chunked_prefill else None,
            by_priority=config.scheduling_policy == "priority",
        )
        self.faults = FaultBox(config.faults)
        self.transfers = connector(Services(config, clock, self.pool, self.metrics, self.faults, self))
        self._generations: dict[Sequence, Generation] = {}
        self._prefill_tokens = 0
        self._draining = False
        self.dead = asyncio.Event()
        """Set when vLLM's engine process would have died: requests fail, and a watchdog ends the server."""
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        scheduler = self.scheduler
        self.metrics.watch(
            running=lambda: scheduler.running,
            queued=lambda: len(scheduler.queue),
            deferred=lambda: scheduler.deferred,
            stages=scheduler.fetch_stages,
            usage=lambda: self.pool.used / self.pool.total,
        )
        self.metrics.cache_config(config.cache_info)
        under_way = self._generations.values()
        self.metrics.adapters(lambda: adapters(under_way, running=False), lambda: adapters(under_way, running=True))
        if "residency" in config.exposed.conditions:
            metrics = self.metrics
            self.pool.watcher = Residency(
                clock.now,
                random.Random(),
                config.exposed.residency_sample,
                (metrics.block_lifetime.observe, metrics.block_idle.observe, metrics.block_gap.observe),
            )

    async def start(self) -> None:
        """Load the model (the profile's startup time), then listen for KV and begin."""
        await self.clock.wait(
            asyncio.Event(), self.clock.now() + self.config.profile.startup_seconds / self.config.time_scale
        )
        await self.transfers.start()
        if self.events is not None:
            self.events.start()
        self._loop = asyncio.create_task(self._run())

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; requests and leases may end for so many real seconds, then requests are aborted."""
        self._draining = True
        self._note_idle()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for generation in list(self._generations.values()):
                self.abort(generation)

    async def stop(self) -> None:
        """End everything; no request may be under way any more."""
        if self._loop is not None:
            self._loop.cancel()
        await self.transfers.stop()
        if self.events is not None:
            await self.events.stop()

    @property
    def unfinished(self) -> int:
        """Requests under way."""
        return len(self._generations)

    def submit(self, ask: Ask, *, admitted: bool = False) -> Generation:
        """Begin an answer; AdmissionError at a queue limit. A KV problem ends the answer with reason `error`.

        `admitted`: `check_admission` let this one in, with others of the same request.
        """
        if not admitted:
            self.check_admission()
        now = self.clock.now()
        room = self.config.max_model_len - ask.prompt_tokens
        natural = max(LONGEST_NATURAL, ask.sampling.min_tokens)
        limit = min(natural, room) if ask.max_tokens is None else ask.max_tokens
        sequence = Sequence(ask.request_id, ask.prompt_tokens, limit, now, priority=ask.priority)
        sequence.reads_cache, sequence.reports_found = ask.reads_cache, ask.reports_found
        generation = Generation(sequence, ask.max_tokens, ask.sampling, last_token(ask.prompt))
        sequence.next_words = generation.next_words
        generation.parent, generation.lora = ask.parent, ask.lora
        if self.dead.is_set():
            self._end(generation, "error", now)
            return generation
        if self._draining:
            self.release_refused(ask.kv_params)
            self._end(generation, "abort", now)
            return generation
        try:
            self.transfers.choose(generation, ask.kv_params)
        except FatalParamsError as error:
            self.die(f"request {ask.request_id}: {error}")
            self._end(generation, "error", now)
            return generation
        except ParamsError as error:
            log.error("request %s: %s", ask.request_id, error)
            self.metrics.failed_transfers.inc()
            self._end(generation, "error", now)
            return generation
        if self.config.prefix_caching:
            sequence.chain = self._chain(ask)
        self._generations[sequence] = generation
        self._prefill_tokens += ask.prompt_tokens
        self._idle.clear()
        if generation.remote is None:
            self._compute_state(generation, ask.prompt)
        else:
            if self.config.recomputes:
                generation.prompt = ask.prompt
            self.transfers.fetch(generation)
        self.scheduler.submit(sequence, now)
        self._wake.set()
        return generation

    def check_admission(self, n: int = 1) -> None:
        """AdmissionError if a queue limit refuses a request with `n` answers now."""
        requests, tokens = self.config.max_queued_requests, self.config.max_queued_tokens
        if requests is not None and len(self._generations) + n > requests:
            self._reject("max_num_queued_reqs", "The engine is currently busy and cannot accept new requests.")
        if tokens is not None and self._prefill_tokens >= tokens:
            self._reject("max_num_queued_tokens", "The engine has reached its prefill token backlog limit.")

    def die(self, reason: str) -> None:
        """Be as vLLM's front end is when its engine process died: what runs fails, and so does all that comes."""
        log.critical("the engine is dead: %s", reason)
        self.dead.set()
        now = self.clock.now()
        for generation in list(self._generations.values()):
            self.scheduler.stop(generation.sequence, now)
            if generation.fetch is not None:
                generation.fetch.cancel()
            self._end(generation, "error", now)
        self._ending = asyncio.create_task(self.transfers.stop())
        self._wake.set()

    def abort(self, generation: Generation) -> None:
        """The client is gone: free everything that the request holds here, and its KV at the prefill worker."""
        if generation.finish_reason is not None:
            return
        now = self.clock.now()
        self._happen(now)
        if generation.finish_reason is not None:
            return
        self.scheduler.stop(generation.sequence, now)
        self.transfers.abandon(generation)
        self._end(generation, "abort", now)
        self._wake.set()

    def release_refused(self, kv_params: dict[str, Any] | None) -> None:
        """A request was refused before it got here: the prefill worker must not keep its KV until the lease ends."""
        self.transfers.refused(kv_params)

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget every block; False, and nothing changed, while requests or leases hold some.

        `reset_running`: running requests give up their blocks for it, and are computed again.
        """
        now = self.clock.now()
        if reset_running:
            self.scheduler.preempt_all(now)
        done = self.cache.reset()
        self.scheduler.resume(now)
        self._wake.set()
        return done

    # What a connector calls back (kv.connector.Owner).

    def kv_arrived(self, generation: Generation, state: bytes) -> None:
        """The cache of a request is here."""
        # The pulled state and the last prompt token, nothing else: an answer that verifies proves the transfer.
        generation.state_known(state, self._room(generation))
        generation.remote = None  # a name for each of thousands of blocks, for as long as the answer takes
        self.scheduler.kv_arrived(generation.sequence, self.clock.now())
        self._wake.set()

    def kv_failed(self, generation: Generation) -> None:
        """The cache of a request will not come."""
        now = self.clock.now()
        if self.config.recomputes:
            generation.external = False
            self._compute_state(generation, generation.prompt)
            self.scheduler.recompute(generation.sequence, now)
        else:
            self._happen(now)
            self.scheduler.stop(generation.sequence, now)
            self._end(generation, "error", now)
        self._wake.set()

    def wake(self) -> None:
        """A lease was renewed or ended: a turn of the loop is due."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self.turn(self.clock.now())
            ends = [end for end in (self.scheduler.next_event(), self.transfers.next_deadline()) if end is not None]
            await self.clock.wait(self._wake, min(ends, default=None))

    def turn(self, now: float) -> None:
        """One turn of the loop: do what is due."""
        self.transfers.expire(now)
        self.scheduler.blocks_freed(now)
        self._happen(now)
        self._note_idle()

    def _happen(self, now: float) -> None:
        """Pass on what the scheduler played until now."""
        made = computed = drafted = 0
        for event in self.scheduler.advance(now):
            generation = self._generations.get(event.sequence)
            if generation is None:
                continue
            if event.admitted:
                self._accounts.admitted(generation)
            if event.preempted:
                self.metrics.preempted.inc()
            if event.start_transfer:
                generation.may_transfer.set()
            if event.tokens:
                made += event.tokens
                drafted += generation.first_token is not None
                computed += self._deliver(generation, event, now)
        if self.events is not None:
            self.events.flush()
        self._accounts.step(made, computed, drafted)

    def _deliver(self, generation: Generation, event: Advanced, now: float) -> int:
        if generation.first_token is None:
            self._prefill_tokens -= generation.sequence.prompt_tokens
        computed = self._accounts.token(generation, event.at, now)
        generation.tell()
        if event.finished:
            if event.sequence.holds_kv:
                self.transfers.grant(generation, now)
            self._end(generation, generation.end_reason, now)
        return computed

    def _chain(self, ask: Ask) -> Chain:
        publishes = self.events is not None
        return Chain(
            self._hasher,
            whole_tokens(ask.prompt),
            lora=ask.lora,
            salt=ask.cache_salt,
            session=ask.session_id,
            keep_hashes=publishes and self.config.kv_events is not None and not self.config.kv_events.int_hashes,
            keep_tokens=publishes,
        )

    def _compute_state(self, generation: Generation, prompt: bytes) -> None:
        adapter = None if generation.lora is None else generation.lora.name
        state = prompt_state(adapted(self.config.model, adapter), prompt)
        generation.state_known(state, self._room(generation))

    def _room(self, generation: Generation) -> int:
        return self.config.max_model_len - generation.sequence.prompt_tokens

    def _end(self, generation: Generation, reason: str, now: float) -> None:
        sequence = generation.sequence
        if self._generations.pop(sequence, None) is not None and generation.first_token is None:
            self._prefill_tokens -= sequence.prompt_tokens
        generation.finish(reason)
        self._accounts.ended(generation, reason, now)

    def _reject(self, reason: str, message: str) -> None:
        self.metrics.rejected(reason)
        raise AdmissionError(reason, f"{message} Please try again later or on a different instance.")

    def _note_idle(self) -> None:
        if not self._generations and not self.transfers.kept:
            self._idle.set()
        else:
            self._idle.clear()
