"""What if there were more: `prfaas=+2,link=25` as a change of the topology, `link=100,50,25` as a row of them.

A name is a pool's or a link's, or one of `prfaas`, `pd` and `link` for the only one of its kind. For a pool the number
is instances; for a link Gbit/s. A sign makes it relative to what there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from prfaas.planner.errors import PlanError
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology

MAX_POINTS = 200
P = TypeVar("P", PrfaaSPool, PDPool)


@dataclass(frozen=True)
class Change:
    """One pool or link, and its new number."""

    name: str
    value: float
    relative: bool = False


def parse_what_if(text: str) -> list[Change]:
    """`NAME=[+-]NUMBER,...`. Raises PlanError."""
    changes = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise PlanError("--what-if", f"{part!r} is not NAME=NUMBER, such as prfaas=+2 or link=25")
        changes.append(Change(name.strip(), _number("--what-if", value), value.strip()[:1] in ("+", "-")))
    return changes


def parse_sweep(text: str) -> list[Change]:
    """`NAME=NUMBER,NUMBER,...`: one change for each number. Raises PlanError."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip():
        raise PlanError("--sweep", f"{text!r} is not NAME=NUMBER,NUMBER,..., such as link=100,50,25")
    numbers = [_number("--sweep", value) for value in values.split(",")]
    if len(numbers) > MAX_POINTS:
        raise PlanError("--sweep", f"has {len(numbers)} points, at most {MAX_POINTS} are planned")
    return [Change(name.strip(), value) for value in numbers]


def changed(topology: Topology, change: Change) -> Topology:
    """The topology with one change. Raises PlanError for a name that is not there and a number that cannot be."""
    kind, name = _resolve(topology, change.name)
    if kind == "links":
        links = tuple(_with_rate(link, change) if link.name == name else link for link in topology.links)
        return replace(topology, links=links)
    prfaas = tuple(_with_count(p, change) if kind == "prfaas" and p.name == name else p for p in topology.prfaas)
    pd = tuple(_with_count(p, change) if kind == "pd" and p.name == name else p for p in topology.pd)
    return replace(topology, prfaas=prfaas, pd=pd)


def _with_rate(link: Link, change: Change) -> Link:
    rate = link.capacity_gbps if link.measured_gbps is None else min(link.capacity_gbps, link.measured_gbps)
    rate = rate + change.value if change.relative else change.value
    if not rate > 0:
        raise PlanError(change.name, f"would leave {rate:g} Gbit/s: give more than 0")
    return replace(link, capacity_gbps=rate, measured_gbps=None)


def _with_count(pool: P, change: Change) -> P:
    count = pool.instances + change.value if change.relative else change.value
    if count != round(count) or count < 0:
        raise PlanError(change.name, f"would leave {count:g} instances: give a whole number from 0")
    return replace(pool, instances=round(count))


def _resolve(topology: Topology, name: str) -> tuple[str, str]:
    names = {
        "prfaas": [pool.name for pool in topology.prfaas],
        "pd": [pool.name for pool in topology.pd],
        "links": [link.name for link in topology.links],
    }
    for kind, known in names.items():
        if name in known:
            return kind, name
    kind = "links" if name in ("link", "links") else name
    if kind in names and len(names[kind]) == 1:
        return kind, names[kind][0]
    known = [each for group in names.values() for each in group]
    if kind in names:
        raise PlanError(name, f"there are {len(names[kind])} of them: name one ({', '.join(names[kind])})")
    raise PlanError(name, f"there is no such pool or link: {', '.join(known)}")


def _number(path: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(path, f"{text!r} is not a number")
    return value
