"""`plan`: the setting to use, why, and what it is worth.

One PD pool with one link at most is solved exactly (`single`), anything larger within a stated gap (`network`); the
objectives latency and cost choose among such solutions (`objectives`). Where the present setting is as good as the best
it is kept: nothing is moved for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from prfaas.planner.baselines import Baseline, pair_of
from prfaas.planner.errors import PlanError
from prfaas.planner.latency import under_load, zero_load
from prfaas.planner.network import class_means, marginal, search
from prfaas.planner.objectives import cheapest, fastest
from prfaas.planner.relaxation import Relaxation, supporting_lines
from prfaas.planner.setting import Expectation, Latency, Objective, Setting
from prfaas.planner.single import SAME, Pair
from prfaas.planner.throughput import Loads, Model
from prfaas.planner.topology import Link, Topology
from prfaas.planner.workload import Workload

FEW = 60
"""PD instances up to which one more is planned anew; above, one more is little, and the prices of the last linear
program say what it brings."""


@dataclass(frozen=True)
class Alternative:
    """Another setting, and what it gives up."""

    setting: Setting
    expected: Expectation
    loss: float
    """Part of the plan's lambda_max that it loses, 0 to 1 (below 0: it has more, but not what the objective asks)."""


@dataclass(frozen=True)
class Sensitivities:
    """What one more would add to lambda_max, requests/s, with thresholds and splits planned anew."""

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
    """No setting serves more than this, requests/s."""
    gap: float
    """How far below that the plan may be, as a part of it; 0: proven best."""
    reason: str
    second: Alternative | None
    """The best plan with another split; None: there is no other split."""
    staying: Alternative | None
    """What the present setting would do; None: none was given, or it does not fit what there is."""
    plan_more: Callable[[], Sensitivities] = field(repr=False, compare=False)

    @cached_property
    def sensitivities(self) -> Sensitivities:
        """What one more instance or Gbit/s would add; planned when first asked for, as it takes a plan for each."""
        return self.plan_more()


@dataclass(frozen=True)
class _Best:
    setting: Setting
    rate: float
    bound: float
    second: Setting | None


def plan(workload: Workload, topology: Topology, objective: Objective, present: Setting | None = None) -> Plan:
    """The best setting for a workload on what there is. Raises PlanError for what cannot be planned."""
    model = Model(workload, topology, objective.service_time)
    pair = pair_of(model)
    staying = _fits(model, present)
    best = _of_pair(pair, staying) if pair is not None else _of_many(model, staying)
    setting = best.setting
    if objective.goal == "latency":
        setting = fastest(model, pair, best.setting, objective)
    elif objective.goal == "cost":
        setting = cheapest(model, pair, objective)
    expected = expect(model, setting, objective.rate)
    if not expected.lambda_max > 0:
        raise PlanError("topology", "serves nothing: some PD pool needs instances that prefill, here or over a link")
    bound = max(best.bound, expected.lambda_max)
    return Plan(
        setting=setting,
        expected=expected,
        bound=bound,
        gap=1 - expected.lambda_max / bound if objective.goal == "throughput" else 0.0,
        reason=_reason(model, setting, expected, objective),
        second=_alternative(model, best.second, expected, objective),
        staying=_alternative(model, staying, expected, objective),
        plan_more=lambda: _sensitivities(model, best),
    )


def expect(model: Model, setting: Setting, rate: float | None = None) -> Expectation:
    """What a setting does; with a `rate` (requests/s) also its latency under that load."""
    loads = model.loads(setting)
    loaded = None if rate is None else under_load(model, setting, rate)
    return _expectation(loads, zero_load(model, model.parts(setting)), loaded)


def expect_of(baseline: Baseline, rate: float | None = None) -> Expectation:
    """What a baseline does. Latency under load only where lengths decide: a random choice is no setting."""
    by_length = baseline.parts == baseline.model.parts(baseline.setting)
    loaded = under_load(baseline.model, baseline.setting, rate) if rate is not None and by_length else None
    return _expectation(baseline.loads, zero_load(baseline.model, baseline.parts), loaded)


def _expectation(loads: Loads, ttft: Latency, loaded: Latency | None) -> Expectation:
    return Expectation(
        lambda_max=loads.lambda_max,
        theta=loads.theta,
        bottleneck=loads.bottleneck,
        utilisation=loads.utilisation,
        offload_share=loads.offload_share,
        mean_long=loads.mean_long,
        mean_short=loads.mean_short,
        egress_gbps=loads.lambda_max * loads.gbit,
        ttft=ttft,
        loaded=loaded,
    )


def _of_pair(pair: Pair, present: Setting | None) -> _Best:
    mine = None
    if present is not None:
        threshold = present.thresholds.get(pair.link.name) if pair.link is not None else None
        mine = present.splits[pair.pd.name].prefill, threshold
    choices = pair.choices(mine)
    setting, other = (
        pair.setting(each.prefill, each.threshold) for each in (choices[0], choices[min(1, len(choices) - 1)])
    )
    return _Best(setting, choices[0].rate, choices[0].rate, other if len(choices) > 1 else None)


def _of_many(model: Model, present: Setting | None) -> _Best:
    found = search(model)
    setting, bound, second = found.setting, found.bound, found.second
    if present is not None and model.loads(present).lambda_max >= found.rate * (1 - SAME):
        setting = present
    return _Best(setting, found.rate, bound, second)


def _fits(model: Model, present: Setting | None) -> Setting | None:
    if present is None:
        return None
    try:
        model.loads(present)
    except PlanError:
        return None  # it is about pools that have changed since
    return present


def _alternative(model: Model, setting: Setting | None, best: Expectation, objective: Objective) -> Alternative | None:
    if setting is None:
        return None
    expected = expect(model, setting, objective.rate)
    return Alternative(setting, expected, 1 - expected.lambda_max / best.lambda_max)


def _sensitivities(model: Model, best: _Best) -> Sensitivities:
    topology, setting, rate = model.topology, best.setting, best.rate
    if sum(pd.instances for pd in topology.pd) <= FEW:
        return _replanned(model, rate)
    relaxation = Relaxation(model)
    if model.service_time == "representative":
        relaxation = Relaxation(model, supporting_lines(model, class_means(model, setting)))
    prices = marginal(relaxation, setting, rate)
    instances = {pool.name: prices.get(f"prfaas/{pool.name}", 0.0) for pool in topology.prfaas}
    for pd in topology.pd:
        instances[pd.name] = max(prices.get(f"prefill/{pd.name}", 0.0), prices.get(f"decode/{pd.name}", 0.0))
    return Sensitivities(instances, {line: prices.get(f"line/{line}", 0.0) for line in topology.lines})


def _replanned(model: Model, rate: float) -> Sensitivities:
    topology = model.topology

    def gain(**changes: Any) -> float:
        try:
            changed = replace(topology, **changes)
        except PlanError:
            return 0.0  # the pool's own bounds leave no role for one more
        other = Model(model.workload, changed, model.service_time)
        pair = pair_of(other)
        best = search(other).rate if pair is None else pair.choices()[0].rate
        return max(0.0, best - rate)

    instances = {}
    for index, pool in enumerate(topology.prfaas):
        more = (*topology.prfaas[:index], replace(pool, instances=pool.instances + 1), *topology.prfaas[index + 1 :])
        instances[pool.name] = gain(prfaas=more)
    for index, pd in enumerate(topology.pd):
        larger = (*topology.pd[:index], replace(pd, instances=pd.instances + 1), *topology.pd[index + 1 :])
        instances[pd.name] = gain(pd=larger)
    lines = {}
    for line in topology.lines:
        wider = tuple(widened(link, 1.0) if link.line_name == line else link for link in topology.links)
        lines[line] = gain(links=wider)
    return Sensitivities(instances, lines)


def widened(link: Link, gbps: float) -> Link:
    """The link with `gbps` more of everything that bounds its rate."""
    measured = None if link.measured_gbps is None else link.measured_gbps + gbps
    return replace(link, capacity_gbps=link.capacity_gbps + gbps, measured_gbps=measured)


def _reason(model: Model, setting: Setting, expected: Expectation, objective: Objective) -> str:
    """One or two sentences: what is done, and what limits it."""
    parts = []
    for name, split in setting.splits.items():
        parts.append(f"{name}: {split.prefill} prefill and {split.decode} decode instances")
    for name, tokens in sorted(setting.thresholds.items()):
        parts.append(f"prompts above {tokens:,} uncached tokens go over {name}")
    if not setting.thresholds:
        parts.append("no prompt goes over a link" if model.topology.links else "there is no link")
    why = {
        "throughput": f"the highest rate, {expected.lambda_max:.2f} requests/s, limited by {told(expected.bottleneck)}",
        "latency": f"the lowest P90 of the time to first token at {objective.rate or 0:g} requests/s",
        "cost": f"the lowest cost that serves {objective.rate or 0:g} requests/s"
        + ("" if objective.ttft_p90_seconds is None else f" with a P90 of at most {objective.ttft_p90_seconds:g} s"),
    }[objective.goal]
    return f"{'; '.join(parts)}: {why}."


def told(resource: str) -> str:
    """A resource as a person would call it."""
    kind, name = resource.split("/", 1)
    return {
        "prfaas": f"the remote prefill instances of {name}",
        "line": f"the line {name.removeprefix('link:')}",
        "prefill": f"the local prefill instances of {name}",
        "decode": f"the decode instances of {name}",
    }[kind]
