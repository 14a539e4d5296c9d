"""Tell people: status, Kubernetes events and log lines, each only when something a person should know has changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from prfaas.api.conditions import Condition, Reason, Type, merge
from prfaas.kube.errors import KubeError
from prfaas.kube.resources import Object
from prfaas.operator.world import World

log = logging.getLogger("prfaas.operator")

_BAD_WHEN_TRUE = (Type.STALLED.value,)
_QUIET = (Type.RECONCILING.value,)
"""Conditions whose flips are logged for debugging only: they flip with every change of a spec."""


async def report(world: World, live: Object, status: Mapping[str, Any], observed: Sequence[Condition]) -> bool:
    """Writes `status` with the conditions merged over those of `live`, if that changes anything; then events and logs.

    `status` is everything but the conditions. Returns whether there was a change. Raises KubeError when the status
    cannot be written.
    """
    before = read_conditions(live)
    merged = merge(before, observed)
    complete = {**status, "conditions": [each.to_wire() for each in merged]}
    written = await world.appliers[live["kind"]].write_status(live, complete)
    if written is None:
        return False
    for condition in flips(before, merged):
        extra = {
            "kind": live["kind"],
            "namespace": live["metadata"]["namespace"],
            "object": live["metadata"]["name"],
            "condition": condition.type,
            "status": condition.status,
            "reason": condition.reason,
        }
        quiet = condition.type in _QUIET
        log.log(logging.DEBUG if quiet else logging.INFO, _sentence(condition), extra=extra)
        if not quiet:
            await _post_event(world, live, condition)
    return True


def read_conditions(live: Object) -> tuple[Condition, ...]:
    """The conditions in an object's status; those that cannot be read do not count."""
    found = []
    for item in (live.get("status") or {}).get("conditions") or []:
        try:
            found.append(Condition.model_validate(item))
        except ValidationError:
            continue
    return tuple(found)


def flips(before: Sequence[Condition], after: Sequence[Condition]) -> list[Condition]:
    """Conditions whose status or reason is not what it was. A new object that is not stalled is no news."""
    old = {each.type: (each.status, each.reason) for each in before}
    old.setdefault(Type.STALLED.value, ("False", Reason.AS_SPECIFIED.value))
    return [each for each in after if old.get(each.type) != (each.status, each.reason)]


def _sentence(condition: Condition) -> str:
    return f"{condition.type} is {condition.status}: {condition.message or condition.reason}"


async def _post_event(world: World, live: Object, condition: Condition) -> None:
    bad = condition.status != ("False" if condition.type in _BAD_WHEN_TRUE else "True")
    metadata = live["metadata"]
    now = world.now().astimezone(UTC)
    event: Object = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "eventTime": micro_time(now),
        "reportingController": "prfaas.io/operator",
        "reportingInstance": world.config.identity[:128],
        "action": "Reconcile",
        "reason": condition.reason,
        "regarding": {
            "apiVersion": live["apiVersion"],
            "kind": live["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "note": _sentence(condition)[:1024],
        "type": "Warning" if bad else "Normal",
    }
    try:
        await world.client.create(event)
    except KubeError as error:
        log.warning("event not posted: %s", error)


def micro_time(moment: datetime) -> str:
    """Kubernetes' MicroTime."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
