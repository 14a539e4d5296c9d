"""One request as the scheduler sees it: where it is, what it has, what it is still to get."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.worker.blocks import Blocks, no_blocks
from prfaas.worker.hashing import Chain


class State(enum.Enum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    WAITING_FOR_KV = "waiting for KV"
    KV_READY = "KV ready"
    DECODING = "decoding"
    FINISHED = "finished"


def _no_words(count: int) -> list[str]:
    return []


@dataclass(eq=False)
class Sequence:
    """One request. Times are the scheduler's clock."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrived: float
    kv_from_remote: bool = False
    holds_kv: bool = False
    """Its blocks are not freed when it is finished: a lease takes them over."""
    priority: int = 0
    """Lower is more urgent; without effect under the policy `fcfs`."""
    chain: Chain | None = None
    """None: nothing of it is found in the prefix cache, or by others."""
    reads_cache: bool = True
    reports_found: bool = False
    """Whether blocks that it finds are told of as if they were new."""
    next_words: Callable[[int], list[str]] = _no_words
    """The next so many tokens of the answer, as it grows."""
    state: State = State.QUEUED
    blocks: Blocks = field(default_factory=no_blocks)
    registered: int = 0
    """Blocks from the start that others may find."""
    junction: int = 0
    computed: int = 0
    """Tokens whose KV is here."""
    found: int = 0
    """Tokens that the prefix cache had when the request was admitted last."""
    local_hit: int = 0
    """The same, when it was admitted first: what usage and metrics report."""
    admitted: int = 0
    """How many were admitted before it, counting itself; 0: not yet."""
    preemptions: int = 0
    started: float | None = None
    """When it got its slot: its prefill began, or, with KV from elsewhere, it joined the batch."""
    begun: float = 0.0
    """When the prefill that runs now began."""
    generated: int = 0
    transferring: bool = False
    credit: float = 0.0
    """Fraction of a token left over from steps that make more than one."""
    unhashed: list[str] = field(default_factory=list)
    """Tokens of the answer that the chain does not know yet."""

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.prompt_tokens + self.generated
