"""What a policy's name means for a workload on what there is: topology, setting and queue of a run.

    planned        the plan's split and threshold
    threshold=N    the split of highest throughput with that threshold on every link
    homogeneous, naive, blind    the planner's baselines

and in which order requests wait (`queueing`): plain, spill, steal, or triage (`prfaas.routing`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prfaas.planner.baselines import Baseline, blind, homogeneous, naive
from prfaas.planner.errors import PlanError
from prfaas.planner.input import Planning
from prfaas.planner.latency import zero_load
from prfaas.planner.plan import plan
from prfaas.planner.setting import Setting
from prfaas.planner.simulator.world import CacheOf, QueueOf
from prfaas.planner.throughput import Model
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.planner.workload import Workload
from prfaas.routing.prefixes import PrefixCache, Semantics
from prfaas.routing.queueing import Blind, ByThreshold, Homed, Stealing
from prfaas.routing.triage import Promises, Triage
from prfaas.routing.waiting import Home, Queue

Queueing = Literal["plain", "spill", "steal", "triage"]
QUEUEINGS: tuple[Queueing, ...] = ("plain", "spill", "steal", "triage")
POLICIES = ("planned", "threshold=N", "homogeneous", "naive", "blind")
SPILL_SECONDS = 1.0


@dataclass(frozen=True)
class Scenario:
    """What `Simulation` takes."""

    topology: Topology
    setting: Setting
    queue_of: QueueOf
    lambda_max: float
    """What the planner says it serves, requests/s."""


def scenario(policy: str, planning: Planning, queueing: Queueing = "plain", seed: int = 0) -> Scenario:
    """The scenario of a policy. Raises PlanError for a name that is none, or what cannot be planned."""
    workload, objective = planning.workload, planning.objective
    if objective.service_time == "representative":
        workload = workload.with_mean_cached()
    if policy == "planned" or policy.startswith("threshold="):
        topology = planning.topology
        if policy != "planned":
            cut = _threshold(policy)
            links = tuple(replace(link, min_threshold=cut, max_threshold=cut) for link in topology.links)
            topology = replace(topology, links=links)
            objective = replace(objective, goal="throughput")
        found = plan(workload, topology, objective, planning.present if policy == "planned" else None)
        setting = found.setting
        queue_of = _queues(queueing, setting, _p90(workload, topology, setting))
        return Scenario(topology, setting, queue_of, found.expected.lambda_max)
    model = Model(workload, planning.topology, objective.service_time)
    makers = {"homogeneous": homogeneous, "naive": naive, "blind": blind}
    if policy not in makers:
        raise PlanError("--policy", f"{policy!r} is none: give one of {', '.join(POLICIES)}")
    base = makers[policy](model)
    if base is None:
        raise PlanError("--policy", f"{policy} is not possible with these pools and links")
    if policy == "blind":
        return _blind(base, queueing, seed)
    queue_of = _queues(queueing, base.setting, zero_load(base.model, base.parts).p90)
    return Scenario(base.model.topology, base.setting, queue_of, base.loads.lambda_max)


def caches(semantics: Semantics | Literal["auto", "none"], block_tokens: int, capacity_bytes: float) -> CacheOf:
    """A prefix cache for each pool, of `capacity_bytes`; `auto`: hybrid where the model has a state of its own."""

    def cache_of(pool: PrfaaSPool | PDPool) -> PrefixCache | None:
        kv = pool.profile.kv
        kind = semantics if semantics != "auto" else "hybrid" if kv.fixed_bytes else "full"
        if kind == "none":
            return None
        return PrefixCache(
            kind,
            block_tokens,
            capacity_bytes=capacity_bytes,
            row_bytes=kv.scale * kv.bytes_per_token,
            state_bytes=kv.scale * kv.fixed_bytes,
        )

    return cache_of


def _threshold(policy: str) -> int:
    text = policy.removeprefix("threshold=")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise PlanError("--policy", f"{text!r} is no threshold: give a number of tokens, as in threshold=19400")
    return int(text)


def _p90(workload: Workload, topology: Topology, setting: Setting) -> float:
    model = Model(workload, topology)
    return zero_load(model, model.parts(setting)).p90


def _queues(queueing: Queueing, setting: Setting, zero_load_p90: float) -> QueueOf:
    def queue_of(pd: PDPool, links: Sequence[Link]) -> Queue:
        cuts: list[float | None] = [None, *(setting.thresholds.get(link.name) for link in links)]
        if queueing != "triage":
            return _of_home(queueing, ByThreshold(cuts))
        if len(links) > 1:
            raise PlanError("--queueing", f"triage knows one link; the pool {pd.name} has {len(links)}")
        queue = Triage(1.0, Promises.self_tuned(zero_load_p90))
        queue.set_thresholds(cuts)
        return queue

    return queue_of


def _of_home(queueing: Queueing, home: Home) -> Queue:
    if queueing == "steal":
        return Stealing(home)
    return Homed(home, SPILL_SECONDS if queueing == "spill" else None)


def _blind(base: Baseline, queueing: Queueing, seed: int) -> Scenario:
    if queueing == "triage":
        raise PlanError("--queueing", "triage needs a threshold, blind has none")
    shares = {part.link: part.share for part in base.parts}
    setting = replace(base.setting, thresholds={link: 0 for link in shares if link is not None})
    draw = random.Random(f"{seed}/blind").random

    def queue_of(pd: PDPool, links: Sequence[Link]) -> Queue:
        row = [shares.get(None, 0.0), *(shares.get(link.name, 0.0) for link in links)]
        return _of_home(queueing, Blind(row, draw))

    return Scenario(base.model.topology, setting, queue_of, base.loads.lambda_max)
