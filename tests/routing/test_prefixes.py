"""What a prefix cache spares, for full attention and for hybrid models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.prefixes import Hit, PrefixCache, Semantics

SIZE = 100


def cache(semantics: Semantics = "full", **more: float) -> PrefixCache:
    return PrefixCache(semantics, SIZE, **more)  # type: ignore[arg-type]  # state_every is an int


def test_full_attention_reuses_the_longest_run_from_the_start() -> None:
    one = cache()
    one.keep([1, 2, 3], 300)
    assert one.look([1, 2, 9], 300) == Hit(200, 200)
    assert one.look([9, 2, 3], 300) == Hit(0, 0)


def test_a_last_partial_block_is_not_kept() -> None:
    one = cache()
    one.keep([1, 2, 3], 299)
    assert one.look([1, 2, 3], 400) == Hit(200, 200)


def test_one_token_at_least_is_computed() -> None:
    one = cache()
    one.keep([1, 2, 3], 300)
    assert one.look([1, 2, 3], 300) == Hit(200, 200)
    assert one.look([1, 2, 3, 4], 301) == Hit(300, 300)


def test_a_hybrid_model_reuses_a_state_at_exactly_its_length() -> None:
    one = cache("hybrid")
    one.keep([1, 2, 3], 300)
    assert one.look([1, 2, 3, 4], 400) == Hit(300, 300)
    assert one.look([1, 2, 9, 9], 400) == Hit(0, 200), "a long common prefix, and no state at its end"
    one.keep([1, 2], 200)
    assert one.look([1, 2, 9, 9], 400) == Hit(200, 200)


def test_states_on_the_way_can_be_kept() -> None:
    one = cache("hybrid", state_every=2)
    one.keep([1, 2, 3, 4, 5], 500)
    assert one.look([1, 2, 3, 9], 400) == Hit(200, 300)


def test_rows_that_came_over_a_link_bring_no_state() -> None:
    one = cache("hybrid")
    one.keep([1, 2, 3], 300, states=False)
    assert one.look([1, 2, 3, 4], 400) == Hit(0, 300)


def test_the_least_recently_used_goes_first_and_of_a_prompt_its_end() -> None:
    one = cache(capacity_bytes=400.0, row_bytes=1.0)
    one.keep([1, 2], 200)
    one.keep([3, 4], 200)
    assert one.used_bytes == 400
    one.keep([5], 100)
    assert one.look([1, 2, 9], 300) == Hit(100, 100)
    assert one.look([3, 4, 9], 300) == Hit(200, 200)


def test_states_count_against_the_capacity() -> None:
    one = cache("hybrid", capacity_bytes=1000.0, row_bytes=1.0, state_bytes=500.0)
    one.keep([1, 2], 200)
    assert one.used_bytes == 700
    one.keep([3, 4], 200)
    assert one.used_bytes <= 1000
    assert one.look([3, 4, 9], 300) == Hit(200, 200)


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        PrefixCache("full", 0)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@given(PROMPTS)
def test_no_hit_is_longer_than_the_longest_common_prefix_and_hybrid_never_hits_more(prompts: list[list[int]]) -> None:
    full, hybrid = cache(), cache("hybrid")
    seen: list[list[int]] = []
    for prompt in prompts:
        names = [hash(tuple(prompt[: i + 1])) for i in range(len(prompt))]
        tokens = SIZE * len(names) + 1
        common = max((_common(names, other) for other in seen), default=0)
        found, less = full.look(names, tokens), hybrid.look(names, tokens)
        assert found == Hit(SIZE * common, SIZE * common)
        assert less.reusable <= less.rows == found.rows
        seen.append(names)
        full.keep(names, tokens)
        hybrid.keep(names, tokens)


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
