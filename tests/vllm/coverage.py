"""How much of vLLM the worker emulates: every entry of the facts, and what the registries say of it.

The registries are `tests/worker/coverage/*.yaml`: entry -> `emulated`, or `not emulated: REASON`. What an entry is
called here follows from the facts alone, so that none can be left out. `python -m tests.vllm.coverage` prints the
shares, and with the name of a registry the entries that it lacks.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.facts import facts

REGISTRIES = Path(__file__).parents[1] / "worker" / "coverage"
LEAST = 0.95
"""Share of routes, metrics, flags and error bodies that must be emulated."""


def routes() -> Iterator[str]:
    """`GET /health`; those of other servers with their name before them."""
    found = facts("routes")
    for server, key in (
        ("", "routes"),
        ("supervisor ", "dp_supervisor_routes"),
        ("bootstrap ", "mooncake_bootstrap_routes"),
    ):
        yield from (f"{server}{route['method']} {route['path']}" for route in found[key])


def flags() -> Iterator[str]:
    """The first form of each flag."""
    return (flag["flags"][0] for flag in facts("cli_flags")["flags"])


def errors() -> Iterator[str]:
    """Status, type where there is one, and when."""
    found = facts("errors")
    for error in (*found["errors"], *found["other_bodies"]):
        kind = f" {error['type']}" if "type" in error else ""
        yield f"{error['status']}{kind}: {error['when']}"


def metrics() -> Iterator[str]:
    """The names."""
    return (metric["name"] for metric in facts("metrics")["metrics"])


def env() -> Iterator[str]:
    """The variables that mean something to an operator."""
    return (variable["name"] for variable in facts("env")["operator"])


ENTRIES: Mapping[str, Callable[[], Iterator[str]] | None] = {
    "routes": routes,
    "metrics": metrics,
    "flags": flags,
    "errors": errors,
    "env": env,
    # What is an entry of these is not a list in the facts: tests/worker/ compares them.
    "kv_events": None,
    "kv_transfer": None,
}
MEASURED = ("routes", "metrics", "flags", "errors")
"""Those of which LEAST must be emulated."""


@dataclass(frozen=True)
class Coverage:
    """What one registry says."""

    name: str
    emulated: frozenset[str]
    reasons: Mapping[str, str]
    """Entries that are not emulated."""
    malformed: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def total(self) -> int:
        return len(self.emulated) + len(self.reasons) + len(self.missing)

    @property
    def share(self) -> float:
        return len(self.emulated) / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.name:12} {len(self.emulated):4} of {self.total:4} emulated, {self.share:6.1%}"


@functools.cache
def coverage(name: str) -> Coverage:
    """Reads one registry."""
    file = REGISTRIES / f"{name}.yaml"
    content: dict[str, Any] = yaml.safe_load(file.read_text()) if file.exists() else {}
    emulated, reasons, malformed = set(), {}, []
    for entry, state in content.items():
        match state:
            case "emulated":
                emulated.add(entry)
            case {"not emulated": str(reason), **rest} if reason.strip() and not rest:
                reasons[entry] = reason
            case _:
                malformed.append(entry)
    listed = ENTRIES[name]
    expected = dict.fromkeys(listed()) if listed is not None else dict.fromkeys(content)
    return Coverage(
        name,
        frozenset(emulated),
        reasons,
        tuple(malformed),
        missing=tuple(entry for entry in expected if entry not in content),
        unknown=tuple(entry for entry in content if entry not in expected),
    )


def main(names: list[str]) -> int:
    """Print the shares, or what a registry lacks."""
    for name in names:
        print(*(f"{json.dumps(entry, ensure_ascii=False)}: emulated" for entry in coverage(name).missing), sep="\n")
    if not names:
        print(*map(coverage, ENTRIES), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
