"""What the reconciles of both kinds of pool share: read the children, take one step, say how the instances do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from prfaas.api import labels
from prfaas.api.base import ApiModel
from prfaas.api.pool import PoolSpec
from prfaas.kube.apply import Outcome, Plan, plan
from prfaas.kube.errors import KubeError, NotFound
from prfaas.kube.resources import (
    DEPLOYMENT,
    INTER_CLUSTER_LINK,
    LEADER_WORKER_SET,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Key,
    Object,
    Resource,
    key_of,
)
from prfaas.operator import exchange
from prfaas.operator.objects import Model, fetch, parse
from prfaas.operator.observed import Instances, instances
from prfaas.operator.verdicts import Obstacle, spec_obstacle, write_obstacle
from prfaas.operator.world import Result, World, key_for
from prfaas.workloads import assignment, wanted
from prfaas.workloads.assignment import Step, Wanted
from prfaas.workloads.errors import SpecError
from prfaas.workloads.meta import Owner, selector_text
from prfaas.workloads.model import with_fetcher
from prfaas.workloads.pairing import Pairing

BASE_KINDS = (DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET)
OVERDUE_SECONDS = 60.0
"""How long after its grace period a pod may still be there before it is removed by force: its kubelet is gone."""
LEFTOVER_SECONDS = 2.0
"""When to look again for names that the garbage collector is about to free."""
OBSTACLE_SECONDS = 30.0
"""When to look again at something that a person may have moved out of the way without any event of ours."""


@dataclass(frozen=True)
class Children:
    """A pool's children and pods, as read."""

    owner: Owner
    objects: tuple[Object, ...]
    pods: tuple[Object, ...]
    leftovers: frozenset[Key] = frozenset()
    """Children of an earlier object of the same name, which the cluster is about to collect: their names are taken."""

    @property
    def instances(self) -> Instances:
        """The instances among them. Those of an earlier owner are going."""
        seen = instances(self.owner.name, self.objects, self.pods)
        gone = {key.name for key in self.leftovers}
        marked = tuple(replace(child, going=True) if child.name in gone else child for child in seen.children)
        return replace(seen, children=marked)

    def find(self, resource: Resource, name: str) -> Object | None:
        """One child."""
        for obj in self.objects:
            if obj["kind"] == resource.kind and obj["metadata"]["name"] == name:
                return obj
        return None

    def after(self, outcome: Outcome) -> Children:
        """The children once a plan was carried out, without reading them again."""
        return replace(self, objects=tuple(outcome.after(self.objects).values()))


async def open_pool(world: World, key: Key, model: type[Model]) -> tuple[Object, Model] | None:
    """The pool as it is, and as a model. None when there is nothing to do: it is gone, or its conditions say why it
    cannot be read. What a pool that is gone has left behind is taken back. Raises KubeError.
    """
    live = await fetch(world, key)
    if live is None:
        await exchange.withdraw(world, key)
        await wake_links(world, key)
        return None
    pool = await parse(world, live, model)
    return None if pool is None else (live, pool)


async def read(world: World, owner: Owner, spec: PoolSpec, kinds: Sequence[Resource] = ()) -> Children:
    """Reads everything that carries the owner's labels, of the base kinds, `kinds`, and pods. Raises KubeError."""
    selector = selector_text(owner.selector)
    read_kinds = [*BASE_KINDS, *kinds]
    if spec.nodes_per_instance > 1:
        read_kinds.append(LEADER_WORKER_SET)
    objects: list[Object] = []
    for resource in read_kinds:
        try:
            objects += (await world.client.list(resource, owner.namespace, labels=selector)).items
        except NotFound:
            # The API may not be installed; making one then says so, with the remedy.
            if resource is not LEADER_WORKER_SET:
                raise
    pods = (await world.client.list(POD, owner.namespace, labels=selector)).items
    leftovers = frozenset(key_of(obj) for obj in objects if belongs_to_another(obj, owner))
    return Children(owner, tuple(objects), tuple(pods), leftovers)


@dataclass(frozen=True)
class Intent:
    """What a pool wants, given its children as they are."""

    revisions: Mapping[str, str]
    step: Step
    objects: tuple[Object, ...]


def intend(
    children: Children,
    spec: PoolSpec,
    counts: Mapping[str, int],
    build: Callable[[Children, Step], list[Object]],
    *,
    pairing: Pairing | None = None,
    hold_rollout: bool = False,
) -> Intent:
    """The next step, and the objects wanted after it. Pure: `prfaas render` shows the same. Raises SpecError."""
    revisions = wanted.revisions(children.owner, spec)
    step = assignment.plan(
        children.owner.name,
        children.instances.children,
        Wanted(counts, revisions),
        spec.rollout.max_unavailable,
        pairing=pairing,
        hold=hold_rollout,
    )
    return Intent(revisions, step, tuple(build(children, step)))


def difference(children: Children, objects: Iterable[Object], step: Step) -> Plan:
    """What to write. Held instances and leftovers of an earlier owner are left alone."""
    untouched = {*step.held}
    current = [
        obj
        for obj in children.objects
        if key_of(obj) not in children.leftovers and obj["metadata"]["name"] not in untouched
    ]
    return plan(current, [obj for obj in objects if key_of(obj) not in children.leftovers])


async def remove_overdue(world: World, children: Children) -> float | None:
    """Removes instance pods whose deletion no kubelet confirms; returns the seconds until the next could be overdue."""
    soonest: float | None = None
    for pod in children.pods:
        deleted = pod["metadata"].get("deletionTimestamp")
        if deleted is None or labels.INSTANCE not in pod["metadata"].get("labels", {}):
            continue
        # The timestamp is the end of the grace period.
        left = OVERDUE_SECONDS - (world.now() - datetime.fromisoformat(deleted)).total_seconds()
        if left <= 0:
            await world.client.delete(
                POD, pod["metadata"]["name"], children.owner.namespace, uid=pod["metadata"]["uid"], grace_seconds=0
            )
        else:
            soonest = left if soonest is None else min(soonest, left)
    return soonest


def belongs_to_another(obj: Object, owner: Owner) -> bool:
    """Whether an object is controlled by something else, such as an earlier object of the owner's name."""
    references = obj["metadata"].get("ownerReferences") or []
    return any(each.get("controller") and each.get("uid") != owner.uid for each in references)


@dataclass(frozen=True)
class Took:
    """What one pass over a pool's children found and did."""

    children: Children
    """As they are after the pass."""
    step: Step | None
    """None: no step could be computed, since the spec cannot be built."""
    revisions: Mapping[str, str]
    obstacle: Obstacle | None
    retry: KubeError | None = None
    """A write that failed and may succeed when tried again."""
    again_after: float | None = None

    def finish(self, *waits: float) -> Result:
        """How the reconcile ends, with other reasons to come back. Raises the error that trying again may cure."""
        if self.retry is not None and self.obstacle is None:
            raise self.retry
        return Result(min([*waits, *([self.again_after] if self.again_after is not None else [])], default=None))


async def take_step(
    world: World,
    owner: Owner,
    spec: PoolSpec,
    counts: Mapping[str, int],
    *,
    build: Callable[[Children, Step], list[Object]],
    kinds: Sequence[Resource] = (),
    pairing: Callable[[], Awaitable[Pairing | None]] | None = None,
    hold_rollout: bool = False,
) -> Took:
    """Reads the children, computes the next step, and writes what it wants unless the pool is paused.

    `build` is the pure function from children and step to the objects wanted; its SpecError becomes an obstacle, and
    then nothing is written. `pairing` reads what a paired rollout goes by; while `hold_rollout`, no instance that runs
    gets another template. Raises KubeError when the children cannot be read.
    """
    children = await read(world, owner, spec, kinds)
    try:
        paired = await pairing() if pairing is not None else None
        intent = intend(children, spec, counts, build, pairing=paired, hold_rollout=hold_rollout)
    except SpecError as error:
        return Took(children, None, {}, spec_obstacle(error))
    if spec.paused:
        return Took(children, intent.step, intent.revisions, None)
    objects = with_fetcher(intent.objects, world.config.fetcher, children.objects)
    todo = difference(children, objects, intent.step)
    outcome = await world.appliers[owner.kind].execute(todo, owner=owner.selector)
    obstacle = write_obstacle(outcome.failed.values())
    waits = [await remove_overdue(world, children)]
    if children.leftovers or todo.terminating:
        waits.append(LEFTOVER_SECONDS)
    if obstacle is not None:
        waits.append(OBSTACLE_SECONDS)
    return Took(
        children=children.after(outcome),
        step=intent.step,
        revisions=intent.revisions,
        obstacle=obstacle,
        retry=next(iter(outcome.failed.values()), None),
        again_after=min((wait for wait in waits if wait is not None), default=None),
    )


async def wake_links(world: World, key: Key) -> None:
    """Has the links of a pool looked at: something about it has changed."""
    for link in (await world.client.list(INTER_CLUSTER_LINK, key.namespace)).items:
        local = (link.get("spec") or {}).get("local") or {}
        if (local.get("kind"), local.get("name")) == (key.kind, key.name):
            world.enqueue(key_for("InterClusterLink", key.namespace, link["metadata"]["name"]))


def without_conditions(status: ApiModel) -> dict[str, Any]:
    """A status in its wire form, but for the conditions, which `report` merges."""
    return {name: value for name, value in status.to_wire().items() if name != "conditions"}


def scale_selector(owner: Owner) -> str:
    """Selector of the pods that the scale subresource counts: the instances, not the router."""
    roles = f"{labels.ROLE_PREFILL},{labels.ROLE_DECODE}"
    return f"{selector_text(owner.selector)},{labels.ROLE} in ({roles})"
