"""What usage, metrics and events say of the prefix cache is one and the same, whatever happens to the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.worker.config import Attention
from prfaas.worker.engine import Engine
from prfaas.worker.events import EventsConfig
from prfaas.worker.generation import Ask, Generation
from prfaas.worker.prefix import STATE, Hit, Holder
from tests.worker.rig import ManualClock, config

SIZE = 4


@dataclass
class Mirror:
    """What a router that reads the events believes to be cached: hashes, by group of layers."""

    groups: tuple[Counter[int], Counter[int]] = field(default_factory=lambda: (Counter(), Counter()))

    def told(self, event: dict[str, Any]) -> None:
        """One event."""
        if event["type"] == "AllBlocksCleared":
            for group in self.groups:
                group.clear()
            return
        group = self.groups[event["group_idx"]]
        if event["type"] == "BlockStored":
            if event["parent_block_hash"] is not None and event["group_idx"] == 0:
                assert self.groups[0][event["parent_block_hash"]], "a block is told of after its parent"
            assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
            group.update(event["block_hashes"])
        else:
            for each in event["block_hashes"]:
                assert group[each] > 0, "only what was stored is removed"
                group[each] -= 1

    def cached(self, holder: Holder, tokens: int, hybrid: bool) -> int:
        """Tokens of a prompt that a router would call cached."""
        assert holder.chain is not None
        usable = holder.chain.keys[: (tokens - 1) // SIZE]
        run = next((at for at, key in enumerate(usable) if not self.groups[0][key]), len(usable))
        if hybrid:
            run = next((at for at in range(run, 0, -1) if self.groups[1][usable[at - 1]]), 0)
        return run * SIZE


@dataclass
class World:
    """An engine that is driven by hand, its mirror, and every request it got."""

    engine: Engine
    clock: ManualClock
    mirror: Mirror = field(default_factory=Mirror)
    made: list[Generation] = field(default_factory=list)

    def submit(self, prompt: str, limit: int, priority: int) -> None:
        """One request."""
        raw = "".join(letter * 4 for letter in prompt).encode()
        ask = Ask(f"request-{len(self.made)}", raw, len(prompt), limit, priority=priority)
        self.made.append(self.engine.submit(ask))

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)
        self.engine.turn(self.clock.now())

    def value(self, name: str, **labels: str) -> float:
        """One series."""
        shown = {"model_name": "org/model", "engine": "0"} | labels
        return self.engine.metrics.registry.get_sample_value(name, shown) or 0.0


def world(attention: Attention, by_priority: bool) -> World:
    """25 blocks are the longest request; there are 40."""
    clock = ManualClock()
    made = World(
        Engine(
            config(
                block_size=SIZE,
                num_gpu_blocks=40,
                max_model_len=100,
                max_num_batched_tokens=12,
                attention=attention,
                time_scale=1,
                scheduling_policy="priority" if by_priority else "fcfs",
                kv_events=EventsConfig(enable_kv_cache_events=True),
            ),
            clock,
        ),
        clock,
    )
    cache, hybrid = made.engine.cache, attention == "hybrid"
    cache.journal = made.mirror.told
    admit = cache.admit

    def checked(holder: Holder, hit: Hit, blocks: int) -> bool:
        tokens = len(holder.chain.keys) * SIZE + SIZE if holder.chain is not None else 0
        assert hit.tokens <= made.mirror.cached(holder, tokens, hybrid)
        assert hit.tokens == made.mirror.cached(holder, hit.tokens + 1, hybrid)
        return admit(holder, hit, blocks)

    cache.admit = checked  # type: ignore[method-assign]  # watched, not replaced
    return made


PROMPTS = st.lists(st.sampled_from(["aaaa", "bbbb", "c", "dddddd"]), min_size=1, max_size=8).map("".join)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, st.integers(1, 40), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.floats(0, 4)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("reset"), st.booleans()),
    ),
    max_size=25,
)


@pytest.mark.parametrize("attention", ["full", "hybrid"])
@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, by_priority=st.booleans())
def test_usage_metrics_and_events_agree(attention: Attention, actions: list[Any], by_priority: bool) -> None:
    asyncio.run(_agree(attention, actions, by_priority))


async def _agree(attention: Attention, actions: list[Any], by_priority: bool) -> None:
    made = world(attention, by_priority)
    for action, *values in actions:
        if action == "submit":
            made.submit(*values)
        elif action == "wait":
            made.wait(*values)
        elif action == "abort" and made.made:
            made.engine.abort(made.made[values[0] % len(made.made)])
        elif action == "reset":
            made.engine.reset_prefix_cache(reset_running=values[0])
    for _ in range(12 * len(made.made)):
        made.wait(50)
    assert all(each.finish_reason is not None for each in made.made)
    answered = [each for each in made.made if each.first_token is not None]
    admitted = [each for each in made.made if each.sequence.admitted]

    # Metrics are the sums of what each usage says.
    assert made.value("vllm:prompt_tokens_cached_total") == sum(each.cached_tokens for each in answered)
    assert made.value("vllm:prompt_tokens_total") == sum(each.sequence.prompt_tokens for each in answered)
    hits = made.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    assert hits == made.value("vllm:prompt_tokens_cached_total")
    computed = made.value("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert computed + hits == made.value("vllm:prompt_tokens_total")
    assert made.value("vllm:generation_tokens_total") == sum(each.sequence.generated for each in made.made)
    ended = sum(each.sequence.prompt_tokens - each.cached_tokens for each in made.made)
    assert made.value("vllm:request_prefill_kv_computed_tokens_sum") == ended
    assert made.value("vllm:num_preemptions_total") == sum(each.sequence.preemptions for each in made.made)
    assert made.value("vllm:request_num_preemptions_sum") == made.value("vllm:num_preemptions_total")
    # The cache was asked at each first admission.
    assert made.value("vllm:prefix_cache_hits_total") == sum(each.sequence.local_hit for each in admitted)
    assert made.value("vllm:prefix_cache_queries_total") == sum(each.sequence.prompt_tokens for each in admitted)

    # And what the events say is there is there, block for block.
    pool = made.engine.pool
    assert pool.used == 0
    for group in (0, 1):
        for key, count in made.mirror.groups[group].items():
            assert (count > 0) == (pool.find(key if group == 0 else key ^ STATE) >= 0)


async def test_a_request_that_must_compute_everything_is_not_counted_as_a_query() -> None:
    made = world("full", False)
    for reads in (True, False, True):
        made.made.append(made.engine.submit(Ask("r", b"word" * 20, 20, 1, reads_cache=reads)))
        made.wait(50)
    assert [each.cached_tokens for each in made.made] == [0, 0, 16]
    assert made.value("vllm:prefix_cache_queries_total") == 40
    assert made.value("vllm:prefix_cache_hits_total") == 16


async def test_without_prefix_caching_nothing_is_found() -> None:
    engine = Engine(config(prefix_caching=False, time_scale=1), clock := ManualClock())
    made = World(engine, clock)
    for _ in range(2):
        made.submit("a" * 100, 1, 0)
        made.wait(50)
    assert [each.cached_tokens for each in made.made] == [0, 0]
    assert made.value("vllm:prefix_cache_queries_total") == 0
