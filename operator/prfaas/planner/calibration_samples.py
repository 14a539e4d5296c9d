"""Samples for a calibration from CSV text.

    tokens,cached,seconds,concurrency[,age_seconds][,censored][,bytes][,transfer_seconds]

The first line names the columns, in any order. A complaint names file and line; nothing is guessed or skipped.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping

from prfaas.api.profile import MAX_SECONDS, MAX_TOKENS
from prfaas.planner.calibration import Sample
from prfaas.planner.errors import PlanError, number

REQUIRED = ("tokens", "cached", "seconds", "concurrency")
OPTIONAL = ("age_seconds", "censored", "bytes", "transfer_seconds")
YES = ("1", "true", "yes")
NO = ("", "0", "false", "no")
MAX_BYTES = 2.0**50
LEAST_SECONDS = 1e-6
"""Below it a time was not measured."""


def read_samples(lines: Iterable[str], name: str) -> list[Sample]:
    """The samples of a CSV text; `name` is what complaints call it. Raises PlanError with `name:line`."""
    rows = csv.reader(lines, strict=True)
    try:
        header = [column.strip() for column in next(rows, [])]
        _check_header(header, f"{name}:1")
        return [_sample(header, row, f"{name}:{rows.line_num}") for row in rows if row]
    except csv.Error as error:
        raise PlanError(f"{name}:{rows.line_num}", str(error)) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{name}:{rows.line_num + 1}", "is not UTF-8 text") from error


def _check_header(header: list[str], where: str) -> None:
    if missing := [column for column in REQUIRED if column not in header]:
        raise PlanError(where, f"no column {', '.join(missing)}; the first line must name {','.join(REQUIRED)}")
    if unknown := [column for column in header if column not in REQUIRED + OPTIONAL]:
        raise PlanError(where, f"unknown column {unknown[0]!r}; besides {','.join(REQUIRED)}: {','.join(OPTIONAL)}")
    if len(set(header)) < len(header):
        raise PlanError(where, "a column is named twice")


def _sample(header: list[str], row: list[str], where: str) -> Sample:
    if len(row) != len(header):
        raise PlanError(where, f"{len(row)} values for {len(header)} columns")
    cells = {column: cell.strip() for column, cell in zip(header, row, strict=True)}
    tokens = _whole(cells, "tokens", where, 1, MAX_TOKENS)
    cached = _whole(cells, "cached", where, 0, MAX_TOKENS)
    if cached >= tokens:
        raise PlanError(where, f"cached {cached} must be below tokens {tokens}: an engine computes the last one anyway")
    word = cells.get("censored", "").lower()
    if word not in YES + NO:
        raise PlanError(where, f"censored: {word!r} is neither true nor false")
    size, transfer = cells.get("bytes"), cells.get("transfer_seconds")
    return Sample(
        tokens,
        cached,
        _number(cells["seconds"], "seconds", where, least=LEAST_SECONDS, most=MAX_SECONDS),
        _number(cells["concurrency"], "concurrency", where, least=1.0),
        _number(cells.get("age_seconds") or "0", "age_seconds", where),
        word in YES,
        _number(size, "bytes", where, most=MAX_BYTES) if size else None,
        _number(transfer, "transfer_seconds", where, least=LEAST_SECONDS, most=MAX_SECONDS) if transfer else None,
        where,
    )


def _whole(cells: Mapping[str, str], column: str, where: str, least: int, most: int) -> int:
    text = cells[column]
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
    if not least <= value <= most:
        raise PlanError(where, f"{column}: {text!r} is not a whole number from {least} to {most}")
    return value


def _number(text: str, column: str, where: str, *, least: float = 0.0, most: float = float("inf")) -> float:
    try:
        value = float(text)
    except ValueError:
        raise PlanError(where, f"{column}: {text!r} is not a number") from None
    try:
        return number(column, value, least=least, most=most)
    except PlanError as error:
        raise PlanError(where, str(error)) from None
