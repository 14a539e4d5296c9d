"""One answer under way: what was asked, what it needs to know, and the tokens on their way to the client."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from prfaas.worker.hashing import Lora
from prfaas.worker.kv.params import Remote
from prfaas.worker.oracle import Sampling, answer, answer_words, natural_length
from prfaas.worker.sequence import Sequence

LONGEST_NATURAL = 319
"""Upper bound of oracle.natural_length: what a request without a limit reserves."""


@dataclass
class Parent:
    """A request with `n` above 1: counted once, when its last answer ended."""

    n: int
    left: int
    longest: int = 0


@dataclass(frozen=True)
class Ask:
    """One completion, as the HTTP side understood it."""

    request_id: str
    """vLLM's internal id; `kv_transfer_params.remote_request_id` of a prefill answer."""
    prompt: bytes
    prompt_tokens: int
    max_tokens: int | None
    """None: the request set no limit."""
    sampling: Sampling = field(default_factory=Sampling)
    kv_params: dict[str, Any] | None = None
    priority: int = 0
    """Lower comes first, where `--scheduling-policy` is `priority`."""
    cache_salt: str | None = None
    lora: Lora | None = None
    """The LoRA adapter that it uses."""
    reads_cache: bool = True
    """False for what needs every prompt token computed, such as `prompt_logprobs`."""
    reports_found: bool = False
    """`vllm_xargs.kv_cache_report_mode` is `full`: KV events also tell of blocks that were found."""
    session_id: str | None = None
    """`X-Session-ID`, which KV events name."""
    parent: Parent | None = None
    """Shared by the answers of a request that asked for several."""


@dataclass(eq=False)
class Generation:
    """An answer under way. Its reader waits in `next`."""

    sequence: Sequence
    max_tokens: int | None
    sampling: Sampling
    last: bytes
    """The last prompt token."""
    parent: Parent | None = None
    lora: Lora | None = None
    prompt: bytes = b""
    """Kept only where a failed transfer is followed by a prefill here."""
    remote: Remote | None = None
    kv_params: dict[str, Any] | None = None
    """What a prefill worker tells the router, once finished."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """What stopped the answer, once it is known to: a string or a token's id."""
    first_token: float | None = None
    last_token: float | None = None
    fetch: asyncio.Task[None] | None = None
    may_transfer: asyncio.Event = field(default_factory=asyncio.Event)
    state: bytes = b""
    end_reason: str = "length"
    external: bool = False
    """Whether its KV was computed elsewhere."""
    external_tokens: int = 0
    """Prompt tokens whose KV came, or was to come, from another engine."""
    _words: Iterator[str] = field(default_factory=lambda: iter(()))
    _fresh: list[str] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed here."""
        return self.sequence.local_hit + self.external_tokens

    def state_known(self, state: bytes, room: int) -> None:
        """What the answer depends on is here: the prefilled state. `room`: tokens that fit behind the prompt."""
        self.state = state
        limit = self.max_tokens
        if limit is None:
            natural = max(natural_length(state), self.sampling.min_tokens)
            self.end_reason = "stop" if natural <= room else "length"
            limit = min(natural, room)
        if self.sampling.stop or self.sampling.stop_token_ids:
            # The whole answer is known: cut it now, rather than look for the stop string token by token.
            known = answer(state, self.last, limit, self.sampling)
            if known.finish_reason == "stop":
                self.end_reason, self.stop_reason = "stop", known.stop_reason
            self._words, limit = iter(known.pieces), len(known.pieces)
        else:
            self._words = answer_words(state, self.last, self.sampling.choice)
        self.sequence.max_tokens = limit

    def next_words(self, tokens: int) -> list[str]:
        """The model makes so many tokens more; what they say waits for `tell`."""
        words = list(islice(self._words, tokens))
        self._fresh += words
        return words

    def tell(self) -> None:
        """There are tokens for the reader."""
        self._changed.set()

    def finish(self, reason: str) -> None:
        """No more tokens; `reason` is vLLM's."""
        if self.finish_reason is None:
            self.finish_reason = reason
        self._changed.set()

    async def next(self) -> tuple[list[str], str | None]:
        """Texts of the tokens since the last call, at least one unless finished, and the finish reason."""
        await self._changed.wait()
        self._changed.clear()
        fresh, self._fresh = self._fresh, []
        if self.finish_reason is not None:
            self._changed.set()
        return fresh, self.finish_reason


def internal_id(external_id: str) -> str:
    """vLLM's internal request id: the external one and eight random hex digits."""
    return f"{external_id}-{uuid.uuid4().hex[:8]}"
