"""The pool of KV blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.worker.blocks import BlockPool, Blocks


@given(st.lists(st.integers(-3, 80), max_size=50))
def test_no_block_is_handed_out_twice(moves: list[int]) -> None:
    pool = BlockPool(20, 4)
    held: list[Blocks] = []
    for move in moves:
        if move < 0 and held:
            pool.give_back(held.pop(move % len(held)))
        elif move >= 0:
            free = pool.total - pool.used
            taken = pool.take(move)
            assert (taken is None) == (-(-move // 4) > free)
            if taken is not None:
                held.append(taken)
        out = [block for blocks in held for block in blocks]
        assert len(set(out)) == len(out) == pool.used <= 20
        assert all(0 <= block < 20 for block in out)


@pytest.mark.parametrize(("total", "size"), [(0, 16), (1, 0)])
def test_an_empty_pool_is_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BlockPool(total, size)
