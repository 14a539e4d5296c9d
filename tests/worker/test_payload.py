"""The KV payload: whole, it gives the state; anything less is refused or gives another state."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.profiles import shipped
from prfaas.worker.kv.payload import CHUNK_BYTES, Checksum, PayloadError, PayloadReader, payload_bytes, payload_chunks

STATE = hashlib.sha256(b"a prompt").digest()
SIZES = st.integers(32, 500) | st.sampled_from([CHUNK_BYTES + 31, CHUNK_BYTES + 32, CHUNK_BYTES + 33, 200_000])


def payload(size: int, state: bytes = STATE, request: str = "r") -> bytes:
    """A whole payload."""
    return b"".join(payload_chunks(state, request, size))


def checksum(data: bytes, request: str = "r", engine: str = "e", tokens: int = 9) -> bytes:
    """The checksum that a prefill worker sends with it."""
    made = Checksum(engine, request, tokens)
    made.update(data)
    return made.digest()


def read(data: bytes, sent: bytes, size: int, request: str = "r", pieces: int = 7) -> bytes:
    """What a decode worker makes of these bytes, fed in some pieces."""
    reader = PayloadReader(size, Checksum("e", request, 9))
    step = max(1, len(data) // pieces)
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
    return reader.state(sent)


@given(size=SIZES, state=st.binary(min_size=32, max_size=32), pieces=st.integers(1, 20))
def test_all_bytes_give_the_state(size: int, state: bytes, pieces: int) -> None:
    data = payload(size, state)
    assert len(data) == size
    assert all(len(chunk) <= CHUNK_BYTES for chunk in payload_chunks(state, "r", size))
    assert read(data, checksum(data), size, pieces=pieces) == state


@given(size=st.integers(32, 400), at=st.integers(0, 399), flip=st.integers(1, 255))
def test_a_changed_byte_fails_the_checksum_and_would_change_the_state(size: int, at: int, flip: int) -> None:
    data = bytearray(payload(size))
    data[at % size] ^= flip
    changed = bytes(data)
    with pytest.raises(PayloadError, match="checksum"):
        read(changed, checksum(payload(size)), size)
    assert read(changed, checksum(changed), size) != STATE, "even with a forged checksum"


@given(size=st.integers(64, 400), first=st.integers(0, 399), second=st.integers(0, 399))
def test_swapped_bytes_fail_the_checksum_and_would_change_the_state(size: int, first: int, second: int) -> None:
    data = bytearray(payload(size))
    first, second = first % size, second % size
    data[first], data[second] = data[second], data[first]
    if (changed := bytes(data)) != payload(size):
        with pytest.raises(PayloadError, match="checksum"):
            read(changed, checksum(payload(size)), size)
        assert read(changed, checksum(changed), size) != STATE


@given(size=st.integers(33, 400), missing=st.integers(1, 399))
def test_missing_bytes_are_counted(size: int, missing: int) -> None:
    missing = min(missing, size)
    data = payload(size)[: size - missing]
    with pytest.raises(PayloadError, match=f"^{missing} payload bytes are missing"):
        read(data, checksum(data), size)


def test_more_bytes_than_announced_are_refused() -> None:
    with pytest.raises(PayloadError, match="more payload bytes"):
        read(payload(100) + b"x", b"", 100)


@pytest.mark.parametrize("field", ["request", "engine", "tokens"])
def test_the_checksum_belongs_to_one_request_of_one_engine(field: str) -> None:
    data = payload(100)
    other = {"request": "s", "engine": "f", "tokens": 8}[field]
    with pytest.raises(PayloadError, match="checksum"):
        read(data, checksum(data, **{field: other}), 100)  # type: ignore[arg-type]  # one of three keywords


def test_two_requests_with_one_prompt_send_different_bytes() -> None:
    assert payload(100, request="r")[:68] != payload(100, request="s")[:68]


def test_a_payload_holds_at_least_the_state() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        next(payload_chunks(STATE, "r", 31))
    with pytest.raises(PayloadError, match="31 bytes cannot hold"):
        PayloadReader(31, Checksum("e", "r", 9))


@given(tokens=st.integers(0, 200_000), more=st.integers(0, 1_000), scale=st.floats(1e-9, 1.0))
def test_payload_size_follows_the_profile(tokens: int, more: int, scale: float) -> None:
    kv = shipped("H20x8").kv
    size = payload_bytes(kv, tokens, scale)
    assert size == max(32, -int(-kv.bytes(tokens) * scale // 1))
    assert size <= payload_bytes(kv, tokens + more, scale)
    assert payload_bytes(kv, tokens, 1.0) == kv.bytes(tokens)
