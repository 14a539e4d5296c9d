"""When a worker does what: one prefill at a time, decode in steps, waiting requests in queues. No I/O, no clock.

A state machine over two events, the end of the running prefill and the end of the running decode step. `advance(now)`
plays all that are due, each at its own time, so that a late caller does not slow the model down.

* A request with a prompt to compute waits in `queue` until the prefill unit, a slot and its blocks are free. Its first
  token comes with the end of its prefill.
* A request whose KV comes from elsewhere waits in `fetching`: its transfer may start as soon as a slot and its blocks
  are free (so a full batch holds back transfers, as in vLLM), but it takes the slot only when the bytes are here. Its
  first token comes with its first step.
* A decode step lasts as long as the profile says for its batch. Requests join at step borders.

Prefill and decode of one instance do not slow each other here; with chunked prefill they do, a little. Blocks for the
whole prompt and answer are taken before a request starts, so that nothing is ever preempted.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from prfaas.api.profile import Profile
from prfaas.worker.blocks import BlockPool, Blocks, no_blocks


class State(enum.Enum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    WAITING_FOR_KV = "waiting for KV"
    KV_READY = "KV ready"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One request as the scheduler sees it. Times are the scheduler's clock."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrived: float
    kv_from_remote: bool = False
    holds_kv: bool = False
    """Its blocks are not freed when it is finished: a lease takes them over."""
    state: State = State.QUEUED
    blocks: Blocks = field(default_factory=no_blocks)
    started: float | None = None
    """When it got its slot: its prefill began, or, with KV from elsewhere, it joined the batch."""
    generated: int = 0
    transferring: bool = False
    credit: float = 0.0
    """Fraction of a token left over from steps that make more than one."""


@dataclass(frozen=True)
class Advanced:
    """Something that happened to `sequence` at a time: it may start its transfer, gained tokens, is finished."""

    sequence: Sequence
    at: float
    tokens: int = 0
    start_transfer: bool = False
    finished: bool = False


class Scheduler:
    """The model's time on one instance. Every method takes the time now; none goes back."""

    def __init__(self, profile: Profile, pool: BlockPool, max_batch: int, time_scale: float) -> None:
        self._profile, self._pool, self._scale = profile, pool, time_scale
        self._limit = min(max_batch, profile.decode.max_batch)
        self.queue: deque[Sequence] = deque()
        self.fetching: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._prefill_end = 0.0
        self._decoding: dict[str, Sequence] = {}
        self._batch: list[Sequence] = []
        self._step_end: float | None = None
        self._happened: list[Advanced] = []

    @property
    def running(self) -> int:
        """Requests that hold a slot: prefilling or decoding."""
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def waiting(self) -> int:
        """Requests that hold none."""
        return len(self.queue) + self.deferred

    @property
    def deferred(self) -> int:
        """Waiting requests that wait for their KV, or for a slot after it came."""
        return len(self.fetching) + len(self._ready)

    def fetch_stages(self) -> tuple[int, int, int]:
        """Requests whose KV transfer waits to start, is in progress, is done but waits for a slot."""
        in_progress = sum(sequence.transferring for sequence in self.fetching)
        return len(self.fetching) - in_progress, in_progress, len(self._ready)

    def submit(self, sequence: Sequence, now: float) -> None:
        """A request arrived."""
        self._play(now)
        if sequence.kv_from_remote:
            sequence.state = State.WAITING_FOR_KV
            self.fetching.append(sequence)
        else:
            self.queue.append(sequence)
        self._admit(now)

    def kv_arrived(self, sequence: Sequence, now: float) -> None:
        """The transfer of a request is done."""
        self._play(now)
        self.fetching.remove(sequence)
        sequence.state, sequence.transferring = State.KV_READY, False
        self._ready.append(sequence)
        self._admit(now)

    def recompute(self, sequence: Sequence, now: float) -> None:
        """The transfer failed and the policy says to prefill here: to the end of the queue."""
        self._play(now)
        self._forget(sequence)
        self._free(sequence)
        sequence.state, sequence.kv_from_remote, sequence.started = State.QUEUED, False, None
        self.queue.append(sequence)
        self._admit(now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """A request ends before its limit: aborted, failed, or at a stop string."""
        self._play(now)
        if sequence.state is not State.FINISHED:
            self._forget(sequence)
            self._finish(sequence, keep_blocks=False)
            self._admit(now)

    def blocks_freed(self, now: float) -> None:
        """A lease ended: a waiting request may fit now."""
        self._play(now)
        self._admit(now)

    def advance(self, now: float) -> list[Advanced]:
        """Play everything due until `now`; what happened since the last call, in order."""
        self._play(now)
        happened, self._happened = self._happened, []
        return happened

    def next_event(self) -> float | None:
        """When `advance` has something to do next, without new requests; None: never."""
        ends = [end for end in (self._prefill_end if self._prefilling else None, self._step_end) if end is not None]
        return min(ends, default=None)

    def _play(self, now: float) -> None:
        while (end := self.next_event()) is not None and end <= now:
            if self._prefilling is not None and self._prefill_end <= end:
                self._end_prefill(end)
            else:
                self._end_step(end)
            self._admit(end)

    def _admit(self, now: float) -> None:
        self._fill_slots(now)
        if self._prefilling is None and self.queue and self.running < self._limit:
            head = self.queue[0]
            if self._allocate(head):
                self.queue.popleft()
                head.state, head.started = State.PREFILLING, now
                self._prefilling = head
                self._prefill_end = now + self._profile.prefill.seconds(head.prompt_tokens) / self._scale
        for sequence in self.fetching:
            if sequence.transferring:
                continue
            if self.running >= self._limit or not self._allocate(sequence):
                break
            sequence.transferring = True
            self._happened.append(Advanced(sequence, now, start_transfer=True))
        if self._step_end is None and self._decoding:
            self._begin_step(now)

    def _begin_step(self, now: float) -> None:
        self._batch = list(self._decoding.values())
        self._step_end = now + self._profile.decode.step_seconds(len(self._batch)) / self._scale

    def _end_step(self, end: float) -> None:
        for sequence in self._batch:
            if sequence.state is State.DECODING:
                sequence.credit += self._profile.decode.tokens_per_step
                tokens = int(sequence.credit)
                sequence.credit -= tokens
                self._emit(sequence, tokens, end)
        self._step_end, self._batch = None, []
        self._fill_slots(end)
        if self._decoding:
            self._begin_step(end)

    def _end_prefill(self, end: float) -> None:
        sequence = self._prefilling
        assert sequence is not None
        self._prefilling = None
        self._decode(sequence)
        self._emit(sequence, 1, end)

    def _fill_slots(self, now: float) -> None:
        while self._ready and self.running < self._limit:
            sequence = self._ready.popleft()
            sequence.started = now
            self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        sequence.state = State.DECODING
        self._decoding[sequence.request_id] = sequence

    def _emit(self, sequence: Sequence, tokens: int, at: float) -> None:
        tokens = min(tokens, sequence.max_tokens - sequence.generated)
        sequence.generated += tokens
        finished = sequence.generated >= sequence.max_tokens
        if finished:
            del self._decoding[sequence.request_id]
            self._finish(sequence, keep_blocks=sequence.holds_kv)
        if tokens:
            self._happened.append(Advanced(sequence, at, tokens=tokens, finished=finished))

    def _forget(self, sequence: Sequence) -> None:
        """Take a request out of wherever it is."""
        if sequence is self._prefilling:
            self._prefilling = None
        self._decoding.pop(sequence.request_id, None)
        for line in (self.queue, self.fetching, self._ready):
            if sequence in line:
                line.remove(sequence)
        if not self._decoding:
            self._step_end, self._batch = None, []

    def _finish(self, sequence: Sequence, keep_blocks: bool) -> None:
        sequence.state, sequence.transferring = State.FINISHED, False
        if not keep_blocks:
            self._free(sequence)

    def _allocate(self, sequence: Sequence) -> bool:
        blocks = self._pool.take(sequence.prompt_tokens + sequence.max_tokens)
        if blocks is None:
            return False
        sequence.blocks = blocks
        return True

    def _free(self, sequence: Sequence) -> None:
        self._pool.give_back(sequence.blocks)
        sequence.blocks = no_blocks()
