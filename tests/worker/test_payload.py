"""The KV payload: whole, in whatever order, it gives the state; anything less is refused or gives another state."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.profiles import shipped
from prfaas.worker.kv.payload import (
    CHUNK_BYTES,
    PayloadError,
    PayloadReader,
    PayloadWriter,
    checksum,
    chunks_of,
    payload_bytes,
)

STATE = hashlib.sha256(b"a prompt").digest()
SIZES = st.integers(32, 500) | st.sampled_from([CHUNK_BYTES + 31, CHUNK_BYTES + 32, CHUNK_BYTES + 33, 200_000])


def chunks(size: int, state: bytes = STATE, request: str = "r") -> list[bytes]:
    """A whole payload."""
    return list(PayloadWriter(state, request, size))


def summed(data: list[bytes], request: str = "r", engine: str = "e", tokens: int = 9) -> bytes:
    """The checksum that a prefill worker sends with it."""
    return checksum(engine, request, tokens, b"".join(hashlib.sha256(chunk).digest() for chunk in data))


def read(data: list[bytes], sent: bytes, order: int | None = None) -> bytes:
    """What a decode worker makes of these chunks, in an order of its own."""
    reader = PayloadReader(sum(map(len, data)))
    numbered = list(enumerate(data))
    if order is not None:
        random.Random(order).shuffle(numbered)
    for index, chunk in numbered:
        reader.feed(index, chunk)
    return reader.state("e", "r", 9, sent)


@given(size=SIZES, state=st.binary(min_size=32, max_size=32), order=st.integers(0, 50))
def test_all_chunks_give_the_state_in_any_order(size: int, state: bytes, order: int) -> None:
    data = chunks(size, state)
    assert sum(map(len, data)) == size
    assert len(data) == chunks_of(size)
    assert all(len(chunk) <= CHUNK_BYTES for chunk in data)
    assert read(data, summed(data), order) == state


@given(size=SIZES, at=st.integers(0, 199_999), flip=st.integers(1, 255))
def test_a_changed_byte_fails_the_checksum_and_would_change_the_state(size: int, at: int, flip: int) -> None:
    data = chunks(size)
    index = at % len(data)
    changed = bytearray(data[index])
    changed[at % len(changed)] ^= flip
    forged = [*data[:index], bytes(changed), *data[index + 1 :]]
    with pytest.raises(PayloadError, match="checksum"):
        read(forged, summed(data))
    assert read(forged, summed(forged)) != STATE, "even with a forged checksum"


def test_swapped_chunks_fail_the_checksum_and_would_change_the_state() -> None:
    first, second, *rest = chunks(3 * CHUNK_BYTES + 32)
    swapped = [second, first, *rest]
    with pytest.raises(PayloadError, match="checksum"):
        read(swapped, summed([first, second, *rest]))
    assert read(swapped, summed(swapped)) != STATE


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_chunks_are_counted(missing: int) -> None:
    data = chunks(CHUNK_BYTES + 100)
    reader = PayloadReader(CHUNK_BYTES + 100)
    for index, chunk in enumerate(data):
        if index != missing:
            reader.feed(index, chunk)
    with pytest.raises(PayloadError, match=r"^1 of 3 chunks are missing"):
        reader.state("e", "r", 9, summed(data))


@pytest.mark.parametrize(
    ("index", "size", "said"),
    [(2, 32, "chunk 2 of 2 came twice or does not exist"), (0, 67, "chunk 0 has 67 bytes, not 68"), (1, 31, "not 32")],
)
def test_chunks_that_cannot_be_are_refused(index: int, size: int, said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        PayloadReader(100).feed(index, bytes(size))


def test_a_chunk_that_comes_twice_is_refused() -> None:
    reader = PayloadReader(100)
    reader.feed(0, bytes(68))
    with pytest.raises(PayloadError, match="twice"):
        reader.feed(0, bytes(68))


@pytest.mark.parametrize("field", ["request", "engine", "tokens"])
def test_the_checksum_belongs_to_one_request_of_one_engine(field: str) -> None:
    data = chunks(100)
    other = {"request": "s", "engine": "f", "tokens": 8}[field]
    with pytest.raises(PayloadError, match="checksum"):
        read(data, summed(data, **{field: other}))  # type: ignore[arg-type]  # one of three keywords


def test_two_requests_with_one_prompt_send_different_bytes() -> None:
    assert chunks(100, request="r")[0] != chunks(100, request="s")[0]


def test_a_payload_holds_at_least_the_state() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        PayloadWriter(STATE, "r", 31)
    with pytest.raises(PayloadError, match="31 bytes cannot hold"):
        PayloadReader(31)


@given(tokens=st.integers(0, 200_000), more=st.integers(0, 1_000), scale=st.floats(1e-9, 1.0))
def test_payload_size_follows_the_profile(tokens: int, more: int, scale: float) -> None:
    kv = shipped("H20x8").kv
    size = payload_bytes(kv, tokens, scale)
    assert size == max(32, -int(-kv.bytes(tokens) * scale // 1))
    assert size <= payload_bytes(kv, tokens + more, scale)
    assert payload_bytes(kv, tokens, 1.0) == kv.bytes(tokens)
