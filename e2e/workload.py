"""What the demo and the scenarios ask for: prompt lengths, arrival times and real text of exactly that length.

Lengths follow the truncated log-normal of the paper (arXiv:2604.15039, section 4.1: mu 9.90, sigma 1.00, 128 to
131,072 tokens, renormalised) or the rows of a Mooncake-format trace. Everything is a function of a seed, so that a run
can be repeated and its answers checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

BYTES_PER_TOKEN = 4
"""The fake worker's tokenizer: four bytes of UTF-8 a token."""
TRACE_BLOCK_TOKENS = 512
"""Tokens that one `hash_ids` entry of a Mooncake trace stands for."""

_WORDS = (
    "the line between two halls carries what one computed and the other needs while operators watch queues grow or "
    "shrink by night every router counts tokens before it decides where prompts travel and each cache block moves "
    "only once along fibre under a road past fields and substations toward racks that wait for work with patience"
).split()


class WorkloadError(ValueError):
    """A trace that cannot be replayed; says which line and what would be right."""


@dataclass(frozen=True)
class Ask:
    """One request to send: `at` seconds after the start, a prompt of `prompt_tokens`, `output_tokens` to read."""

    at: float
    prompt_tokens: int
    output_tokens: int
    prompt: str


def text(seed: str, tokens: int) -> str:
    """Readable ASCII text of exactly `tokens` tokens (`BYTES_PER_TOKEN` bytes each), a function of `seed` alone."""
    size = tokens * BYTES_PER_TOKEN
    rng = random.Random(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    pieces: list[str] = []
    length = 0
    while length < size:
        sentence = " ".join(rng.choices(_WORDS, k=rng.randint(6, 14))).capitalize() + ". "
        pieces.append(sentence)
        length += len(sentence)
    return "".join(pieces)[:size]


def paper_lengths(
    count: int, seed: int, *, mu: float = 9.90, sigma: float = 1.00, low: int = 128, high: int = 131_072
) -> list[int]:
    """`count` prompt lengths in tokens, in random order, spread evenly over the distribution's quantiles.

    Stratified rather than independent draws: a short demo then shows the share of long prompts that the distribution
    has, whatever the seed.
    """
    normal = NormalDist(mu, sigma)
    lowest, highest = normal.cdf(math.log(low)), normal.cdf(math.log(high))
    rng = random.Random(seed)
    quantiles = [(index + rng.random()) / count for index in range(count)]
    lengths = [round(math.exp(normal.inv_cdf(lowest + quantile * (highest - lowest)))) for quantile in quantiles]
    rng.shuffle(lengths)
    return [min(max(length, low), high) for length in lengths]


def from_paper(count: int, *, rate: float, output_tokens: int, seed: int = 1) -> list[Ask]:
    """`count` requests of the paper's lengths, Poisson arrivals of `rate` requests a second."""
    rng = random.Random(seed)
    at = 0.0
    asks = []
    for index, tokens in enumerate(paper_lengths(count, seed)):
        asks.append(Ask(at, tokens, output_tokens, text(f"{seed}/{index}", tokens)))
        at += rng.expovariate(rate)
    return asks


def from_trace(path: Path, *, rows: int, time_scale: float, max_tokens: int = 131_072) -> list[Ask]:
    """The first `rows` rows of a Mooncake-format JSONL trace; arrival times are divided by `time_scale`.

    A `hash_ids` entry becomes the same text wherever it occurs, so that shared prefixes stay shared.

    Raises:
        WorkloadError: the file is missing, or a line is not a trace row.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:rows]
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}; TRACE is the path of a Mooncake-format JSONL file") from error
    asks = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            tokens, out, at = int(row["input_length"]), int(row["output_length"]), float(row["timestamp"]) / 1000
            blocks = [str(block) for block in row.get("hash_ids", [])]
        except (ValueError, KeyError, TypeError) as error:
            raise WorkloadError(
                f"{path}, line {number}: not a trace row ({error}); expected JSON with timestamp (ms), "
                "input_length and output_length (tokens)"
            ) from error
        tokens = min(max(tokens, 1), max_tokens)
        asks.append(Ask(at / time_scale, tokens, max(out, 1), _block_text(blocks, tokens, number)))
    return asks


def _block_text(blocks: Sequence[str], tokens: int, row: int) -> str:
    def parts() -> Iterator[str]:
        covered = 0
        for block in blocks:
            yield text(f"block {block}", TRACE_BLOCK_TOKENS)
            covered += TRACE_BLOCK_TOKENS
        if covered < tokens:
            yield text(f"row {row}", tokens - covered)

    return "".join(parts())[: tokens * BYTES_PER_TOKEN]
