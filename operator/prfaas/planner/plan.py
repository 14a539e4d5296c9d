"""`plan`: the setting to use, why, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prfaas.planner.setting import Expectation, Objective, Setting
from prfaas.planner.topology import Topology
from prfaas.planner.workload import Workload


@dataclass(frozen=True)
class Alternative:
    """Another setting, and what it gives up."""

    setting: Setting
    expected: Expectation
    loss: float
    """Part of the plan's lambda_max that it loses, 0 to 1 (below 0: it has more, but not what the objective asks)."""


@dataclass(frozen=True)
class Sensitivities:
    """What one more would add to lambda_max, requests/s, with everything planned anew."""

    per_instance: Mapping[str, float]
    """By pool: one more instance."""
    per_gbps: Mapping[str, float]
    """By line: one more Gbit/s."""


@dataclass(frozen=True)
class Plan:
    """The setting to use."""

    setting: Setting
    expected: Expectation
    bound: float
    """No setting of any kind serves more than this, requests/s."""
    gap: float
    """How far below that the plan may be, as a part of it; 0: proven best."""
    reason: str
    sensitivities: Sensitivities
    second: Alternative | None
    """The best plan with another split; None: there is no other split."""
    staying: Alternative | None
    """What the present setting would do; None: none was given."""


def plan(workload: Workload, topology: Topology, objective: Objective, present: Setting | None = None) -> Plan:
    """The best setting for a workload on what there is. Raises PlanError for what cannot be planned."""
    raise NotImplementedError
