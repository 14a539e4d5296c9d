"""What happens to a run from outside: a line's rate, failures, conversions, a new policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LineRate:
    """From `at` on a line carries `gbps`, Gbit/s; 0: it is cut, transfers on it wait, new requests avoid it."""

    at: float
    line: str
    """A line, as `Link.line_name` has it."""
    gbps: float


@dataclass(frozen=True, slots=True)
class Failure:
    """At `at` an instance is lost with what it does, and is back, ready, `seconds` later.

    Who waited for its first token starts anew; a request that had tokens already has failed.
    """

    at: float
    resource: str
    """`prfaas/NAME`, `prefill/NAME` or `decode/NAME`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Conversion:
    """At `at` an instance of a PD pool begins to change its role: it ends what it does, starts up, and is ready."""

    at: float
    pd: str
    to: Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class NewThresholds:
    """From `at` on requests are routed by these thresholds, by link, tokens."""

    at: float
    thresholds: Mapping[str, int]


Change = LineRate | Failure | Conversion | NewThresholds
