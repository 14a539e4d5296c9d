"""A KV cache as bytes: the prefilled state, spread so that no byte can be changed, lost or swapped unnoticed.

    payload = body || (state XOR SHA-256(body))

The body is pseudo-random, from the state and the request's id. Whoever has all bytes computes the state; a change of
any byte, body or tail, gives another state and so another answer. The checksum that follows on the wire is bound to
engine, request and length: a payload that is intact but belongs to another request fails it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from prfaas.api.profile import KVProfile
from prfaas.worker.oracle import STATE_BYTES

CHUNK_BYTES = 64 * 1024
CHECKSUM_BYTES = 32


class PayloadError(ValueError):
    """The pulled bytes are not the KV cache that was asked for."""


def payload_bytes(kv: KVProfile, tokens: int, scale: float) -> int:
    """Bytes that cross for a prompt of `tokens` tokens: S(l) * scale, rounded up, and never less than the state."""
    return max(STATE_BYTES, math.ceil(kv.bytes(tokens) * scale))


def payload_chunks(state: bytes, request_id: str, size: int) -> Iterator[bytes]:
    """The payload of `size` bytes in chunks of at most 64 KiB, made as they are asked for."""
    body_left, index, body_hash = size - STATE_BYTES, 0, hashlib.sha256()
    if body_left < 0:
        raise ValueError(f"a payload has at least {STATE_BYTES} bytes, got {size}")
    seed = hashlib.sha256(b"prfaas-body\0" + state + request_id.encode()).digest()
    while body_left:
        chunk = hashlib.shake_128(seed + index.to_bytes(8, "big")).digest(min(CHUNK_BYTES, body_left))
        body_hash.update(chunk)
        body_left -= len(chunk)
        index += 1
        yield chunk
    yield _xor(state, body_hash.digest())


class Checksum:
    """The checksum of one transfer, fed chunk by chunk."""

    def __init__(self, engine_id: str, request_id: str, tokens: int) -> None:
        self._hash = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        for part in (engine_id, request_id, str(tokens)):
            self._hash.update(part.encode() + b"\0")

    def update(self, chunk: bytes) -> None:
        """Take the next bytes of the payload."""
        self._hash.update(chunk)

    def digest(self) -> bytes:
        """The checksum of what was taken so far."""
        return self._hash.digest()


class PayloadReader:
    """Rebuilds the state from a payload's bytes, in constant memory."""

    def __init__(self, size: int, checksum: Checksum) -> None:
        if size < STATE_BYTES:
            raise PayloadError(f"a payload of {size} bytes cannot hold a state")
        self._body_left, self._tail = size - STATE_BYTES, b""
        self._body, self._checksum = hashlib.sha256(), checksum

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes; PayloadError if they are more than announced."""
        self._checksum.update(chunk)
        body, tail = chunk[: self._body_left], chunk[self._body_left :]
        self._body.update(body)
        self._body_left -= len(body)
        self._tail += tail
        if len(self._tail) > STATE_BYTES:
            raise PayloadError("more payload bytes than announced")

    def state(self, checksum: bytes) -> bytes:
        """The state, after the last byte; PayloadError if bytes are missing or the checksum is not `checksum`."""
        if self._body_left or len(self._tail) < STATE_BYTES:
            raise PayloadError(f"{self._body_left + STATE_BYTES - len(self._tail)} payload bytes are missing")
        if self._checksum.digest() != checksum:
            raise PayloadError("checksum mismatch: these are not the bytes of this request")
        return _xor(self._tail, self._body.digest())


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
