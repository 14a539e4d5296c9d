"""The condition `ModelCached`, and the fetch Jobs behind it: one for a claim, one for each node of a hostPath cache.

 1. Places where the model is needed: the claim; or the nodes that instances have (and, where nodes may be listed, all
    that match the pool).
 2. A Job that is done, for this model and a place, is the record that the model is there. It is kept whatever else of
    the spec changes, and when its node has no instance for a while.
 3. A place without such a record gets a Job; Jobs of other models and of places that are not needed go. What they
    have fetched stays on the disk.
 4. An instance that still waits minutes after its place was filled waits in vain (the disk was wiped): the record
    goes, so that the next look makes a new Job.

While a place that is needed is not filled, no rollout begins: instances that run keep the model that they have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from prfaas.api import labels
from prfaas.api.conditions import FETCH_FAILURES, Reason, Type, Verdict
from prfaas.api.pool import PoolSpec
from prfaas.kube.apply import plan
from prfaas.kube.errors import Forbidden, KubeError
from prfaas.kube.resources import JOB, NODE, POD, Object
from prfaas.operator import fetches
from prfaas.operator.fetches import LOST_SECONDS, State
from prfaas.operator.nodes import matching
from prfaas.operator.observed import instance_pods
from prfaas.operator.pools import belongs_to_another
from prfaas.operator.verdicts import Obstacle, write_obstacle
from prfaas.operator.world import World
from prfaas.workloads import model
from prfaas.workloads.meta import Owner, selector_text
from prfaas.workloads.model import Place

log = logging.getLogger("prfaas.operator")

SOON_SECONDS = 2.0
_NAMED = 5
"""Places that a message names."""
_WORST_FIRST = (*FETCH_FAILURES, Reason.CRASHING, Reason.UNSCHEDULABLE, Reason.FETCHING)


@dataclass(frozen=True)
class Cache:
    """What one look at a pool's model found and did."""

    verdict: Verdict
    hold_rollout: bool = False
    obstacle: Obstacle | None = None
    retry: KubeError | None = None
    """A write that failed and may succeed when tried again."""
    again_after: float | None = None

    @property
    def waits(self) -> list[float]:
        """Reasons to come back. Raises the error that trying again may cure."""
        if self.retry is not None and self.obstacle is None:
            raise self.retry
        return [] if self.again_after is None else [self.again_after]


async def step(world: World, owner: Owner, spec: PoolSpec, instances: int) -> Cache:
    """Looks at the model of a pool that should have so many instances, and has it fetched unless the pool is paused.

    Raises KubeError when the Jobs cannot be read.
    """
    selector, now = selector_text(owner.selector), world.now()
    listed = (await world.client.list(JOB, owner.namespace, labels=selector)).items
    jobs = {job["metadata"]["name"]: job for job in listed if not belongs_to_another(job, owner)}
    pods = (await world.client.list(POD, owner.namespace, labels=selector)).items if spec.model.cache else []
    records = _records(spec, jobs.values())
    lost = {_name(records.pop(place)) for place, job in [*records.items()] if _lost(spec, place, job, pods, now)}
    needed = places(spec, pods, await _nodes(world, spec))
    wanted = {place: model.job(owner, spec, place, world.config.fetcher) for place in needed if place not in records}
    kept = {_name(job) for job in records.values()}
    todo = plan(
        [job for name, job in jobs.items() if name not in kept],
        [job for job in wanted.values() if _name(job) not in lost],
    )
    there = {name: job for name, job in jobs.items() if name not in lost}
    own = {place: records.get(place) or there.get(_name(wanted[place])) for place in needed}
    states = {place: fetches.state_of_job(job, pods, model.FETCHER, now) for place, job in own.items()}
    verdict = judge(spec, states, pods, instances, now)
    hold = any(not state.done for state in states.values())
    again = _again(spec, verdict, pods)
    if spec.paused or (todo.empty and not todo.terminating):
        return Cache(verdict, hold, again_after=again)
    outcome = await world.appliers[owner.kind].execute(todo, owner=owner.selector)
    failed = [*outcome.failed.values()]
    soon = SOON_SECONDS if lost or todo.terminating else again
    return Cache(verdict, hold, write_obstacle(failed), next(iter(failed), None), soon)


def places(spec: PoolSpec, pods: Iterable[Object], nodes: Iterable[str]) -> list[Place]:
    """Where the model is needed."""
    cache = spec.model.cache
    if cache is None or cache.ephemeral is not None:
        return []
    if cache.persistent_volume_claim is not None:
        return [Place()]
    used = {pod["spec"]["nodeName"] for pod in instance_pods(pods) if (pod.get("spec") or {}).get("nodeName")}
    return [Place(node) for node in sorted(used | set(nodes))]


def judge(
    spec: PoolSpec, states: Mapping[Place, State], pods: Sequence[Object], instances: int, now: datetime
) -> Verdict:
    """Whether the model is where the instances load it from."""
    kind, cache, source = Type.MODEL_CACHED, spec.model.cache, spec.model.source
    if source is None:
        return Verdict(kind, True, Reason.IN_IMAGE, "spec.model.source is absent: the engine finds the model itself")
    if cache is None:
        return Verdict(kind, True, Reason.ON_CLAIM, f"the model is mounted from {source}")
    if cache.ephemeral is not None:
        states = _own_states(pods, now)
    if not states:
        if instances == 0:
            return Verdict(kind, True, Reason.NO_INSTANCES, "the pool has no instances")
        return Verdict(kind, False, Reason.NO_NODES, "no instance has a node yet: it is not known where to fetch to")
    missing = {place: state for place, state in states.items() if not state.done}
    if not missing:
        commits = {state.commit for state in states.values() if state.commit}
        if len(commits) > 1:
            text = f"{source}: {spec.model.revision} has moved, and not every place has the same commit of it"
            return Verdict(kind, True, Reason.CACHED, f"{text}; put a commit into spec.model.revision")
        return Verdict(kind, True, Reason.CACHED)
    place, worst = min(missing.items(), key=lambda item: (_WORST_FIRST.index(item[1].reason), str(item[0])))
    where = f"instance {place.node}" if cache.ephemeral is not None else str(place)
    if worst.reason is not Reason.FETCHING:
        return Verdict(kind, False, worst.reason, f"{where}: {worst.message}")
    names = sorted(f"instance {each.node}" if cache.ephemeral is not None else str(each) for each in missing)
    listed = ", ".join(names[:_NAMED]) + (", and others" if len(names) > _NAMED else "")
    return Verdict(kind, False, Reason.FETCHING, f"{source} is on its way to {listed}; see `prfaas status`")


def _own_states(pods: Iterable[Object], now: datetime) -> dict[Place, State]:
    """How instances do that fetch for themselves; of several nodes of one, a node that is not done."""
    states: dict[Place, State] = {}
    for pod in instance_pods(pods):
        place = Place(str(pod["metadata"]["labels"][labels.INSTANCE]))
        if place not in states or states[place].done:
            states[place] = fetches.state_of_pod(pod, "initContainerStatuses", model.CONTAINER, now)
    return states


def _records(spec: PoolSpec, jobs: Iterable[Object]) -> dict[Place, Object]:
    """Jobs that are done, for the model that is wanted now."""
    if not model.shared(spec.model.cache):
        return {}
    wanted = model.identity(spec)
    found: dict[Place, Object] = {}
    for job in jobs:
        metadata = job["metadata"]
        mine = (metadata.get("labels") or {}).get(labels.MODEL) == wanted
        if mine and fetches.complete(job) and "deletionTimestamp" not in metadata:
            found.setdefault(Place((metadata.get("annotations") or {}).get(labels.NODE)), job)
    return found


def _lost(spec: PoolSpec, place: Place, job: Object, pods: Iterable[Object], now: datetime) -> bool:
    """Whether an instance waits in vain at a place that was filled."""
    filled = fetches.completed_at(job)
    for pod in instance_pods(pods):
        if place.node is not None and (pod.get("spec") or {}).get("nodeName") != place.node:
            continue
        since = fetches.waiting_since(pod, model.CONTAINER, model.marker(spec))
        if since is None:
            continue
        if (now - (since if filled is None else max(since, filled))).total_seconds() >= LOST_SECONDS:
            return True
    return False


def _again(spec: PoolSpec, verdict: Verdict, pods: Iterable[Object]) -> float | None:
    """When to look again without an event: a failure may be over, or a wait in vain, by then."""
    vain = model.shared(spec.model.cache) and any(
        fetches.waiting_since(pod, model.CONTAINER, model.marker(spec)) is not None for pod in instance_pods(pods)
    )
    failing = verdict.status is False and verdict.reason is not Reason.FETCHING
    waits = [fetches.FAILURE_SECONDS] * failing + [LOST_SECONDS] * vain
    return min(waits, default=None)


def _name(job: Object) -> str:
    return str(job["metadata"]["name"])


async def _nodes(world: World, spec: PoolSpec) -> list[str]:
    cache = spec.model.cache
    if cache is None or cache.host_path is None or not world.config.read_nodes:
        return []
    try:
        return matching(spec, (await world.client.list(NODE)).items)
    except Forbidden as error:
        # The nodes of instances are known without it.
        log.warning("nodes cannot be listed: %s", error.message)
        return []
