"""Make the world hold the wanted objects, writing only what differs and touching only what is ours.

`plan` is pure: children as they are, children as wanted, and out come the sets to create, to apply and to delete.
`Applier` carries a plan out by server-side apply. Nothing is written when nothing differs: an object is left alone when
its hash annotation says that this very content was applied and it still holds that content (an edit by hand is drift
and is repaired). The last applies are remembered by resourceVersion as well, so that content which the server stores in
a form we do not recognise costs one idle request per change, not one per reconcile.

Ours is what carries the owner labels the caller gives. An object with our name but not our labels is somebody else's:
it is never taken over, and the attempt is a NameTaken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prfaas.api.labels import SPEC_HASH
from prfaas.kube.client import KubeClient, Propagation
from prfaas.kube.covers import content_hash, covers, same_status
from prfaas.kube.errors import Conflict, KubeError, NameTaken, NotFound
from prfaas.kube.resources import Key, Object, key_of, resource_of


@dataclass(frozen=True)
class Step:
    """One object to write: `wanted` with its hash annotation, and what is there now (None: nothing is)."""

    key: Key
    wanted: Object
    live: Object | None


@dataclass(frozen=True)
class Plan:
    """What to do, in this order. `terminating` are wanted objects that are still being deleted: come back later."""

    create: tuple[Step, ...] = ()
    apply: tuple[Step, ...] = ()
    delete: tuple[Object, ...] = ()
    terminating: tuple[Key, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.create or self.apply or self.delete)


@dataclass
class Outcome:
    """What a plan's execution did. Every step is tried, whatever the others met."""

    created: list[Key] = field(default_factory=list)
    applied: list[Key] = field(default_factory=list)
    deleted: list[Key] = field(default_factory=list)
    failed: dict[Key, KubeError] = field(default_factory=dict)
    results: dict[Key, Object] = field(default_factory=dict)
    """Objects as the server stored them, of the steps that wrote one."""

    def after(self, before: Iterable[Object]) -> dict[Key, Object]:
        """The objects that are there now, given those that were there before: without reading them again."""
        here = {key_of(obj): obj for obj in before} | self.results
        for key in self.deleted:
            here.pop(key, None)
        return here


def stamped(wanted: Object) -> Object:
    """A copy of `wanted` with the annotation that holds the hash of its content."""
    metadata = wanted["metadata"]
    annotations = {**metadata.get("annotations", {}), SPEC_HASH: content_hash(wanted)}
    return {**wanted, "metadata": {**metadata, "annotations": annotations}}


def is_owned(live: Mapping[str, Any], owner: Mapping[str, str]) -> bool:
    """Whether an object carries all the owner's labels."""
    labels = live["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in owner.items())


def plan(current: Iterable[Object], wanted: Iterable[Object]) -> Plan:
    """The difference between our objects as they are and as wanted; the caller selects `current` by the owner labels.

    Raises ValueError when two wanted objects have the same key.
    """
    here = {key_of(obj): obj for obj in current}
    create: list[Step] = []
    apply: list[Step] = []
    terminating: list[Key] = []
    keys: set[Key] = set()
    for obj in wanted:
        key = key_of(obj)
        if key in keys:
            raise ValueError(f"{key} is wanted twice")
        keys.add(key)
        live = here.get(key)
        target = stamped(obj)
        if live is None:
            create.append(Step(key, target, None))
        elif "deletionTimestamp" in live["metadata"]:
            terminating.append(key)
        elif not covers(live, target):
            apply.append(Step(key, target, live))
    delete = [obj for key, obj in here.items() if key not in keys and "deletionTimestamp" not in obj["metadata"]]
    return Plan(tuple(create), tuple(apply), tuple(delete), tuple(terminating))


class Applier:
    """Carries plans out under one field manager, whose name must stay the same for ever: it owns the fields."""

    def __init__(self, client: KubeClient, *, field_manager: str) -> None:
        self._client = client
        self._field_manager = field_manager
        self._known: dict[Key, tuple[str, str, str]] = {}
        """(uid, resourceVersion, hash) as of our last apply that the server accepted."""

    async def execute(
        self, steps: Plan, *, owner: Mapping[str, str], propagation: Propagation = "Background"
    ) -> Outcome:
        """Creates, applies and deletes; `owner` are the labels that make an object ours."""
        outcome = Outcome()
        for step in steps.create:
            try:
                outcome.results[step.key] = await self._create(step, owner)
                outcome.created.append(step.key)
            except KubeError as error:
                outcome.failed[step.key] = error
        for step in steps.apply:
            try:
                written = await self._apply(step)
                if written is not None:
                    outcome.results[step.key] = written
                    outcome.applied.append(step.key)
            except KubeError as error:
                outcome.failed[step.key] = error
        for obj in steps.delete:
            key = key_of(obj)
            try:
                await self._delete(obj, key, propagation)
                outcome.deleted.append(key)
            except KubeError as error:
                outcome.failed[key] = error
        return outcome

    async def ensure(self, wanted: Object, *, owner: Mapping[str, str]) -> Object:
        """Reads one object and applies it if it differs; returns it as it is then. Raises NameTaken."""
        try:
            live = await self._client.get(
                resource_of(wanted), wanted["metadata"]["name"], wanted["metadata"].get("namespace")
            )
        except NotFound:
            return await self._create(Step(key_of(wanted), stamped(wanted), None), owner)
        step = Step(key_of(wanted), stamped(wanted), live)
        self._check_ours(step.key, live, owner)
        if covers(live, step.wanted):
            return live
        return await self._apply(step) or live

    async def write_status(self, live: Object, status: Mapping[str, Any]) -> Object | None:
        """Writes the whole status of `live` if it differs from the one it has; None if there was nothing to write.

        The uid goes with it, so that a namesake created since is a Conflict.
        """
        if same_status(live.get("status"), status):
            return None
        metadata = {name: live["metadata"][name] for name in ("name", "namespace", "uid") if name in live["metadata"]}
        body = {"apiVersion": live["apiVersion"], "kind": live["kind"], "metadata": metadata, "status": dict(status)}
        return await self._client.apply_status(body, field_manager=f"{self._field_manager}-status")

    async def _create(self, step: Step, owner: Mapping[str, str]) -> Object:
        """Server-side apply has no "only if absent": so look first, and do not force what appears in between."""
        metadata = step.wanted["metadata"]
        try:
            live = await self._client.get(resource_of(step.wanted), metadata["name"], metadata.get("namespace"))
        except NotFound:
            written = await self._client.apply(step.wanted, field_manager=self._field_manager, force=False)
            return self._remember(step.key, step.wanted, written)
        self._check_ours(step.key, live, owner)
        if "deletionTimestamp" in live["metadata"]:
            raise Conflict("the object is still being deleted", request=f"create {step.key}")
        return await self._apply(Step(step.key, step.wanted, live)) or live

    async def _apply(self, step: Step) -> Object | None:
        assert step.live is not None
        metadata = step.live["metadata"]
        known = (metadata["uid"], metadata["resourceVersion"], step.wanted["metadata"]["annotations"][SPEC_HASH])
        if self._known.get(step.key) == known:
            return None
        # With its uid, an object deleted meanwhile is not created anew from a decision about the old one.
        body = {**step.wanted, "metadata": {**step.wanted["metadata"], "uid": metadata["uid"]}}
        written = await self._client.apply(body, field_manager=self._field_manager)
        return self._remember(step.key, step.wanted, written)

    async def _delete(self, obj: Object, key: Key, propagation: Propagation) -> None:
        metadata = obj["metadata"]
        with suppress(NotFound):
            await self._client.delete(
                resource_of(obj),
                metadata["name"],
                metadata.get("namespace"),
                uid=metadata["uid"],
                propagation=propagation,
            )
        self._known.pop(key, None)

    def _remember(self, key: Key, wanted: Object, written: Object) -> Object:
        metadata = written["metadata"]
        self._known[key] = (metadata["uid"], metadata["resourceVersion"], wanted["metadata"]["annotations"][SPEC_HASH])
        return written

    @staticmethod
    def _check_ours(key: Key, live: Object, owner: Mapping[str, str]) -> None:
        if not is_owned(live, owner):
            raise NameTaken(f"{key} exists and is not ours; rename or remove it", request=f"apply {key}")
