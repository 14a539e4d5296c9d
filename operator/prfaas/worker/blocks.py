"""The KV cache of one instance as a pool of numbered blocks, and which of them hold something that can be found again.

A block is taken, shared by other requests that find it, given back by each, and with its last owner gone it is free. A
free block that was registered under a key can still be found until its turn to be taken comes; the order is vLLM's:
blank blocks first, then those never used, then the registered ones, the longest unused first and of one request its
last block first.

Everything per block is in arrays, 26 bytes of them, and only as far as blocks were ever used: a pool of hundreds of
thousands of blocks must fit beside twenty others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol, TypeAlias

Blocks: TypeAlias = "array[int]"
"""Block ids, four bytes each: a batch of long requests holds hundreds of thousands."""

NONE = -1
_IN_USE = -2
"""As the successor of a block: it is not in the line of free blocks."""
_SMALLEST_TABLE = 64


def no_blocks() -> Blocks:
    """An empty list of blocks."""
    return array("I")


class Watcher(Protocol):
    """Who is told what becomes of blocks."""

    def taken(self, blocks: Blocks) -> None:
        """Blocks hold something new from now on."""

    def shared(self, blocks: Blocks) -> None:
        """Blocks were found, and are used once more."""

    def forgotten(self) -> None:
        """No block holds anything any more."""


class BlockPool:
    """`total` blocks of `block_size` tokens. Ids are handed out low first, so that memory goes with the peak use."""

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {total} of {block_size}")
        self.total, self.block_size = total, block_size
        self.on_evict: Callable[[int, int], None] | None = None
        """Called with a block and its key when the block is taken for something else."""
        self.watcher: Watcher | None = None
        self._clear()

    def _clear(self) -> None:
        self._blank = no_blocks()
        self._untouched = 0
        self._keys = array("Q")
        """What each block is registered under, 0: nothing."""
        self._shared = array("H")
        """Owners of each block in use beside the first."""
        self._before, self._after = array("i"), array("i")
        """The line of free registered blocks."""
        self._first = self._last = NONE
        self._findable = 0
        self._table = array("i", [NONE]) * _SMALLEST_TABLE
        """By the low bits of a key: a block registered under it; the others follow in `_next`."""
        self._next = array("i")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self._untouched - len(self._blank) - self._findable

    @property
    def free(self) -> int:
        """Blocks that can be taken, those that can still be found included."""
        return self.total - self.used

    def take(self, count: int) -> Blocks | None:
        """So many blocks, None if there are not enough."""
        if count > self.free:
            return None
        again = min(count, len(self._blank))
        blocks = self._blank[len(self._blank) - again :]
        del self._blank[len(self._blank) - again :]
        fresh = min(count - again, self.total - self._untouched)
        blocks.extend(range(self._untouched, self._untouched + fresh))
        self._touch(fresh)
        if len(blocks) < count:
            blocks.extend(self._evict(count - len(blocks)))
        if self.watcher is not None:
            self.watcher.taken(blocks)
        return blocks

    def give_back(self, blocks: Blocks) -> None:
        """One owner less for each block, in the order of their tokens: the last is the first to be taken again."""
        keys, shared, before, after = self._keys, self._shared, self._before, self._after
        for block in reversed(blocks):
            if shared[block]:
                shared[block] -= 1
            elif not keys[block]:
                self._blank.append(block)
            else:
                before[block], after[block] = self._last, NONE
                if self._last == NONE:
                    self._first = block
                else:
                    after[self._last] = block
                self._last = block
                self._findable += 1

    # Finding blocks again.

    def find(self, key: int) -> int:
        """A block registered under a key, NONE if there is none."""
        block = self._table[key & (len(self._table) - 1)]
        keys, following = self._keys, self._next
        while block != NONE and keys[block] != key:
            block = following[block]
        return block

    def is_free(self, block: int) -> bool:
        """Whether a registered block has no owner."""
        return self._after[block] != _IN_USE

    def share(self, blocks: Blocks) -> None:
        """One owner more for each of these registered blocks."""
        if self.watcher is not None:
            self.watcher.shared(blocks)
        after, shared = self._after, self._shared
        for block in blocks:
            if after[block] == _IN_USE:
                shared[block] += 1
            else:
                self._leave_line(block)

    def key_of(self, block: int) -> int:
        """What a block is registered under, 0: nothing."""
        return self._keys[block]

    def register(self, block: int, key: int) -> None:
        """A block in use can be found under a key, above 0, from now on; others may be under the same key."""
        self._keys[block] = key
        slot = key & (len(self._table) - 1)
        self._next[block], self._table[slot] = self._table[slot], block

    def forget_all(self) -> bool:
        """Nothing can be found any more; False, and nothing changed, while blocks are in use."""
        if self.used:
            return False
        self._clear()
        if self.watcher is not None:
            self.watcher.forgotten()
        return True

    def _touch(self, fresh: int) -> None:
        self._untouched += fresh
        self._keys.frombytes(bytes(8 * fresh))
        self._shared.frombytes(bytes(2 * fresh))
        for line in (self._before, self._after, self._next):
            line.extend(array("i", [_IN_USE]) * fresh)
        if self._untouched > len(self._table):
            self._grow()

    def _grow(self) -> None:
        size = len(self._table)
        while size < self._untouched:
            size *= 2
        self._table = array("i", [NONE]) * size
        for block, key in enumerate(self._keys):
            if key:
                self.register(block, key)

    def _evict(self, count: int) -> Blocks:
        """The first so many blocks of the line, which are found no more."""
        keys, after, following, table = self._keys, self._after, self._next, self._table
        mask = len(table) - 1
        evicted, block = no_blocks(), self._first
        for _ in range(count):
            key = keys[block]
            slot = key & mask
            at = table[slot]
            if at == block:
                table[slot] = following[block]
            else:
                while following[at] != block:
                    at = following[at]
                following[at] = following[block]
            keys[block] = 0
            evicted.append(block)
            if self.on_evict is not None:
                self.on_evict(block, key)
            behind, after[block] = after[block], _IN_USE
            block = behind
        self._first = block
        if block == NONE:
            self._last = NONE
        else:
            self._before[block] = NONE
        self._findable -= count
        return evicted

    def _leave_line(self, block: int) -> None:
        before, after = self._before[block], self._after[block]
        if before == NONE:
            self._first = after
        else:
            self._after[before] = after
        if after == NONE:
            self._last = before
        else:
            self._before[after] = before
        self._after[block] = _IN_USE
        self._findable -= 1
