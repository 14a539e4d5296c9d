"""The prefix cache: runs of blocks, states of linear layers, and what of both is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from prfaas.worker.blocks import BlockPool, Blocks, no_blocks
from prfaas.worker.hashing import Chain, Hasher, Lora
from prfaas.worker.prefix import Hit, PrefixCache

SIZE = 4
HASHER = Hasher("sha256", SIZE, python_hash_seed=None, random_seed=b"")


@dataclass
class Request:
    """The least that has blocks."""

    chain: Chain | None
    tokens: int
    blocks: Blocks = field(default_factory=no_blocks)
    registered: int = 0
    junction: int = 0


class Cache(PrefixCache):
    """A cache with a journal, over as many blocks as a test wants."""

    def __init__(self, blocks: int = 100, **options: Any) -> None:
        self.told: list[dict[str, Any]] = []
        super().__init__(BlockPool(blocks, SIZE), journal=self.told.append, **options)

    def request(self, tokens: str, **options: Any) -> Request:
        """A request of one token per letter."""
        raw = "".join(f"{letter}{letter}{letter}{letter}" for letter in tokens).encode()
        keeps = self._whole is not None
        return Request(Chain(HASHER, raw, keep_tokens=True, keep_hashes=keeps, **options), len(tokens))

    def run(self, request: Request, *stops: int) -> Hit:
        """Prefill a request, ending chunks at these lengths too; it keeps its blocks."""
        hit = self.find(request.chain, request.tokens)
        assert self.admit(request, hit, self.pool.blocks_for(request.tokens))
        for end in sorted({*self.boundaries(request.tokens, hit.junction), *stops, request.tokens}):
            if end > hit.tokens:
                self.computed(request, end, prompt_tokens=request.tokens, chunk=True)
        return hit

    def ended(self, tokens: str) -> int:
        """Prefill a request to its end; how many tokens it found."""
        request = self.request(tokens)
        hit = self.run(request)
        self.give_back(request)
        return hit.tokens


def test_the_longest_run_of_blocks_from_the_start() -> None:
    cache = Cache()
    cache.ended("aaaabbbbccccd")
    assert cache.ended("aaaabbbbxxxxd") == 8
    assert cache.ended("xxxxbbbbccccd") == 0
    assert cache.ended("aaaabbbbccccd") == 12
    assert cache.ended("aaaabbbbcccc") == 8, "the last token is always computed"


def test_salt_and_adapter_keep_requests_apart() -> None:
    cache = Cache()
    cache.run(cache.request("aaaabbbbc"))
    for options in ({"salt": "s"}, {"lora": Lora("l", "/l", 1)}, {"lora": Lora("l", "/other", 1)}):
        assert cache.run(cache.request("aaaabbbbc", **options)).tokens == 0, options
        assert cache.run(cache.request("aaaabbbbc", **options)).tokens == 8, options


def test_found_blocks_are_shared_and_new_ones_taken_for_the_rest() -> None:
    cache = Cache(4)
    first, second = cache.request("aaaabbbbc"), cache.request("aaaabbbbd")
    cache.run(first)
    assert cache.pool.used == 3
    cache.run(second)
    assert (cache.pool.used, list(second.blocks[:2])) == (4, list(first.blocks[:2]))
    third = cache.request("aaaabbbbe")
    assert not cache.admit(third, cache.find(third.chain, 9), 3)
    cache.give_back(second)
    assert cache.admit(third, cache.find(third.chain, 9), 3)


def test_what_a_request_finds_is_not_taken_from_under_it() -> None:
    """Found blocks that nobody uses count as free, but cannot be both found and taken."""
    cache = Cache(4)
    cache.ended("aaaabbbbccccd")
    request = cache.request("aaaabbbbccccdddde")
    hit = cache.find(request.chain, 17)
    assert hit.tokens == 12
    assert cache.pool.free == 4
    assert not cache.admit(request, hit, 5)


def test_what_was_unused_longest_makes_room() -> None:
    cache = Cache(4)
    cache.ended("aaaab")
    cache.ended("ccccd")
    cache.ended("aaaab")
    cache.ended("eeeeffffg")
    assert cache.ended("aaaab") == 4
    assert cache.ended("ccccd") == 0


class TestHybrid:
    """A model with linear layers: blocks are of use only up to a length at which a state was kept."""

    def test_a_repeated_prompt_is_found_up_to_its_last_boundary(self) -> None:
        cache = Cache(hybrid=True)
        cache.ended("aaaabbbbccccd")
        assert cache.ended("aaaabbbbccccd") == 12

    def test_a_common_prefix_is_found_by_the_third_request(self) -> None:
        """The first kept no state where the prompts part; the second saw that, and did."""
        cache = Cache(hybrid=True)
        assert [cache.ended(f"aaaabbbb{letter * 4}z") for letter in "cdef"] == [0, 0, 8, 8]

    def test_attention_alone_finds_it_at_once(self) -> None:
        cache = Cache(hybrid=False)
        assert [cache.ended(f"aaaabbbb{letter * 4}z") for letter in "cdef"] == [0, 8, 8, 8]

    def test_where_the_state_comes_from_elsewhere_blocks_are_enough(self) -> None:
        cache = Cache(hybrid=True)
        cache.ended("aaaabbbbccccz")
        request = cache.request("aaaabbbbddddz")
        assert cache.find(request.chain, 13).tokens == 0
        assert cache.find(request.chain, 13, states_come=True).tokens == 8

    @pytest.mark.parametrize(("retention", "found"), [(0, 0), (8, 8), (4, 12), (None, 12)])
    def test_retention_keeps_more_states(self, retention: int | None, found: int) -> None:
        """A prompt of four blocks in chunks of one, then another that shares three."""
        cache = Cache(hybrid=True, retention=retention)
        request = cache.request("aaaabbbbccccddddz")
        cache.run(request, 4, 8, 12)
        cache.give_back(request)
        assert cache.ended("aaaabbbbcccceeeez") == found

    def test_a_lost_state_makes_its_blocks_useless(self) -> None:
        cache = Cache(4, hybrid=True)
        request = cache.request("aaaabbbbc")  # three blocks and the state at 8
        cache.run(request)
        cache.give_back(request)
        other = cache.pool.take(2)  # the blank block, and what was unused longest: the state
        assert other is not None
        assert cache.find(request.chain, 9) == Hit(0, no_blocks(), no_blocks(), 8)

    def test_a_pool_without_room_keeps_no_state_and_goes_on(self) -> None:
        cache = Cache(3, hybrid=True)
        cache.run(cache.request("aaaabbbbc"))
        assert cache.pool.used == 3
        assert [event["group_idx"] for event in cache.told] == [0]


class TestJournal:
    """What is told, as KV events have it."""

    def test_stored_blocks(self) -> None:
        cache = Cache()
        request = cache.request("aaaabbbbc", salt="s", lora=Lora("l", "/l", 3))
        cache.run(request, 4)
        assert request.chain is not None
        a, b = (int.from_bytes(letter * 4, "big") for letter in (b"a", b"b"))
        common = {
            "type": "BlockStored",
            "block_size": SIZE,
            "lora_id": 3,
            "medium": "GPU",
            "lora_name": "l",
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        keys = list(request.chain.keys)
        assert cache.told == [
            common
            | {
                "block_hashes": keys[:1],
                "parent_block_hash": None,
                "token_ids": [a] * 4,
                "extra_keys": [("l", "s")],
            },
            common
            | {
                "block_hashes": keys[1:],
                "parent_block_hash": keys[0],
                "token_ids": [b] * 4,
                "extra_keys": [("l",)],
            },
        ]

    def test_a_session_is_named(self) -> None:
        cache = Cache()
        cache.run(cache.request("aaaab", session="s"))
        assert cache.told[0]["session_id"] == "s"
        assert cache.run(cache.request("aaaab")).tokens == 4, "and shares its blocks with everybody"

    def test_a_hit_is_not_told_unless_asked_for(self) -> None:
        cache = Cache()
        cache.ended("aaaabbbbc")
        told = len(cache.told)
        cache.ended("aaaabbbbc")
        assert len(cache.told) == told
        request = cache.request("aaaabbbbc")
        assert request.chain is not None
        cache.report_reused(request.chain, 2)
        assert cache.told[-1]["block_hashes"] == list(request.chain.keys)

    @pytest.mark.parametrize("whole", [False, True])
    def test_removed_blocks_one_by_one(self, whole: bool) -> None:
        cache = Cache(4, whole_hashes=whole)
        cache.ended("aaaabbbbc")
        stored = cache.told[-1]["block_hashes"]
        cache.told.clear()
        cache.ended("eeeeffffgggghhhh")
        removed = [event for event in cache.told if event["type"] == "BlockRemoved"]
        assert removed == [
            {"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU", "group_idx": 0}
            for each in reversed(stored)
        ]
        assert all(isinstance(each, bytes) and len(each) == 32 for each in stored) == whole

    def test_copies_are_told_each(self) -> None:
        """Two requests that ran at the same time have a block each; vLLM does not make one of them."""
        cache = Cache(whole_hashes=True)
        first, second = cache.request("aaaab"), cache.request("aaaab")
        for request in (first, second):
            assert cache.admit(request, Hit(), 2)
        for request in (first, second):
            cache.computed(request, 5, prompt_tokens=5, chunk=True)
            cache.give_back(request)
        hashes = [event["block_hashes"] for event in cache.told]
        assert hashes[0] == hashes[1]
        cache.told.clear()
        assert cache.pool.take(100) is not None
        assert [event["block_hashes"] for event in cache.told] == hashes

    def test_states_are_a_group_of_their_own(self) -> None:
        cache = Cache(hybrid=True)
        request = cache.request("aaaabbbbc")
        cache.run(request)
        state = cache.told[-1]
        assert request.chain is not None
        assert (state["group_idx"], state["kv_cache_spec_kind"]) == (1, "mamba")
        assert state["block_hashes"] == [request.chain.keys[1]]
        assert state["parent_block_hash"] == request.chain.keys[0]
        cache.give_back(request)
        cache.told.clear()
        assert cache.pool.take(100) is not None
        assert sorted((event["group_idx"], event["block_hashes"][0]) for event in cache.told) == sorted(
            [(0, request.chain.keys[0]), (0, request.chain.keys[1]), (1, request.chain.keys[1])]
        )

    def test_a_reset_clears_all_once_nothing_is_in_use(self) -> None:
        cache = Cache()
        request = cache.request("aaaab")
        cache.run(request)
        assert not cache.reset()
        cache.give_back(request)
        assert cache.reset()
        assert cache.told[-1] == {"type": "AllBlocksCleared"}
        assert cache.find(request.chain, 5).tokens == 0
