"""The KV cache of one instance as a pool of numbered blocks."""

from __future__ import annotations

from array import array
from typing import TypeAlias

Blocks: TypeAlias = "array[int]"
"""Block ids, four bytes each: a batch of long requests holds hundreds of thousands."""


def no_blocks() -> Blocks:
    """An empty list of blocks."""
    return array("I")


class BlockPool:
    """`total` blocks of `block_size` tokens. Ids are handed out low first, so that memory goes with the peak use."""

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {total} of {block_size}")
        self.total, self.block_size = total, block_size
        self._returned = no_blocks()
        self._untouched = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self._untouched - len(self._returned)

    def take(self, tokens: int) -> Blocks | None:
        """Blocks for so many tokens, None if there are not enough."""
        count = self.blocks_for(tokens)
        if count > self.total - self.used:
            return None
        again = min(count, len(self._returned))
        blocks = self._returned[len(self._returned) - again :]
        del self._returned[len(self._returned) - again :]
        fresh = count - again
        blocks.extend(range(self._untouched, self._untouched + fresh))
        self._untouched += fresh
        return blocks

    def give_back(self, blocks: Blocks) -> None:
        """Blocks are free again."""
        self._returned.extend(blocks)
