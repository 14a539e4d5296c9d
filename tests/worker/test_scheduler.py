"""When a worker does what: prefills one by one, decode in steps, transfers while there is a slot."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.worker.blocks import BlockPool, no_blocks
from prfaas.worker.scheduler import Advanced, Scheduler, Sequence, State
from tests.worker.rig import profile

# rig.profile: prefill 1 s + 1 ms per token; a step every 0.1 s; at most four requests at a time.


def scheduler(blocks: int = 1_000, max_batch: int = 1_024, time_scale: float = 1, **changes: Any) -> Scheduler:
    """A scheduler over a pool of blocks of 16 tokens."""
    return Scheduler(profile(**changes), BlockPool(blocks, 16), max_batch, time_scale)


def sequence(name: str, prompt: int = 1_000, tokens: int = 3, at: float = 0, **fields: Any) -> Sequence:
    """A request that arrives at a time."""
    return Sequence(name, prompt, tokens, at, **fields)


def times(events: list[Advanced]) -> list[tuple[float, str, int]]:
    """When which request gained how many tokens."""
    return [(round(event.at, 6), event.sequence.request_id, event.tokens) for event in events if event.tokens]


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
    assert [event.start_transfer for event in model.advance(2.05)] == [True]
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
    assert [event.start_transfer for event in model.advance(2.2)] == [False, True]
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
    model.submit(sequence("a", prompt=100, tokens=20), 0)  # 8 of 10 blocks
    model.submit(sequence("b", prompt=100, tokens=20), 0)
    model.submit(sequence("c", prompt=10, tokens=1), 0)
    assert (model.running, len(model.queue)) == (1, 2), "c would fit, but b is first"
    model.advance(2.9)
    assert len(model.queue) == 2
    model.advance(3.1)  # a, prefilled at 1.1, is done at 3.0
    assert len(model.queue) == 1


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


@settings(max_examples=60)
@given(actions=ACTIONS, blocks=st.integers(20, 60))
def test_nothing_is_lost_whatever_happens(actions: list[tuple[str, int, int, float]], blocks: int) -> None:
    """Blocks are conserved, limits hold, events are in time order, who is not stopped gets all its tokens."""
    pool = BlockPool(blocks, 16)
    model = Scheduler(profile(), pool, 3, 1)
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
        held = sum(len(each.blocks) for each in made)
        assert pool.used == held <= pool.total

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
            made.append(
                sequence(
                    str(number), prompt, tokens, now, kv_from_remote=action == "remote", holds_kv=action == "lease"
                )
            )
            model.submit(made[-1], now)
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
