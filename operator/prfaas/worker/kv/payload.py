"""A KV cache as bytes: the prefilled state, spread so that no byte can be changed, lost or swapped unnoticed.

    payload = body || (state XOR H(body))

The body is pseudo-random, from the state and the request's id; H hashes the hashes of its chunks in order, so that
chunks may arrive in any order. Whoever has all bytes computes the state; a change of any byte, body or tail, gives
another state and so another answer. The checksum that follows on the wire is bound to engine, request and length: a
payload that is intact but belongs to another request fails it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from prfaas.api.profile import KVProfile
from prfaas.worker.oracle import STATE_BYTES

CHUNK_BYTES = 64 * 1024
_HASH_BYTES = 32


class PayloadError(ValueError):
    """The bytes that came are not the KV cache that was asked for."""


def payload_bytes(kv: KVProfile, tokens: int, scale: float) -> int:
    """Bytes that cross for a prompt of `tokens` tokens: S(l) * scale, rounded up, and never less than the state."""
    return max(STATE_BYTES, math.ceil(kv.bytes(tokens) * scale))


def chunks_of(size: int) -> int:
    """How many chunks a payload of `size` bytes has: those of its body, and the tail."""
    return math.ceil((size - STATE_BYTES) / CHUNK_BYTES) + 1


def checksum(engine_id: str, request_id: str, tokens: int, hashes: bytes) -> bytes:
    """What is sent after a payload: a hash over whose it is and the hashes of its chunks, in order."""
    whole = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in (engine_id, request_id, str(tokens)):
        whole.update(part.encode() + b"\0")
    whole.update(hashes)
    return whole.digest()


class PayloadWriter:
    """Makes the payload of `size` bytes chunk by chunk, as they are asked for; iterate once."""

    def __init__(self, state: bytes, request_id: str, size: int) -> None:
        if size < STATE_BYTES:
            raise ValueError(f"a payload has at least {STATE_BYTES} bytes, got {size}")
        self._state, self._seed = state, hashlib.sha256(b"prfaas-body\0" + state + request_id.encode()).digest()
        self._body_left = size - STATE_BYTES
        self.hashes = bytearray()
        """Of the chunks made so far."""

    def __iter__(self) -> Iterator[bytes]:
        index = 0
        while self._body_left:
            size = min(CHUNK_BYTES, self._body_left)
            chunk = hashlib.shake_128(self._seed + index.to_bytes(8, "big")).digest(size)
            self._body_left -= size
            index += 1
            self.hashes += hashlib.sha256(chunk).digest()
            yield chunk
        tail = _xor(self._state, hashlib.sha256(self.hashes).digest())
        self.hashes += hashlib.sha256(tail).digest()
        yield tail


class PayloadReader:
    """Rebuilds the state from a payload's chunks, keeping of each only its hash."""

    def __init__(self, size: int) -> None:
        if size < STATE_BYTES:
            raise PayloadError(f"a payload of {size} bytes cannot hold a state")
        self._size, self._count = size, chunks_of(size)
        self._hashes = bytearray(self._count * _HASH_BYTES)
        self._missing = set(range(self._count))
        self._tail = b""

    def feed(self, index: int, chunk: bytes) -> None:
        """Take a chunk; PayloadError if it is not one that is still missing, or has another size."""
        if index not in self._missing:
            raise PayloadError(f"chunk {index} of {self._count} came twice or does not exist")
        last = index == self._count - 1
        body = self._size - STATE_BYTES
        expected = STATE_BYTES if last else min(CHUNK_BYTES, body - index * CHUNK_BYTES)
        if len(chunk) != expected:
            raise PayloadError(f"chunk {index} has {len(chunk)} bytes, not {expected}")
        self._missing.discard(index)
        self._hashes[index * _HASH_BYTES : (index + 1) * _HASH_BYTES] = hashlib.sha256(chunk).digest()
        if last:
            self._tail = chunk

    def state(self, engine_id: str, request_id: str, tokens: int, given: bytes) -> bytes:
        """The state, after the last chunk; PayloadError if chunks are missing or `given` is not their checksum."""
        if self._missing:
            raise PayloadError(f"{len(self._missing)} of {self._count} chunks are missing")
        if checksum(engine_id, request_id, tokens, bytes(self._hashes)) != given:
            raise PayloadError("checksum mismatch: these are not the bytes of this request")
        return _xor(self._tail, hashlib.sha256(self._hashes[:-_HASH_BYTES]).digest())


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
