"""The case study as values, and ways to vary it: what the planner's tests have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.api.profiles import shipped
from prfaas.planner.setting import ServiceTime
from prfaas.planner.single import Choice, Pair
from prfaas.planner.throughput import Model
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.planner.workload import Workload

ROOT = Path(__file__).parents[2]
PAPER_FILE = ROOT / "manifests/examples/paper.yaml"
PAPER: dict[str, Any] = json.loads((ROOT / "tests/data/prfaas_paper.json").read_text())
H200, H20 = shipped("H200x8"), shipped("H20x8")


def workload(output: float = 1024, cached: float = 0.0) -> Workload:
    """Lengths of the case study."""
    return Workload.log_normal(mu=9.90, sigma=1.00, lo=128, hi=131072, output=output, cached=cached)


def topology(remote: int = 4, local: int = 8, gbps: float = 100.0, **link: Any) -> Topology:
    """32 H200 and 64 H20 over one link, unless varied."""
    return Topology(
        (PrfaaSPool("h200", H200, remote),),
        (PDPool("h20", H20, local),),
        (Link("east", "h200", "h20", gbps, **link),),
    )


def best(
    of: Workload,
    on: Topology,
    service_time: ServiceTime = "representative",
    present: tuple[int, int | None] | None = None,
) -> Choice:
    """The optimum of one pair."""
    return Pair(Model(of, on, service_time), on.pd[0], on.links[0]).choices(present)[0]


def with_pd(on: Topology, **changes: Any) -> Topology:
    """The topology with its one PD pool changed."""
    return replace(on, pd=(replace(on.pd[0], **changes),))
