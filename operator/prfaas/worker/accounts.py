"""Which moment of a request's life goes into which of vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prfaas.worker.config import WorkerConfig
from prfaas.worker.generation import Generation, Parent
from prfaas.worker.metrics import Metrics
from prfaas.worker.sequence import State

_RUNNING = (State.PREFILLING, State.DECODING)


class Accounts:
    """The books of one engine. Times are its clock's."""

    def __init__(self, config: WorkerConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        self._connected = config.kv_transfer is not None
        self._left = int(config.attention == "hybrid")
        """Tokens of a transferred prompt that are computed here: a hybrid model's last one."""
        self._speculates = config.exposed.draft_tokens > 0

    def admitted(self, generation: Generation) -> None:
        """It got its blocks: what the prefix cache had is known, in tokens."""
        sequence, metrics = generation.sequence, self._metrics
        asked = sequence.prompt_tokens - sequence.local_hit
        generation.external_tokens = asked - self._left if generation.external else 0
        if sequence.chain is not None and sequence.reads_cache:
            metrics.prefix_queries.inc(sequence.prompt_tokens)
            metrics.prefix_hits.inc(sequence.local_hit)
            metrics.hits_here.inc(sequence.local_hit)
        if self._connected:
            metrics.external_queries.inc(asked)
            metrics.external_hits.inc(generation.external_tokens)
            metrics.hits_at_peers.inc(generation.external_tokens)

    def token(self, generation: Generation, at: float, now: float) -> int:
        """Tokens came at a time; returns how many prompt tokens were computed for them."""
        metrics, first = self._metrics, generation.first_token is None
        if first:
            generation.first_token = at
        elif generation.last_token is not None:
            metrics.inter_token.observe(at - generation.last_token)
        generation.last_token = at
        if not first:
            return 0
        sequence, cached = generation.sequence, generation.cached_tokens
        metrics.ttft.observe(now - sequence.arrived)
        metrics.prompt_tokens.inc(sequence.prompt_tokens)
        metrics.computed.inc(sequence.prompt_tokens - cached)
        metrics.cached.inc(sequence.local_hit)
        metrics.external.inc(generation.external_tokens)
        metrics.prompt_cached.inc(cached)
        return sequence.prompt_tokens - cached

    def step(self, tokens: int, computed: int, drafted: int) -> None:
        """A turn made so many tokens, computed so many of prompts, and stepped `drafted` sequences that had a token."""
        if not tokens:
            return
        self._metrics.generation_tokens.inc(tokens)
        self._metrics.iteration_tokens.observe(tokens + computed)
        if self._speculates and drafted:
            self._metrics.drafted(drafted, tokens - drafted)

    def ended(self, generation: Generation, reason: str, now: float) -> None:
        """It ended."""
        sequence, metrics = generation.sequence, self._metrics
        metrics.finished(reason)
        metrics.e2e.observe(now - sequence.arrived)
        metrics.request_prompt.observe(sequence.prompt_tokens)
        metrics.request_generation.observe(sequence.generated)
        metrics.preemptions.observe(sequence.preemptions)
        metrics.prefill_computed.observe(sequence.prompt_tokens - generation.cached_tokens)
        self._answers(generation)
        if generation.max_tokens is not None:
            metrics.params_max_tokens.observe(generation.max_tokens)
        if sequence.started is not None and generation.first_token is not None and generation.last_token is not None:
            metrics.queue_time.observe(sequence.started - sequence.arrived)
            metrics.prefill_time.observe(generation.first_token - sequence.started)
            metrics.inference_time.observe(generation.last_token - sequence.started)
            decode = generation.last_token - generation.first_token
            metrics.decode_time.observe(decode)
            if sequence.generated > 1:
                metrics.per_token.observe(decode / (sequence.generated - 1))

    def _answers(self, generation: Generation) -> None:
        """`n` and the longest answer, once per request."""
        parent = generation.parent or Parent(1, 1)
        parent.left -= 1
        parent.longest = max(parent.longest, generation.sequence.generated)
        if not parent.left:
            self._metrics.params_n.observe(parent.n)
            self._metrics.request_max_generation.observe(parent.longest)


def adapters(generations: Iterable[Generation], *, running: bool) -> list[str]:
    """Names of the LoRA adapters that running, or waiting, requests use."""
    used = (
        each.lora.name for each in generations if each.lora is not None and (each.sequence.state in _RUNNING) == running
    )
    return list(dict.fromkeys(used))
