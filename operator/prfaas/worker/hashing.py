"""Hashes of a request's blocks, as vLLM computes them: each over its parent's hash, its tokens, and what else matters.

    hash i = H((hash i-1, (token, ...), extra keys or None))        hash -1 = H(seed)

H is SHA-256 over Python's pickle of the tuple (`sha256`, the default) or over its canonical CBOR (`sha256_cbor`, which
any program can repeat). The seed is `vllm-none-hash`, unless PYTHONHASHSEED is set. vLLM's `xxhash` kinds are 16 bytes,
and random per process without PYTHONHASHSEED; here they are BLAKE2 under a random seed: of the same form, and equal to
no other process's, as there.

A token is four bytes of the prompt, as everywhere in this worker, and its id is the number that they are.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prfaas.worker.oracle import BYTES_PER_TOKEN

Algorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
DEFAULT_SEED = "vllm-none-hash"

ExtraKey = tuple[str, ...]
"""What a hash covers beside tokens: ("lora", name, path) or ("cache_salt", salt)."""

_FOUR_BYTES = 1 << 16
"""The smallest number that canonical CBOR writes in a head and four bytes."""


def cbor(value: object) -> bytes:
    """Canonical CBOR (RFC 8949, section 4.2) of what block hashes are made of."""
    match value:
        case None:
            return b"\xf6"
        case bool():
            raise TypeError("block hashes hold no booleans")
        case int():
            return _head(0, value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            raw = value.encode()
            return _head(3, len(raw)) + raw
        case tuple():
            return _head(4, len(value)) + b"".join(map(cbor, value))
    raise TypeError(f"block hashes hold no {type(value).__name__}")


def _head(kind: int, number: int) -> bytes:
    kind <<= 5
    if number < 24:
        return bytes([kind | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << (8 * size):
            return bytes([kind | code]) + number.to_bytes(size, "big")
    raise ValueError(f"{number} is beyond 64 bits")


class Hasher:
    """The hash function of one engine. `python_hash_seed` is PYTHONHASHSEED, `random_seed` drawn once per process."""

    def __init__(
        self, algorithm: Algorithm, block_size: int, *, python_hash_seed: str | None, random_seed: bytes
    ) -> None:
        self.block_size = block_size
        self._cbor = algorithm.endswith("_cbor")
        keyed = algorithm.startswith("xxhash")
        seed = python_hash_seed if python_hash_seed is not None else random_seed.hex() if keyed else DEFAULT_SEED
        encode: Callable[[object], bytes] = cbor if self._cbor else _pickled
        self._digest: Callable[[bytes], bytes] = _blake16 if keyed else _sha256
        self.root = self._digest(encode(seed))
        self._unpack = struct.Struct(f">{block_size}I").unpack_from

    def blocks(self, parent: bytes, tokens: memoryview, extra: tuple[ExtraKey, ...]) -> Iterator[bytes]:
        """Hashes of the full blocks in `tokens`, four bytes each, which follow a block with the hash `parent`.

        One at a time: a long prompt has thousands.
        """
        size = self.block_size * BYTES_PER_TOKEN
        keys = extra or None
        digest, unpack = self._digest, self._unpack
        if self._cbor and _all_wide(tokens):
            before, between, after = b"\x83" + _head(2, len(parent)), _head(4, self.block_size), cbor(keys)
            for start in range(0, len(tokens) - size + 1, size):
                parent = digest(b"".join((before, parent, between, _wide(tokens[start : start + size]), after)))
                yield parent
            return
        encode = cbor if self._cbor else _pickled
        for start in range(0, len(tokens) - size + 1, size):
            parent = digest(encode((parent, unpack(tokens, start), keys)))
            yield parent


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _sha256(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def _blake16(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _all_wide(tokens: memoryview) -> bool:
    """Whether every token needs a CBOR head and four bytes, as all tokens of four bytes of text do."""
    return min(token_ids(tokens), default=0) >= _FOUR_BYTES


def _wide(tokens: memoryview) -> bytes:
    """The CBOR of such tokens."""
    wide = bytearray(b"\x1a\0\0\0\0" * (len(tokens) // BYTES_PER_TOKEN))
    for byte in range(BYTES_PER_TOKEN):
        wide[byte + 1 :: BYTES_PER_TOKEN + 1] = tokens[byte::BYTES_PER_TOKEN]
    return bytes(wide)


def token_ids(tokens: bytes | memoryview) -> array[int]:
    """The ids of whole tokens."""
    ids = array("I", bytes(tokens[: len(tokens) // BYTES_PER_TOKEN * BYTES_PER_TOKEN]))
    if sys.byteorder == "little":
        ids.byteswap()
    return ids


def whole_tokens(prompt: bytes) -> bytes:
    """A prompt as four bytes per token: its last one, if shorter, with zeros in front, so that its id stays."""
    short = len(prompt) % BYTES_PER_TOKEN
    if not short:
        return prompt
    return prompt[:-short] + prompt[-short:].rjust(BYTES_PER_TOKEN, b"\0")


@dataclass(frozen=True)
class Lora:
    """An adapter that a request uses. Numbers count from 1, in the order of loading."""

    name: str
    path: str
    number: int


class Chain:
    """The blocks of one request and their hashes; grows with its answer.

    `keys` holds the low 64 bits of each hash: what events publish, and what blocks are found by. Whole hashes and the
    tokens themselves are kept only for an engine that publishes them.
    """

    def __init__(
        self,
        hasher: Hasher,
        tokens: bytes,
        *,
        lora: Lora | None = None,
        salt: str | None = None,
        session: str | None = None,
        keep_hashes: bool = False,
        keep_tokens: bool = False,
    ) -> None:
        self._hasher = hasher
        self._lora, self._salt = lora, salt
        self.session = session
        """Whose request it is; not part of any hash."""
        self.keys = array("Q")
        self.hashes: list[bytes] | None = [] if keep_hashes else None
        self._tokens = bytearray() if keep_tokens else None
        self._parent, self._rest = hasher.root, b""
        self.extend(tokens)

    def extend(self, tokens: bytes) -> None:
        """More tokens, four bytes each."""
        if self._tokens is not None:
            self._tokens += tokens
        if self._rest:
            tokens = self._rest + tokens
        size = self._hasher.block_size * BYTES_PER_TOKEN
        full = len(tokens) // size * size
        self._rest = tokens[full:]
        with memoryview(tokens) as view:
            at = 0
            if full and not self.keys and self._salt is not None:
                at = size
                self._append(view[:size], self.extra(0))
            if full > at:
                self._append(view[at:full], self.extra(1))

    def _append(self, tokens: memoryview, extra: tuple[ExtraKey, ...]) -> None:
        for each in self._hasher.blocks(self._parent, tokens, extra):
            self.keys.append(int.from_bytes(each[-8:], "big") or 1)
            if self.hashes is not None:
                self.hashes.append(each)
            self._parent = each
        tokens.release()

    def extra(self, block: int) -> tuple[ExtraKey, ...]:
        """What the hash of a block covers beside its tokens: the salt only that of the first."""
        lora: tuple[ExtraKey, ...] = (("lora", self._lora.name, self._lora.path),) if self._lora else ()
        return (*lora, ("cache_salt", self._salt)) if self._salt is not None and block == 0 else lora

    @property
    def lora_name(self) -> str | None:
        """The adapter's name."""
        return self._lora.name if self._lora else None

    @property
    def lora_id(self) -> int | None:
        """The adapter's number."""
        return self._lora.number if self._lora else None

    def ids(self, first: int, last: int) -> list[int]:
        """The token ids of blocks `first` to `last`, the last one not included; only with `keep_tokens`."""
        assert self._tokens is not None
        size = self._hasher.block_size * BYTES_PER_TOKEN
        return token_ids(bytes(self._tokens[first * size : last * size])).tolist()


def published(chain: Chain, first: int, last: int) -> list[Any]:
    """Block hashes in the form that events have: numbers, or bytes where the chain keeps whole hashes."""
    return list(chain.keys[first:last]) if chain.hashes is None else chain.hashes[first:last]
