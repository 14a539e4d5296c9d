"""What happens to a run from outside: a line's rate, failures, conversions, a new policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prfaas.planner.errors import PlanError
from prfaas.planner.topology import Topology


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

SCHEDULE_HEADER = "seconds,gbps"


def read_schedule(lines: Iterable[str], name: str, topology: Topology) -> list[LineRate]:
    """Rates over time as CSV: `seconds,gbps`, or `seconds,gbps,link` where there are several links.

    Empty lines, lines that begin with #, and a header are passed over. Raises PlanError with the line's number.
    """
    links = {link.name: link.line_name for link in topology.links}
    found: list[LineRate] = []
    for number, text in enumerate(lines, start=1):
        cells = [cell.strip() for cell in text.split(",")]
        if not text.strip() or text.lstrip().startswith("#") or (not found and cells[:2] == SCHEDULE_HEADER.split(",")):
            continue
        place = f"{name}:{number}"
        if len(cells) not in (2, 3):
            raise PlanError(place, f"has {len(cells)} values; {SCHEDULE_HEADER} or {SCHEDULE_HEADER},link is wanted")
        if len(cells) == 2 and len(set(links.values())) != 1:
            raise PlanError(place, f"say which link: {SCHEDULE_HEADER},link; there are {sorted(links)}")
        if len(cells) == 3 and cells[2] not in links:
            raise PlanError(f"{place}: link", f"there is no link {cells[2]!r}; there are {sorted(links)}")
        line = links[cells[2]] if len(cells) == 3 else next(iter(links.values()))
        found.append(LineRate(_cell(cells[0], f"{place}: seconds"), line, _cell(cells[1], f"{place}: gbps")))
    if not found:
        raise PlanError(name, f"has no rates; lines of {SCHEDULE_HEADER} are wanted")
    return found


def _cell(text: str, path: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise PlanError(path, f"must be a number, at least 0; got {text!r}")
    return value
