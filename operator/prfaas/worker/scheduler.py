"""When a worker does what: one prefill at a time, decode in steps, waiting requests in queues. No I/O, no clock.

A state machine over two events, the end of the running prefill's chunk and the end of the running decode step.
`advance(now)` plays all that are due, each at its own time, so that a late caller does not slow the model down.

* A request with a prompt to compute waits in `queue` until the prefill unit, a slot and the blocks of its whole prompt
  are free. What the prefix cache has of it is not computed again. A prefill goes in chunks; others may reuse the blocks
  of a chunk once it is done. The first token comes with the end of the last chunk.
* A request whose KV comes from elsewhere waits in `fetching`: its transfer may start as soon as a slot and its blocks
  are free (so a full batch holds back transfers, as in vLLM), but it takes the slot only when the bytes are here. Its
  first token comes with its first step.
* A decode step lasts as long as the profile says for its batch. Requests join at step borders.
* A request takes the blocks of its answer as it grows. Where none are left, the running request that came last (with
  priorities: the least urgent) is preempted: it gives up its blocks and is computed again, answer so far included.

Prefill and decode of one instance do not slow each other here; with chunked prefill they do, a little.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from prfaas.api.profile import Profile
from prfaas.worker.blocks import BlockPool
from prfaas.worker.prefix import Hit, PrefixCache
from prfaas.worker.sequence import Sequence, State


@dataclass(frozen=True)
class Advanced:
    """Something that happened to `sequence` at a time: it was admitted, may start its transfer, gained tokens, ..."""

    sequence: Sequence
    at: float
    tokens: int = 0
    admitted: bool = False
    start_transfer: bool = False
    preempted: bool = False
    finished: bool = False


class Scheduler:
    """The model's time on one instance. Every method takes the time now; none goes back."""

    def __init__(
        self,
        profile: Profile,
        cache: PrefixCache | BlockPool,
        max_batch: int,
        time_scale: float,
        *,
        chunk_tokens: int | None = None,
        by_priority: bool = False,
    ) -> None:
        self._profile, self._scale = profile, time_scale
        self._cache = PrefixCache(cache) if isinstance(cache, BlockPool) else cache
        self._pool = self._cache.pool
        self._limit = min(max_batch, profile.decode.max_batch)
        self._chunk, self._by_priority = chunk_tokens, by_priority
        self._ahead = math.ceil(profile.decode.tokens_per_step) - 1
        self.queue: deque[Sequence] = deque()
        self.fetching: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._prefill_end = 0.0
        self._chunk_end = 0
        self._decoding: dict[str, Sequence] = {}
        self._batch: list[Sequence] = []
        self._step_end: float | None = None
        self._happened: list[Advanced] = []
        self._admissions = 0
        self._too_big: tuple[Sequence, int, int] | None = None
        """Who did not fit, with how many blocks free and how much to be found: not tried again before there is more."""

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
            self._enqueue(self.fetching, sequence)
        else:
            self._enqueue(self.queue, sequence)
        self._admit(now)

    def kv_arrived(self, sequence: Sequence, now: float) -> None:
        """The transfer of a request is done."""
        self._play(now)
        self.fetching.remove(sequence)
        sequence.state, sequence.transferring = State.KV_READY, False
        self._computed(sequence, sequence.prompt_tokens, chunk=True)
        self._ready.append(sequence)
        self._admit(now)

    def recompute(self, sequence: Sequence, now: float) -> None:
        """The transfer failed and the policy says to prefill here: to the end of the queue."""
        self._play(now)
        self._forget(sequence)
        self._cache.give_back(sequence)
        sequence.state, sequence.kv_from_remote, sequence.started = State.QUEUED, False, None
        sequence.admitted = 0
        self._enqueue(self.queue, sequence)
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

    def preempt_all(self, now: float) -> None:
        """Every running request gives up its blocks, so that the prefix cache can be reset."""
        self._play(now)
        while self.running:
            self._preempt(self._victim(), now)
        self._step_end, self._batch = None, []

    def resume(self, now: float) -> None:
        """Go on after `preempt_all`."""
        self._admit(now)

    def _play(self, now: float) -> None:
        while (end := self.next_event()) is not None and end <= now:
            if self._prefilling is not None and self._prefill_end <= end:
                self._end_chunk(end)
            else:
                self._end_step(end)
            self._admit(end)

    def _admit(self, now: float) -> None:
        self._fill_slots(now)
        if self._prefilling is None and self.queue and self.running < self._limit:
            head = self.queue[0]
            if self._allocate(head, now):
                self.queue.popleft()
                head.state, head.begun = State.PREFILLING, now
                head.started = now if head.started is None else head.started
                self._prefilling = head
                self._begin_chunk(head)
        for sequence in self.fetching:
            if sequence.transferring:
                continue
            if self.running >= self._limit or not self._allocate(sequence, now):
                break
            sequence.transferring = True
            self._happened.append(Advanced(sequence, now, start_transfer=True))
        if self._step_end is None and self._decoding:
            self._begin_step(now)

    def _enqueue(self, line: deque[Sequence], sequence: Sequence) -> None:
        at = len(line)
        if self._by_priority:
            place = (sequence.priority, sequence.arrived)
            while at and place < (line[at - 1].priority, line[at - 1].arrived):
                at -= 1
        line.insert(at, sequence)

    def _allocate(self, sequence: Sequence, now: float) -> bool:
        if self._too_big is not None and self._too_big[0] is sequence:
            _, free, growth = self._too_big
            if self._pool.free <= free and self._cache.growth == growth:
                return False
        hit = Hit()
        if sequence.reads_cache:
            hit = self._cache.find(sequence.chain, sequence.tokens, states_come=sequence.kv_from_remote)
        if not self._cache.admit(sequence, hit, self._pool.blocks_for(sequence.tokens)):
            self._too_big = sequence, self._pool.free, self._cache.growth
            return False
        self._too_big = None
        if sequence.reports_found and sequence.chain is not None:
            self._cache.report_reused(sequence.chain, len(hit.blocks))
        sequence.found = sequence.computed = hit.tokens
        first_time = not sequence.admitted and not sequence.preemptions
        self._admissions += 1
        sequence.admitted = self._admissions
        if first_time:
            sequence.local_hit = hit.tokens
            self._happened.append(Advanced(sequence, now, admitted=True))
        return True

    def _begin_chunk(self, sequence: Sequence) -> None:
        """Set where the next chunk of the running prefill ends, and when."""
        total = sequence.tokens
        end = total if self._chunk is None else min(total, sequence.computed + self._chunk)
        stops = self._cache.boundaries(total, sequence.junction)
        if stops and end < total:
            # A state exists only where a chunk ends, and is of use only at a block boundary.
            aligned = end // self._pool.block_size * self._pool.block_size
            end = aligned if aligned > sequence.computed else end
        self._chunk_end = min((stop for stop in stops if sequence.computed < stop < end), default=end)
        seconds = self._profile.prefill.remaining_seconds(self._chunk_end, sequence.found)
        self._prefill_end = sequence.begun + seconds / self._scale

    def _begin_step(self, now: float) -> None:
        for sequence in list(self._decoding.values()):
            if sequence.state is State.DECODING:
                self._make_room(sequence, now)
        self._batch = list(self._decoding.values())
        if self._batch:
            self._step_end = now + self._profile.decode.step_seconds(len(self._batch)) / self._scale

    def _make_room(self, sequence: Sequence, now: float) -> None:
        """Blocks for what the next step computes of this request; who came last makes room."""
        needed = min(sequence.tokens + self._ahead, sequence.prompt_tokens + sequence.max_tokens - 1)
        if needed <= len(sequence.blocks) * self._pool.block_size:
            return
        while sequence.state is State.DECODING and not self._cache.extend(sequence, needed):
            self._preempt(self._victim(), now)

    def _victim(self) -> Sequence:
        running = [*self._decoding.values(), *([self._prefilling] if self._prefilling else [])]
        if self._by_priority:
            return max(running, key=lambda each: (each.priority, each.arrived))
        return max(running, key=lambda each: each.admitted)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._decoding.pop(sequence.request_id, None)
        if sequence is self._prefilling:
            self._prefilling = None
        self._cache.give_back(sequence)
        sequence.state, sequence.kv_from_remote = State.QUEUED, False
        sequence.preemptions += 1
        self._hash_answer(sequence)
        if self._by_priority:
            self._enqueue(self.queue, sequence)
        else:
            self.queue.appendleft(sequence)
        self._happened.append(Advanced(sequence, now, preempted=True))

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

    def _end_chunk(self, end: float) -> None:
        sequence = self._prefilling
        assert sequence is not None
        self._computed(sequence, self._chunk_end, chunk=True)
        if self._chunk_end < sequence.tokens:
            self._begin_chunk(sequence)
            return
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
        words = sequence.next_words(tokens)
        sequence.generated += tokens
        if sequence.chain is not None:
            sequence.unhashed += words
            # The last token was sampled; its KV comes with the next step.
            computed = sequence.tokens - 1
            if computed // self._pool.block_size > sequence.registered:
                self._hash_answer(sequence)
                self._computed(sequence, computed, chunk=False)
        finished = sequence.generated >= sequence.max_tokens
        if finished:
            del self._decoding[sequence.request_id]
            self._finish(sequence, keep_blocks=sequence.holds_kv)
        if tokens:
            self._happened.append(Advanced(sequence, at, tokens=tokens, finished=finished))

    def _computed(self, sequence: Sequence, tokens: int, *, chunk: bool) -> None:
        sequence.computed = tokens
        self._cache.computed(sequence, tokens, prompt_tokens=sequence.prompt_tokens, chunk=chunk)

    def _hash_answer(self, sequence: Sequence) -> None:
        if sequence.chain is not None and sequence.unhashed:
            sequence.chain.extend("".join(sequence.unhashed).encode())
            sequence.unhashed.clear()

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
            self._cache.give_back(sequence)
