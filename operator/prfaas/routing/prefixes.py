"""How much of a prompt a prefix cache spares: what "cached length" means, for full attention and for hybrid models.

A prompt is a row of block names; a name stands for the block and all before it, so that equal names are equal prefixes.

    full      the longest run of cached blocks from the start
    hybrid    a recurrent state is reusable only at exactly the length at which it was kept, a block boundary; the hit
              is the longest prefix of the run that has a state. One is kept at the end of each prefill, and every
              `state_every` blocks if that is set: two requests may share a long prefix and no state

At least one token is always left to compute, so a prompt that is cached whole is a block short of it. Rows of full
attention are useful without a state where the state comes anyway: over a link only the rows beyond the run are sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Semantics = Literal["full", "hybrid"]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a cache holds of a prompt, tokens."""

    reusable: int
    """Need not be computed."""
    rows: int
    """Of these the rows of full attention are there; at least `reusable`."""


MISS = Hit(0, 0)


class PrefixCache:
    """One cluster's cache of block rows and states, least recently used first to go."""

    def __init__(
        self,
        semantics: Semantics,
        block_tokens: int,
        *,
        state_every: int = 0,
        capacity_bytes: float = float("inf"),
        row_bytes: float = 0.0,
        state_bytes: float = 0.0,
    ) -> None:
        """`row_bytes`: of one token's rows; `state_bytes`: of one recurrent state; both count against the capacity."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self.block_tokens = block_tokens
        self._hybrid = semantics == "hybrid"
        self._every = state_every
        self._capacity = capacity_bytes
        self._row = row_bytes * block_tokens
        self._state = state_bytes
        self._used = 0.0
        self._held: OrderedDict[tuple[int, bool], None] = OrderedDict()
        """(block, is a state), the least recently used first."""

    @property
    def used_bytes(self) -> float:
        """Bytes held."""
        return self._used

    def look(self, blocks: Sequence[int], tokens: int) -> Hit:
        """What there is of a prompt of `tokens` tokens; `blocks` names its blocks, perhaps a last partial one."""
        held, size = self._held, self.block_tokens
        run = 0
        for block in blocks[: max(0, (tokens - 1) // size)]:
            if (block, False) not in held:
                break
            run += 1
        usable = run
        if self._hybrid:
            while usable and (blocks[usable - 1], True) not in held:
                usable -= 1
        return Hit(usable * size, run * size)

    def keep(self, blocks: Sequence[int], tokens: int, *, states: bool = True) -> None:
        """Hold a prompt's full blocks. `states`: it was computed here, so there are states as well, not rows alone."""
        full = blocks[: tokens // self.block_tokens]
        held = self._held
        for index in range(len(full) - 1, -1, -1):  # the start is used last: what hangs on it goes first
            block = full[index]
            last = index + 1 == len(full)
            if self._hybrid and states and (last or (self._every and (index + 1) % self._every == 0)):
                self._touch((block, True), self._state)
            elif (block, True) in held:
                held.move_to_end((block, True))
            self._touch((block, False), self._row)
        while self._used > self._capacity and held:
            (_, is_state), _ = held.popitem(last=False)
            self._used -= self._state if is_state else self._row

    def _touch(self, key: tuple[int, bool], size: float) -> None:
        if key in self._held:
            self._held.move_to_end(key)
        else:
            self._held[key] = None
            self._used += size
