"""The prefix cache: which blocks of a request are already there, and which of its own others may find.

Full attention: the longest run of blocks from the start. Hybrid models also keep the state of their linear layers, one
block each, and only at some block boundaries; what can be reused is the longest run that ends where a state is. States
are kept where vLLM keeps them: at the last boundary before the prompt's last token, at the end of a run of blocks that
was found without a state (so that the third request with a common prefix finds one), and every `retention` tokens; with
retention None at the end of every chunk, with 0 nowhere else. At least one token of a request is always computed.

What happens is told to a journal in the form of KV events; None where nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prfaas.worker.blocks import NONE, BlockPool, Blocks, no_blocks
from prfaas.worker.hashing import Chain, published

FULL_GROUP, STATE_GROUP = 0, 1
STATE = 0x9E3779B97F4A7C15
"""Told apart from the attention block with the same hash by this pattern in its key."""

Journal = Callable[[dict[str, Any]], None]


class Holder(Protocol):
    """A request, as far as its blocks go."""

    chain: Chain | None
    blocks: Blocks
    registered: int
    junction: int


@dataclass(frozen=True)
class Hit:
    """What a request need not compute."""

    tokens: int = 0
    blocks: Blocks = field(default_factory=no_blocks)
    state: Blocks = field(default_factory=no_blocks)
    """The block of the state at the end of the run; of a model with attention only, none. A request copies it."""
    junction: int = 0
    """Up to where blocks were found beyond `tokens`, 0: no further. No state was kept there; this request keeps it."""


class PrefixCache:
    """Finds and registers blocks of one pool."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        hybrid: bool = False,
        retention: int | None = 0,
        journal: Journal | None = None,
        whole_hashes: bool = False,
    ) -> None:
        self.pool, self.hybrid, self._retention = pool, hybrid, retention
        self.journal = journal
        self.growth = 0
        """How often blocks became findable."""
        self._states: set[int] = set()
        """Blocks in which a state was registered."""
        self._whole: dict[int, bytes] | None = {} if whole_hashes else None
        """The whole hash of every block that can be found, where events carry them."""
        pool.on_evict = self._evicted

    def find(self, chain: Chain | None, tokens: int, *, states_come: bool = False) -> Hit:
        """What is there of a request of so many tokens. `states_come`: another engine sends the state."""
        if chain is None:
            return Hit()
        size, pool = self.pool.block_size, self.pool
        blocks = no_blocks()
        for key in chain.keys[: max(0, tokens - 1) // size]:
            block = pool.find(key)
            if block == NONE:
                break
            blocks.append(block)
        if not self.hybrid or states_come:
            return Hit(len(blocks) * size, blocks)
        found = len(blocks)
        while blocks:
            state = pool.find(chain.keys[len(blocks) - 1] ^ STATE)
            if state != NONE:
                break
            del blocks[-1]
        junction = found * size if found > len(blocks) else 0
        at_end = no_blocks()
        if blocks:
            at_end.append(state)
        return Hit(len(blocks) * size, blocks, at_end, junction)

    def room_for(self, hit: Hit, blocks: int) -> bool:
        """Whether a request that has this hit and needs so many blocks in all can have them."""
        idle = sum(map(self.pool.is_free, hit.blocks))
        return blocks - len(hit.blocks) <= self.pool.free - idle

    def admit(self, holder: Holder, hit: Hit, blocks: int) -> bool:
        """Give a request what was found and new blocks up to so many; False, and nothing given, if too few are free."""
        if not self.room_for(hit, blocks):
            return False
        self.pool.share(hit.blocks)
        self.pool.share(hit.state)
        self.pool.give_back(hit.state)
        new = self.pool.take(blocks - len(hit.blocks))
        assert new is not None
        holder.blocks = hit.blocks + new
        holder.registered, holder.junction = len(hit.blocks), hit.junction
        return True

    def extend(self, holder: Holder, tokens: int) -> bool:
        """Give a request blocks for so many tokens in all; False if there are too few."""
        more = self.pool.take(self.pool.blocks_for(tokens) - len(holder.blocks))
        if more is None:
            return False
        holder.blocks.extend(more)
        return True

    def computed(self, holder: Holder, tokens: int, *, prompt_tokens: int, chunk: bool) -> None:
        """The KV of a request's first `tokens` tokens is there: others may find its full blocks.

        `chunk`: a chunk of a prefill ended there, or a transfer, so that the state at that length exists.
        """
        chain = holder.chain
        if chain is None:
            return
        full = min(tokens // self.pool.block_size, len(chain.keys))
        first = holder.registered
        for index in range(first, full):
            self.pool.register(holder.blocks[index], chain.keys[index])
        if full > first:
            holder.registered = full
            self.growth += 1
            self._tell_stored(chain, first, full, FULL_GROUP)
        on_boundary = tokens == full * self.pool.block_size
        if self.hybrid and full and on_boundary and self._keeps(holder, tokens, prompt_tokens, chunk):
            self._keep_state(chain, full - 1)

    def give_back(self, holder: Holder) -> None:
        """A request needs its blocks no more."""
        self.pool.give_back(holder.blocks)
        holder.blocks, holder.registered = no_blocks(), 0

    def report_reused(self, chain: Chain, blocks: int) -> None:
        """Tell of blocks that were found as if they were new, for a request that asks for that."""
        if blocks:
            self._tell_stored(chain, 0, blocks, FULL_GROUP)

    def reset(self) -> bool:
        """Nothing can be found any more; False, and nothing changed, while blocks are in use."""
        if not self.pool.forget_all():
            return False
        self._states.clear()
        if self._whole is not None:
            self._whole.clear()
        if self.journal is not None:
            self.journal({"type": "AllBlocksCleared"})
        return True

    def boundaries(self, tokens: int, junction: int) -> tuple[int, ...]:
        """Where a prefill of so many tokens must end a chunk, so that the state there can be kept."""
        size = self.pool.block_size
        return (junction, (tokens - 1) // size * size, tokens // size * size) if self.hybrid else ()

    def _keeps(self, holder: Holder, tokens: int, prompt_tokens: int, chunk: bool) -> bool:
        size = self.pool.block_size
        if self._retention is None:
            return True
        if chunk and tokens in (holder.junction, (prompt_tokens - 1) // size * size):
            return True
        return bool(self._retention) and tokens % max(size, self._retention // size * size) == 0

    def _keep_state(self, chain: Chain, index: int) -> None:
        if self.pool.find(chain.keys[index] ^ STATE) != NONE:
            return
        taken = self.pool.take(1)
        if taken is None:
            return
        self._states.add(taken[0])
        self.pool.register(taken[0], chain.keys[index] ^ STATE)
        self.pool.give_back(taken)  # a copy for others: no request needs it to go on
        self._tell_stored(chain, index, index + 1, STATE_GROUP)

    def _tell_stored(self, chain: Chain, first: int, last: int, group: int) -> None:
        if self.journal is None:
            return
        hashes = published(chain, first, last)
        if self._whole is not None:
            self._whole.update(zip(chain.keys[first:last], hashes, strict=True))
        kinds = {FULL_GROUP: "full_attention", STATE_GROUP: "mamba"}
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": published(chain, first - 1, first)[0] if first else None,
            "token_ids": chain.ids(first, last),
            "block_size": self.pool.block_size,
            "lora_id": chain.lora_id,
            "medium": "GPU",
            "lora_name": chain.lora_name,
            "extra_keys": [tuple(key[1] for key in chain.extra(at)) or None for at in range(first, last)],
            "group_idx": group,
            "kv_cache_spec_kind": kinds[group],
        }
        # vLLM leaves out what is at its default.
        self.journal(event if chain.session is None else event | {"session_id": chain.session})

    def _evicted(self, block: int, key: int) -> None:
        group = STATE_GROUP if block in self._states else FULL_GROUP
        if group == STATE_GROUP:
            self._states.discard(block)
            key ^= STATE
        if self.journal is None:
            return
        shown: int | bytes = key
        if self._whole is not None:
            there = self.pool.find(key) != NONE or self.pool.find(key ^ STATE) != NONE
            shown = self._whole[key] if there else self._whole.pop(key)
        self.journal({"type": "BlockRemoved", "block_hashes": [shown], "medium": "GPU", "group_idx": group})
