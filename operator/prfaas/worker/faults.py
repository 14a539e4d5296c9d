"""Faults on request: what can be asked for, how it is written, and what is in force. Off unless `--enable-faults`.

    faults = item *( ";" item )            latency=250ms; error=503; body=busy
    item   = name [ "=" value ]

A request carries its own in the header `x-prfaas-fault`; `/prfaas/faults` sets those of all requests and those of the
process (PUT with this text, GET, DELETE). docs/worker.md has the table.
"""

from __future__ import annotations

import contextvars
import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args
from urllib.parse import quote, unquote_to_bytes

KVFault = Literal["stall", "cut", "corrupt", "wrong"]
Wrong = Literal["token", "model"]
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m)")
_IN_A_SECOND = {"ms": 1000, "s": 1, "m": 1 / 60}
_LONGEST = 3_600.0


class FaultError(ValueError):
    """A text that asks for no fault this worker knows; the message says which item and what would be right."""


@dataclass(frozen=True)
class Faults:
    """What is asked for. Durations are real seconds."""

    latency: float | None = None
    """Wait so long before a request is looked at."""
    hang: bool = False
    """Never look at it."""
    error: int | None = None
    """Answer this status, without looking at the request."""
    body: bytes | None = None
    """Of that answer; vLLM's error object unless given."""
    cut: str | int | None = None
    """Drop the connection: on the `request`, before the `headers` of the answer, after so many parts of it."""
    stall: int | None = None
    """Say nothing more after so many parts of the answer."""
    wrong: Wrong | None = None
    """Answer with one wrong token, or under another model's name."""
    no_kv: bool = False
    """Answer a prefill without `kv_transfer_params`."""
    kv: KVFault | None = None
    """What becomes of the transfer of this request's KV, on the side that sends it."""
    times: int | None = None
    """How many requests are affected; all unless given."""
    stale_kv: bool = False
    """Let a late or second reader have wrong KV, as vLLM does, instead of refusing it."""
    health: str | int | None = None
    """What `/health` and `/ping` answer: a status, or nothing at all (`hang`)."""
    blocks: int | None = None
    """How many KV blocks are left; as far as they are free now."""
    exit: int | None = None
    """End the process with this status: at once, or as `after` or `requests` say."""
    after: float | None = None
    requests: int | None = None
    """With the so manieth request from now."""
    slow_start: float | None = None
    """Load so much longer; only at the start."""

    def __str__(self) -> str:
        items = ((field.name.replace("_", "-"), getattr(self, field.name)) for field in fields(self))
        return "; ".join(_written(name, value) for name, value in items if value is not None and value is not False)


OF_A_REQUEST = frozenset(("latency", "hang", "error", "body", "cut", "stall", "wrong", "no_kv", "kv"))
NONE = Faults()
asked_for: contextvars.ContextVar[Faults] = contextvars.ContextVar("faults of the request", default=NONE)
"""The faults of the request that is being handled."""


def parse(text: str, *, of_a_request: bool = False, at_start: bool = False) -> Faults:
    """Read the grammar above; FaultError names the item that is wrong."""
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        written, equals, value = (part.strip() for part in item.partition("="))
        name = written.replace("-", "_")
        if name not in _READERS or "_" in written:
            raise FaultError(f"{written}: no such fault; there are {', '.join(sorted(_NAMES))}")
        if name in given:
            raise FaultError(f"{written}: given twice")
        if of_a_request and name not in OF_A_REQUEST:
            raise FaultError(f"{written}: not a fault of one request; set it by PUT /prfaas/faults")
        if name == "slow_start" and not at_start:
            raise FaultError("slow-start: only at the start, by --faults slow-start=...")
        read, right = _READERS[name]
        try:
            given[name] = read(value if equals else None)
        except ValueError as error:
            raise FaultError(f"{item}: {written} must be {right}") from error
    _fit(given)
    return Faults(**given)


def _fit(given: dict[str, Any]) -> None:
    for name, needed in (("body", "error"), ("after", "exit"), ("requests", "exit")):
        if name in given and needed not in given:
            raise FaultError(f"{name}: only together with {needed}=...")
    if "after" in given and "requests" in given:
        raise FaultError("after, requests: only one of them")
    if "times" in given and not OF_A_REQUEST & given.keys():
        raise FaultError("times: only together with a fault of requests")


def _duration(text: str | None) -> float:
    match = _DURATION.fullmatch(text or "")
    seconds = float(match[1]) / _IN_A_SECOND[match[2]] if match else -1.0
    if not 0 <= seconds <= _LONGEST:
        raise ValueError
    return seconds


def _number(low: int, high: int) -> Callable[[str | None], int]:
    def read(text: str | None) -> int:
        if not (text or "").isdecimal() or not low <= int(text or "") <= high:
            raise ValueError
        return int(text or "")

    return read


def _switch(text: str | None) -> bool:
    if text is not None:
        raise ValueError
    return True


def _one_of(*words: str) -> Callable[[str | None], str]:
    def read(text: str | None) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


def _word_or(word: tuple[str, ...], number: Callable[[str | None], int]) -> Callable[[str | None], str | int]:
    return lambda text: text if text in word and text is not None else number(text)


_A_DURATION = "a duration of at most an hour, such as 250ms, 2s or 1m"
_READERS: dict[str, tuple[Callable[[str | None], Any], str]] = {
    "latency": (_duration, _A_DURATION),
    "hang": (_switch, "alone, without a value"),
    "error": (_number(400, 599), "a status from 400 to 599"),
    "body": (lambda text: unquote_to_bytes(text or ""), "percent-encoded text"),
    "cut": (_word_or(("request", "headers"), _number(1, 10**6)), "request, headers, or a number of parts above 0"),
    "stall": (_number(0, 10**6), "a number of parts"),
    "wrong": (_one_of(*get_args(Wrong)), "token or model"),
    "no_kv": (_switch, "alone, without a value"),
    "kv": (_one_of(*get_args(KVFault)), "stall, cut, corrupt or wrong"),
    "times": (_number(1, 10**6), "a number of requests above 0"),
    "stale_kv": (_switch, "alone, without a value"),
    "health": (_word_or(("hang",), _number(200, 599)), "a status from 200 to 599, or hang"),
    "blocks": (_number(0, 2**31), "a number of blocks"),
    "exit": (_number(0, 255), "a status from 0 to 255"),
    "after": (_duration, _A_DURATION),
    "requests": (_number(1, 10**6), "a number of requests above 0"),
    "slow_start": (_duration, _A_DURATION),
}
_NAMES = frozenset(name.replace("_", "-") for name in _READERS)


def _written(name: str, value: Any) -> str:
    if value is True:
        return name
    if isinstance(value, float):
        return f"{name}={value * 1000:.3f}".rstrip("0").rstrip(".") + "ms"
    return f"{name}={quote(value) if isinstance(value, bytes) else value}"


class FaultBox:
    """The faults in force in one worker, and how often each was applied."""

    def __init__(self, initial: Faults | None) -> None:
        self.enabled = initial is not None
        self.current = initial or NONE
        self.applied: Counter[str] = Counter()
        self._left = self.current.times

    def set(self, faults: Faults) -> None:
        """These from now on, and no others."""
        self.current, self._left = faults, faults.times
        self.applied.clear()

    def of_request(self, header: str | None) -> Faults:
        """The faults of a request that arrives: those of its header, else those in force; FaultError."""
        if header is not None:
            return parse(header, of_a_request=True)
        if self._left is not None:
            if self._left == 0:
                return NONE
            self._left -= 1
        kept = {name: getattr(self.current, name) for name in OF_A_REQUEST}
        return dataclasses.replace(NONE, **kept)

    def note(self, name: str) -> None:
        """A fault was applied."""
        self.applied[name] += 1

    def document(self) -> dict[str, Any]:
        """What GET answers."""
        return {"faults": str(self.current), "applied": dict(self.applied)}
