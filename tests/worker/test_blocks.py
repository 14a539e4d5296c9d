"""The pool of KV blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.worker.blocks import NONE, BlockPool, Blocks, no_blocks

Move = tuple[str, int]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 12)),
        st.tuples(st.just("give back"), st.integers(0, 99)),
        st.tuples(st.just("register"), st.integers(0, 99)),
        st.tuples(st.just("share"), st.integers(1, 6)),
    ),
    max_size=60,
)


@given(MOVES)
def test_a_block_has_its_owners_and_is_found_until_it_is_taken_again(moves: list[Move]) -> None:
    """The pool against the plainest model of it: lists of blocks, and a dictionary of keys."""
    pool = BlockPool(20, 4)
    held: list[Blocks] = []
    key_of: dict[int, int] = {}
    evicted: list[tuple[int, int]] = []
    pool.on_evict = lambda block, key: evicted.append((block, key))
    for move, number in moves:
        if move == "take":
            free = pool.free
            taken = pool.take(number)
            assert (taken is None) == (number > free)
            for block, key in evicted:
                assert key_of.pop(block) == key
                assert block in (taken or ())
            evicted.clear()
            held += [taken] if taken is not None else []
        elif move == "give back" and held:
            pool.give_back(held.pop(number % len(held)))
        elif move == "register" and held:
            for block in held[number % len(held)]:
                if block not in key_of:
                    key_of[block] = 1 + block % 6 + 64 * (number % 2)
                    pool.register(block, key_of[block])
        elif move == "share":
            found = pool.find(number)
            assert (found == NONE) == (number not in key_of.values())
            if found != NONE:
                assert key_of[found] == number
                one = no_blocks()
                one.append(found)
                pool.share(one)
                held.append(one)
        out = {block for blocks in held for block in blocks}
        assert pool.used == len(out)
        assert pool.free == 20 - len(out)
        assert all(0 <= block < 20 for block in out)
        assert all(pool.is_free(block) == (block not in out) for block in key_of)
    for blocks in held:
        pool.give_back(blocks)
    assert pool.used == 0


def test_the_block_that_was_unused_longest_is_taken_first_and_of_a_request_its_last() -> None:
    pool = BlockPool(6, 4)
    gone: list[int] = []
    pool.on_evict = lambda _, key: gone.append(key)
    first, second = pool.take(3), pool.take(3)
    assert first is not None
    assert second is not None
    for key, block in enumerate([*first, *second], start=1):
        pool.register(block, key)
    pool.give_back(second)
    pool.give_back(first)
    again = no_blocks()
    again.append(pool.find(6))
    pool.share(again)
    pool.give_back(again)
    assert pool.take(6) is not None
    assert gone == [5, 4, 3, 2, 1, 6]


def test_blank_blocks_and_untouched_ones_are_taken_before_those_that_can_be_found() -> None:
    pool = BlockPool(4, 4)
    blank, kept = pool.take(1), pool.take(2)
    assert blank is not None
    assert kept is not None
    for key, block in enumerate(kept, start=1):
        pool.register(block, key)
    pool.give_back(kept)
    pool.give_back(blank)
    assert list(pool.take(2) or ()) == [0, 3]
    assert (pool.find(1), pool.find(2)) == (1, 2)


def test_nothing_is_forgotten_while_blocks_are_in_use() -> None:
    pool = BlockPool(4, 4)
    taken = pool.take(1)
    assert taken is not None
    pool.register(taken[0], 7)
    assert not pool.forget_all()
    assert pool.find(7) == 0
    pool.give_back(taken)
    assert pool.forget_all()
    assert pool.find(7) == NONE
    assert pool.free == 4


@pytest.mark.parametrize(("total", "size"), [(0, 16), (1, 0)])
def test_an_empty_pool_is_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BlockPool(total, size)
