"""Recorded requests, line by line: Mooncake's JSON lines and Azure's CSV.

Mooncake: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}; a block is 512
tokens, its id stands for the block and all before it, so equal ids are prefixes that could be reused. Azure: TIMESTAMP,
ContextTokens,GeneratedTokens. Whatever is wrong is said with the line's number; nothing is held in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prfaas.planner.simulator.arrivals import Arrival
from prfaas.planner.workload import Histogram, Request
from prfaas.routing.prefixes import PrefixCache

BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceError(ValueError):
    """A line that cannot be read: where, what is wrong, what would be right."""


def read(lines: Iterable[str], name: str) -> Iterator[Arrival]:
    """Requests of a trace, the first at 0 s; the form is told by the first line. Raises TraceError while iterating."""
    numbered = ((number, text) for number, text in enumerate(lines, start=1) if text.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"{name}: is empty")
    head = first[1].lstrip("\ufeff").strip()
    if head.startswith("{"):
        rows = (_mooncake(text, f"{name}:{number}") for number, text in _chain(first, numbered))
    elif head.replace(" ", "") == AZURE_HEADER:
        rows = (_azure(text, f"{name}:{number}") for number, text in numbered)
    else:
        raise TraceError(f"{name}:{first[0]}: neither a JSON object per line (Mooncake) nor the header {AZURE_HEADER}")
    start: float | None = None
    last = -math.inf
    for place, arrival in rows:
        if arrival.at < last:
            raise TraceError(f"{place}: goes back in time by {last - arrival.at:g} s; sort the trace by time")
        last = arrival.at
        start = last if start is None else start
        yield Arrival(last - start, arrival.tokens, arrival.output, 0.0, arrival.blocks)
    if start is None:
        raise TraceError(f"{name}: has no requests")


@dataclass(frozen=True)
class Observed:
    """What a planner needs to know of a trace."""

    histogram: Histogram
    requests: int
    seconds: float
    """From the first request to the last."""
    busiest: float
    """Requests/s in the busiest minute."""

    @property
    def rate(self) -> float:
        """Requests/s; 0 where all came at once."""
        return self.requests / self.seconds if self.seconds > 0 else 0.0


def observe(arrivals: Iterable[Arrival], cache: PrefixCache | None) -> Observed:
    """Uncached lengths, cached prefixes and outputs, as they would be if one pool with `cache` prefilled everything."""
    last, count = 0.0, 0
    minute, in_minute, most = 0, 0, 0

    def requests() -> Iterator[Request]:
        nonlocal last, count, minute, in_minute, most
        for each in arrivals:
            last, count = each.at, count + 1
            if int(each.at // 60) != minute:
                minute, in_minute = int(each.at // 60), 0
            in_minute += 1
            most = max(most, in_minute)
            cached = each.cached
            if cache is not None and each.blocks:
                cached = cache.look(each.blocks, int(each.tokens)).reusable
                cache.keep(each.blocks, int(each.tokens))
            yield Request(each.tokens - cached, cached, each.output)

    histogram = Histogram.of(requests())
    return Observed(histogram, count, last, most / min(60.0, last) if last > 0 else 0.0)


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _mooncake(text: str, place: str) -> tuple[str, Arrival]:
    try:
        row = json.loads(text.lstrip("\ufeff"))
    except ValueError as error:
        raise TraceError(f"{place}: is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{place}: is no JSON object")
    at = row.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at) or at < 0:
        raise TraceError(f"{place}: timestamp: must be milliseconds, at least 0; got {at!r}")
    tokens = _whole(row.get("input_length"), f"{place}: input_length", 1)
    output = _whole(row.get("output_length"), f"{place}: output_length", 0)
    blocks = row.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(b, int) and not isinstance(b, bool) for b in blocks):
        raise TraceError(f"{place}: hash_ids: must be a list of whole numbers")
    if blocks and not tokens // BLOCK_TOKENS <= len(blocks) <= -(-tokens // BLOCK_TOKENS):
        raise TraceError(f"{place}: hash_ids: {len(blocks)} for {tokens} tokens; there is one for each {BLOCK_TOKENS}")
    return place, Arrival(at / 1000, tokens, output, 0.0, tuple(blocks))


def _azure(text: str, place: str) -> tuple[str, Arrival]:
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != 3:
        raise TraceError(f"{place}: has {len(cells)} values, 3 are wanted: {AZURE_HEADER}")
    moment, dot, fraction = cells[0].partition(".")
    try:
        at = (datetime.fromisoformat(moment.removesuffix("Z")) - datetime(1970, 1, 1)).total_seconds()
        at += float(f"0.{fraction.removesuffix('Z').split('+')[0]}") if dot else 0.0
    except (ValueError, TypeError) as error:
        raise TraceError(f"{place}: TIMESTAMP: {cells[0]!r} is no time such as 2023-11-16 18:17:03.9799600") from error
    tokens = _whole(_number(cells[1]), f"{place}: ContextTokens", 1)
    output = _whole(_number(cells[2]), f"{place}: GeneratedTokens", 0)
    return place, Arrival(at, tokens, output)


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def _whole(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
        raise TraceError(f"{what}: must be a whole number from {least} to {MAX_TOKENS:,}; got {value!r}")
    return value
