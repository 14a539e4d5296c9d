"""Block hashes: vLLM's chain, over Python's pickle or canonical CBOR."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.worker.hashing import ALGORITHMS, Algorithm, Chain, Hasher, Lora, cbor, published, token_ids, whole_tokens

SIZE = 4
TEXT = b"Tell me about the sea, and take your time over it, will you?"  # 15 tokens


def hasher(algorithm: Algorithm = "sha256", seed: str | None = None, random: bytes = b"one") -> Hasher:
    """A hasher of blocks of four tokens."""
    return Hasher(algorithm, SIZE, python_hash_seed=seed, random_seed=random)


def by_hand(encode: Any, tokens: list[int], extra: list[Any]) -> list[bytes]:
    """The chain, straight from its definition."""
    parent = hashlib.sha256(encode("vllm-none-hash")).digest()
    hashes = []
    for index in range(len(tokens) // SIZE):
        block = tuple(tokens[index * SIZE : index * SIZE + SIZE])
        parent = hashlib.sha256(encode((parent, block, extra[index]))).digest()
        hashes.append(parent)
    return hashes


def pickled(value: Any) -> bytes:
    """As vLLM's `sha256` does it."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        # RFC 8949, appendix A
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1_000_000, "1a000f4240"),
        (1_000_000_000_000, "1b000000e8d4a51000"),
        (None, "f6"),
        ("", "60"),
        ("IETF", "6449455446"),
        ("\u00fc", "62c3bc"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ((), "80"),
        ((1, (2, 3), (4, 5)), "8301820203820405"),
    ],
)
def test_cbor_is_that_of_the_rfc(value: object, encoded: str) -> None:
    assert cbor(value).hex() == encoded


@pytest.mark.parametrize("value", [True, 1.5, 2**64])
def test_what_hashes_never_hold_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        cbor(value)


@pytest.mark.parametrize(("algorithm", "encode"), [("sha256", pickled), ("sha256_cbor", cbor)])
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_each_hash_is_over_parent_tokens_and_extra_keys(algorithm: Algorithm, encode: Any, tokens: list[int]) -> None:
    raw = b"".join(token.to_bytes(4, "big") for token in tokens)
    chain = Chain(hasher(algorithm), raw, keep_hashes=True)
    assert chain.hashes == by_hand(encode, tokens, [None] * len(tokens))


def test_the_salt_is_in_the_first_block_and_the_adapter_in_all() -> None:
    lora = ("lora", "name", "/path")
    chain = Chain(
        hasher("sha256_cbor"), TEXT, lora=Lora("name", "/path", 1), salt="s", keep_hashes=True, keep_tokens=True
    )
    extra = [(lora, ("cache_salt", "s")), (lora,), (lora,)]
    assert chain.hashes == by_hand(cbor, token_ids(TEXT).tolist(), extra)
    assert [chain.extra(block) for block in range(3)] == extra


def test_keys_are_the_low_64_bits() -> None:
    plain, whole = Chain(hasher(), TEXT), Chain(hasher(), TEXT, keep_hashes=True)
    assert whole.hashes is not None
    assert len(whole.hashes) == 3
    assert published(plain, 0, 3) == [int.from_bytes(each, "big") & (2**64 - 1) for each in whole.hashes]
    assert published(whole, 1, 3) == whole.hashes[1:]


@given(st.lists(st.integers(0, 9), max_size=12))
def test_a_chain_grows_to_what_it_would_have_been(parts: list[int]) -> None:
    tokens = sum(parts)
    raw = b"".join(number.to_bytes(4, "big") for number in range(tokens))
    grown, at = Chain(hasher(), b"", salt="s", keep_tokens=True), 0
    for part in parts:
        grown.extend(raw[4 * at : 4 * (at + part)])
        at += part
    assert grown.keys == Chain(hasher(), raw, salt="s").keys
    assert grown.ids(0, tokens // SIZE) == list(range(tokens // SIZE * SIZE))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_has_equal_hashes(algorithm: Algorithm) -> None:
    """SHA-256 is the same everywhere; the other kinds are a process's own, unless PYTHONHASHSEED says otherwise."""
    one, other = hasher(algorithm, random=b"one"), hasher(algorithm, random=b"two")
    assert (one.root == other.root) == algorithm.startswith("sha256")
    assert len(one.root) == (32 if algorithm.startswith("sha256") else 16)
    assert hasher(algorithm, "7", b"one").root == hasher(algorithm, "7", b"two").root != one.root


def test_a_short_last_token_keeps_its_id() -> None:
    assert whole_tokens(b"wordab") == b"word\0\0ab"
    assert token_ids(whole_tokens(b"wordab")).tolist() == [int.from_bytes(b"word", "big"), int.from_bytes(b"ab", "big")]
