"""Seconds that an engine takes from the start of its container until it is ready: what a conversion costs.

The median over the pods that are ready now. A pod that was ready, was not for a while, and is again, looks like one
that took long; what took longer than an engine is given to start is left out, and the median bears the rest. The status
keeps the number until it moves by more than a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from statistics import median
from typing import Any

from prfaas.api.common import duration_seconds
from prfaas.api.pool import PoolSpec
from prfaas.kube.resources import Object
from prfaas.operator.observed import instance_pods
from prfaas.workloads.engine import CONTAINER

RECENT = 16
"""Pods that count: those that started last."""
MOVED = 0.1


def warm_up_seconds(pods: Iterable[Object], spec: PoolSpec, before: int | None) -> int | None:
    """What the status is to say; None while it was never seen."""
    longest = duration_seconds(spec.engine.startup_deadline)
    found = sorted(filter(None, map(_start, instance_pods(pods))), reverse=True)
    recent = [seconds for _, seconds in found if seconds <= longest][:RECENT]
    if not recent:
        return before
    seconds = round(median(recent))
    return before if before is not None and abs(seconds - before) <= MOVED * before else seconds


def _start(pod: Object) -> tuple[datetime, float] | None:
    """When the engine of a pod that is ready started, and how long it took."""
    status: dict[str, Any] = pod.get("status") or {}
    engines = [each for each in status.get("containerStatuses") or [] if each.get("name") == CONTAINER]
    running = ((engines[0].get("state") or {}).get("running") or {}) if engines else {}
    ready = [each for each in status.get("conditions") or [] if (each["type"], each["status"]) == ("Ready", "True")]
    if not ready or not running.get("startedAt") or not ready[0].get("lastTransitionTime"):
        return None
    began = datetime.fromisoformat(running["startedAt"])
    seconds = (datetime.fromisoformat(ready[0]["lastTransitionTime"]) - began).total_seconds()
    return (began, seconds) if seconds >= 0 else None
