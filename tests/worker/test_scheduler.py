"""When a worker does what: prefills one by one, decode in steps, transfers while there is a slot."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.worker.blocks import BlockPool, no_blocks
from prfaas.worker.hashing import Chain, Hasher
from prfaas.worker.prefix import PrefixCache
from prfaas.worker.scheduler import Advanced, Scheduler
from prfaas.worker.sequence import Sequence, State
from tests.worker.rig import profile

# rig.profile: prefill 1 s + 1 ms per token; a step every 0.1 s; at most four requests at a time.


def scheduler(blocks: int = 1_000, max_batch: int = 1_024, time_scale: float = 1, **changes: Any) -> Scheduler:
    """A scheduler over a pool of blocks of 16 tokens."""
    return Scheduler(profile(**changes), BlockPool(blocks, 16), max_batch, time_scale)


def sequence(name: str, prompt: int = 1_000, tokens: int = 3, at: float = 0, **fields: Any) -> Sequence:
    """A request that arrives at a time."""
    return Sequence(name, prompt, tokens, at, **fields)


def chain(text: str) -> Chain:
    """The blocks of a prompt."""
    return Chain(Hasher("sha256", 16, python_hash_seed=None, random_seed=b""), text.encode())


def times(events: list[Advanced]) -> list[tuple[float, str, int]]:
    """When which request gained how many tokens."""
    return [(round(event.at, 6), event.sequence.request_id, event.tokens) for event in events if event.tokens]


def transfers(events: list[Advanced]) -> list[str]:
    """Who may start its transfer."""
    return [event.sequence.request_id for event in events if event.start_transfer]


def test_first_token_with_the_prefill_then_one_per_step() -> None:
    model = scheduler()
    model.submit(sequence("a"), 0)
    assert model.next_event() == 2
    assert times(model.advance(10)) == [(2, "a", 1), (2.1, "a", 1), (2.2, "a", 1)]
    assert model.next_event() is None


def test_prefills_run_one_by_one_in_order_of_arrival() -> None:
    model = scheduler()
    for name, prompt in (("a", 1_000), ("b", 2_000), ("c", 500)):
        model.submit(sequence(name, prompt, tokens=1), 0)
    assert (model.running, model.waiting) == (1, 2)
    assert times(model.advance(100)) == [(2, "a", 1), (5, "b", 1), (6.5, "c", 1)]


def test_time_scale_divides_prefill_and_steps() -> None:
    model = scheduler(time_scale=10)
    model.submit(sequence("a"), 0)
    assert times(model.advance(10)) == [(0.2, "a", 1), (0.21, "a", 1), (0.22, "a", 1)]


def test_a_late_caller_does_not_slow_the_model() -> None:
    prompt, late = scheduler(), scheduler()
    for model in (prompt, late):
        model.submit(sequence("a", tokens=9), 0)
        model.submit(sequence("b", 300, tokens=9), 0.5)
    seen = [event for tick in range(1, 2_000) for event in prompt.advance(tick / 100)]
    assert times(seen) == times(late.advance(20))


def test_a_step_is_as_long_as_its_batch_and_requests_join_at_borders() -> None:
    steps = [{"batch": 1, "seconds": 0.1}, {"batch": 2, "seconds": 0.4}]
    model = scheduler(decode={"steps": steps, "maxBatch": 4})
    model.submit(sequence("a", tokens=5), 0)  # prefilled at 2.0
    model.advance(2.05)
    late = sequence("b", tokens=2, at=2.05, kv_from_remote=True)
    model.submit(late, 2.05)
    assert transfers(model.advance(2.05)) == ["b"]
    model.kv_arrived(late, 2.06)
    assert times(model.advance(20)) == [
        (2.1, "a", 1),
        (2.5, "a", 1),
        (2.5, "b", 1),
        (2.9, "a", 1),
        (2.9, "b", 1),
        (3.0, "a", 1),
    ]


def test_no_more_than_the_batch_limit_decode_together() -> None:
    model = scheduler(max_batch=2)
    for name in "abc":
        model.submit(sequence(name, prompt=0, tokens=31), 0)  # prefills end at 1, 2 and, with a slot, 3
    model.advance(3.95)
    assert (model.running, model.waiting) == (2, 1)
    model.advance(4.05)  # a, done at 4.0, leaves its slot; c is prefilled in it
    assert (model.running, model.waiting) == (2, 0)


def test_the_profiles_batch_limit_holds_below_max_num_seqs() -> None:
    model = scheduler(max_batch=100)
    for number in range(9):
        model.submit(sequence(str(number), prompt=0, tokens=1_000), 0)
    model.advance(20)
    assert (model.running, model.waiting) == (4, 5)


def test_a_full_batch_holds_back_transfers() -> None:
    model = scheduler(max_batch=1)
    model.submit(sequence("a", tokens=2), 0)
    waits = sequence("b", kv_from_remote=True, tokens=1)
    model.submit(waits, 0)
    assert not any(event.start_transfer for event in model.advance(2.05))
    assert model.fetch_stages() == (1, 0, 0)
    assert transfers(model.advance(2.2)) == ["b"]
    assert model.fetch_stages() == (0, 1, 0)


def test_transfers_in_progress_take_no_slot_and_wait_for_one_when_done() -> None:
    model = scheduler(max_batch=1)
    pulled = [sequence(name, kv_from_remote=True, tokens=2) for name in "ab"]
    for each in pulled:
        model.submit(each, 0)
    model.advance(0)
    assert (model.running, model.fetch_stages()) == (0, (0, 2, 0))
    for each in pulled:
        model.kv_arrived(each, 1)
    assert (model.running, model.fetch_stages()) == (1, (0, 0, 1))
    assert times(model.advance(5)) == [(1.1, "a", 1), (1.2, "a", 1), (1.3, "b", 1), (1.4, "b", 1)]
    assert pulled[1].started == pytest.approx(1.2)


def test_requests_wait_for_blocks_in_order() -> None:
    model = scheduler(blocks=10)
    model.submit(sequence("a", prompt=100, tokens=20), 0)  # 7 of 10 blocks
    model.submit(sequence("b", prompt=100, tokens=20), 0)
    model.submit(sequence("c", prompt=10, tokens=1), 0)
    model.advance(2.9)
    assert (model.running, len(model.queue)) == (1, 2), "c would fit, but b is first"
    model.advance(3.1)  # a, prefilled at 1.1, is done at 3.0
    assert len(model.queue) == 1


def test_a_request_takes_blocks_as_its_answer_grows() -> None:
    pool = BlockPool(10, 16)
    model = Scheduler(profile(), pool, 4, 1)
    model.submit(sequence("a", prompt=30, tokens=20), 0)  # prefilled at 1.03
    used = []
    for now in (0, 1.05, 1.15, 1.25, 1.35):
        model.advance(now)
        used.append(pool.used)
    assert used == [2, 2, 2, 3, 3], "of the token made last there is no KV yet"


def test_who_came_last_makes_room_and_is_computed_again() -> None:
    pool = BlockPool(4, 16)
    model = Scheduler(profile(), pool, 4, 1)
    first, second = sequence("first", prompt=31, tokens=30), sequence("second", prompt=16, tokens=20)
    model.submit(first, 0)  # has three blocks from 1.131 on, when `second` has the fourth
    model.submit(second, 0)  # needs another to join the step of 2.131
    third = sequence("third", prompt=10, tokens=1, at=2.06)
    model.submit(third, 2.06)  # waits: every block is taken
    events = model.advance(60)
    preempted = [(round(event.at, 3), event.sequence.request_id) for event in events if event.preempted]
    assert preempted == [(2.131, "second")]
    assert (first.preemptions, second.preemptions) == (0, 1)
    gained = [round(event.at, 3) for event in events if event.sequence is second and event.tokens]
    assert len(gained) == 20
    # `first` is done at 3.931; prompt and first token of `second` are 17 tokens to prefill.
    assert gained[:3] == [2.047, 4.948, 5.048]
    assert third.started == pytest.approx(4.948), "who was preempted is first in the queue"
    assert pool.used == 0


def test_the_least_urgent_makes_room_and_the_most_urgent_goes_first() -> None:
    model = Scheduler(profile(), BlockPool(4, 16), 4, 1, by_priority=True)
    made = [sequence(name, 20, 15, at, priority=priority) for name, at, priority in (("a", 0, 5), ("b", 0.1, 1))]
    late = [sequence(name, 20, 1, at, priority=priority) for name, at, priority in (("c", 0.2, 2), ("d", 0.3, 0))]
    for each in (*made, *late):
        model.submit(each, each.arrived)
    assert [each.request_id for each in model.queue] == ["d", "b", "c"]
    events = model.advance(60)
    assert {event.sequence.request_id for event in events if event.preempted} == {"a"}
    assert times(events)[0][1] == "a", "a runs, and is not stopped for who is more urgent"


def test_a_prefill_goes_in_chunks_and_is_as_long_as_in_one() -> None:
    model = Scheduler(profile(), BlockPool(1_000, 16), 4, 1, chunk_tokens=300)
    model.submit(sequence("a", tokens=1), 0)
    ends, events = [], list[Advanced]()
    while (end := model.next_event()) is not None:
        ends.append(round(end, 6))
        events += model.advance(end)
    assert ends == [1.3, 1.6, 1.9, 2.0]
    assert times(events) == [(2, "a", 1)]


def test_what_the_cache_has_is_not_computed_again() -> None:
    pool = BlockPool(1_000, 16)
    model = Scheduler(profile(), PrefixCache(pool), 4, 1)
    text = "word" * 1_000
    first, second, other = (sequence(name, tokens=1) for name in ("first", "second", "other"))
    first.chain, second.chain, other.chain = chain(text), chain(text), chain("else" + text[4:])
    for each in (first, second, other):
        model.submit(each, 0)
    # T(1000|992) = 1 + 0.008: the last block holds the last token, which is always computed.
    assert times(model.advance(9)) == [(2, "first", 1), (3.008, "second", 1), (5.008, "other", 1)]
    assert [each.local_hit for each in (first, second, other)] == [0, 992, 0]


def test_a_transfer_brings_the_state_of_linear_layers() -> None:
    """So a decode worker needs no state of its own to use the blocks it has."""
    cache = PrefixCache(BlockPool(1_000, 16), hybrid=True)
    model = Scheduler(profile(), cache, 4, 1)
    text = "word" * 160
    first = sequence("first", prompt=400, tokens=1)
    first.chain = chain(text + "more" * 240)
    model.submit(first, 0)
    model.advance(9)
    local, remote = sequence("local", prompt=300, tokens=1, at=9), sequence("remote", prompt=300, tokens=1, at=9)
    remote.kv_from_remote = True
    for each in (local, remote):
        each.chain = chain(text + "else" * 140)
        model.submit(each, 9)
    assert (local.local_hit, remote.local_hit) == (0, 160)


def test_who_did_not_fit_is_tried_again_when_there_is_more_to_find() -> None:
    model = Scheduler(profile(), PrefixCache(BlockPool(4, 16)), 4, 1)
    first, second = sequence("first", prompt=40, tokens=5), sequence("second", prompt=40, tokens=1)
    second.kv_from_remote = True
    for each in (first, second):
        each.chain = chain("word" * 40)
        model.submit(each, 0)
    assert transfers(model.advance(1)) == [], "three blocks of four are taken"
    assert transfers(model.advance(1.04)) == ["second"], "two of the three can be shared"


def test_chunks_that_are_done_are_found_while_the_rest_is_not() -> None:
    model = Scheduler(profile(), PrefixCache(BlockPool(1_000, 16)), 4, 1, chunk_tokens=160)
    first, second = sequence("first", tokens=1), sequence("second", tokens=1)
    first.chain, second.chain = chain("word" * 1_000), chain("word" * 1_000)
    model.submit(first, 0)
    model.advance(1.4)  # two chunks of 0.16 s, after the second that every prefill takes
    model.stop(first, 1.4)
    model.submit(second, 1.4)
    assert times(model.advance(9)) == [(1.4 + 1 + 0.68, "second", 1)]
    assert second.local_hit == 320


def test_answers_are_found_too() -> None:
    model = Scheduler(profile(), PrefixCache(BlockPool(1_000, 16)), 4, 1)
    first = sequence("first", prompt=16, tokens=32)
    first.chain, first.next_words = chain("word" * 16), lambda count: [" abc"] * count
    model.submit(first, 0)
    model.advance(9)
    second = sequence("second", prompt=64, tokens=1, at=9)
    second.chain = chain("word" * 16 + " abc" * 32 + "more" * 16)
    model.submit(second, 9)
    assert second.local_hit == 32, "the KV of the token made last was never computed"


def test_blocks_of_a_lease_are_kept_until_they_are_given_back() -> None:
    pool = BlockPool(10, 16)
    model = Scheduler(profile(), pool, 4, 1)
    holder = sequence("a", prompt=100, tokens=1, holds_kv=True)
    model.submit(holder, 0)
    model.submit(sequence("b", prompt=100, tokens=1), 0)
    model.advance(5)
    assert (len(holder.blocks), pool.used, len(model.queue)) == (7, 7, 1)
    pool.give_back(holder.blocks)
    model.blocks_freed(5)
    assert times(model.advance(7)) == [(6.1, "b", 1)]
    assert pool.used == 0


def test_speculative_decoding_makes_more_than_one_token_per_step() -> None:
    model = scheduler(decode={"steps": [{"batch": 1, "seconds": 0.1}], "maxBatch": 4, "tokensPerStep": 2.5})
    model.submit(sequence("a", tokens=9), 0)
    assert [tokens for _, _, tokens in times(model.advance(9))] == [1, 2, 3, 2, 1], "the last step is cut at the limit"


def test_a_failed_transfer_can_be_computed_here() -> None:
    model = scheduler()
    failing = sequence("a", kv_from_remote=True, tokens=1)
    model.submit(failing, 0)
    model.advance(0)
    model.recompute(failing, 1)
    assert times(model.advance(9)) == [(3, "a", 1)]


@pytest.mark.parametrize(
    ("state", "moment"),
    [(State.QUEUED, 0.5), (State.PREFILLING, 1.5), (State.DECODING, 4.0)],
)
def test_stopping_frees_a_request_wherever_it_is(state: State, moment: float) -> None:
    pool = BlockPool(1_000, 16)
    model = Scheduler(profile(), pool, 4, 1)
    model.submit(sequence("first", prompt=0, tokens=1), 0)
    victim = sequence("victim", tokens=1_000)
    model.submit(victim, 0)
    model.advance(moment)
    assert victim.state is state
    model.stop(victim, moment)
    model.stop(victim, moment)
    model.submit(sequence("next", prompt=0, tokens=1, at=moment), moment)
    assert [name for _, name, _ in times(model.advance(60))][-1] == "next"
    assert (pool.used, model.running, model.waiting, model.next_event()) == (0, 0, 0, None)


@pytest.mark.parametrize("arrived", [False, True])
def test_stopping_a_request_that_waits_for_kv(arrived: bool) -> None:
    pool = BlockPool(1_000, 16)
    model = Scheduler(profile(), pool, 1, 1)
    early, victim = (sequence(name, kv_from_remote=True) for name in ("early", "victim"))
    for each in (early, victim):
        model.submit(each, 0)
    model.advance(0)
    if arrived:
        model.kv_arrived(early, 0)
        model.kv_arrived(victim, 0)
        assert victim.state is State.KV_READY
    model.stop(victim, 0)
    model.stop(early, 0)
    assert (pool.used, model.running, model.waiting) == (0, 0, 0)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["local", "lease", "remote", "arrive", "fail", "stop", "free", "wait"]),
        st.integers(1, 300),
        st.integers(1, 12),
        st.floats(0, 3),
    ),
    max_size=40,
)


@pytest.mark.parametrize("attention", [None, "full", "hybrid"])
@settings(max_examples=60)
@given(actions=ACTIONS, blocks=st.integers(20, 60), chunk=st.sampled_from([None, 32, 100]), by_priority=st.booleans())
def test_nothing_is_lost_whatever_happens(
    attention: str | None,
    actions: list[tuple[str, int, int, float]],
    blocks: int,
    chunk: int | None,
    by_priority: bool,
) -> None:
    """Blocks are conserved, limits hold, events are in time order, who is not stopped gets all its tokens."""
    pool = BlockPool(blocks, 16)
    cache = PrefixCache(pool, hybrid=attention == "hybrid")
    model = Scheduler(profile(), cache, 3, 1, chunk_tokens=chunk, by_priority=by_priority)
    now, made = 0.0, list[Sequence]()
    gained, stopped, transferring = defaultdict[str, int](int), set[Sequence](), list[Sequence]()
    last = 0.0

    def collect() -> None:
        nonlocal last
        for event in model.advance(now):
            assert last <= event.at <= now
            last = event.at
            gained[event.sequence.request_id] += event.tokens
            if event.start_transfer and event.sequence not in stopped:
                transferring.append(event.sequence)
        assert model.running <= 3
        held = {block for each in made for block in each.blocks}
        assert pool.used == len(held) <= pool.total
        if attention is None:
            assert len(held) == sum(len(each.blocks) for each in made)

    def end_leases() -> None:
        for each in made:
            if each.holds_kv and each.state is State.FINISHED and each.blocks:
                pool.give_back(each.blocks)
                each.blocks = no_blocks()
        model.blocks_freed(now)

    for number, (action, prompt, tokens, delay) in enumerate(actions):
        now += delay
        collect()
        if action in ("local", "lease", "remote"):
            each = sequence(
                str(number), prompt, tokens, now, kv_from_remote=action == "remote", holds_kv=action == "lease"
            )
            each.priority, each.next_words = prompt % 3, lambda count: ["word"] * count
            each.chain = chain("word" * prompt) if attention else None
            made.append(each)
            model.submit(each, now)
        elif action == "arrive" and transferring:
            model.kv_arrived(transferring.pop(0), now)
        elif action == "fail" and transferring:
            model.recompute(transferring.pop(0), now)
        elif action == "stop" and made:
            victim = made[prompt % len(made)]
            stopped.add(victim)
            model.stop(victim, now)
            if victim in transferring:
                transferring.remove(victim)
        elif action == "free":
            end_leases()
        collect()
    for _ in range(len(made) * 4 + 1):
        now += 100
        collect()
        end_leases()
        while transferring:
            model.kv_arrived(transferring.pop(0), now)
    now += 100
    collect()
    end_leases()
    for each in made:
        assert each.state is State.FINISHED
        if each not in stopped:
            assert gained[each.request_id] == each.max_tokens
    assert (pool.used, model.running, model.waiting) == (0, 0, 0)
