"""What `prfaas status` shows: gathered from an API server, and printed for a person or a program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from prfaas.api import labels
from prfaas.kube.client import KubeClient
from prfaas.kube.errors import KubeError
from prfaas.kube.resources import JOB, PD_CLUSTER, POD, PRFAAS_CLUSTER, Object
from prfaas.operator import fetches
from prfaas.operator.observed import instance_pods
from prfaas.workloads import model

LINES = 20
"""Lines at the end of a log among which the last progress is looked for."""


@dataclass(frozen=True)
class Fetch:
    """How far one place is. Bytes, bytes a second, seconds; None: not known (yet)."""

    place: str
    """`node NAME`, `the claim`, or `instance NAME`."""
    state: str
    """`Cached`, `Fetching`, or the reason why not."""
    message: str = ""
    done: int | None = None
    total: int | None = None
    rate: int | None = None
    file: str = ""

    @property
    def percent(self) -> int | None:
        """Of the bytes, rounded down: 100 is all of them."""
        return None if self.done is None or not self.total else min(100, 100 * self.done // self.total)

    @property
    def seconds_left(self) -> int | None:
        """At the rate of the last seconds."""
        if self.done is None or self.total is None or not self.rate:
            return None
        return round((self.total - self.done) / self.rate)


@dataclass(frozen=True)
class PoolReport:
    """One pool."""

    namespace: str
    kind: str
    name: str
    conditions: tuple[tuple[str, str, str, str], ...]
    """Type, status, reason, message."""
    instances: Mapping[str, tuple[int, int]]
    """Role -> ready and wanted."""
    model: str
    warm_up_seconds: int | None
    fetches: tuple[Fetch, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs. The names of the members stay."""
        return {
            "namespace": self.namespace,
            "kind": self.kind,
            "name": self.name,
            "conditions": [
                dict(zip(("type", "status", "reason", "message"), each, strict=True)) for each in self.conditions
            ],
            "instances": {role: {"ready": ready, "wanted": want} for role, (ready, want) in self.instances.items()},
            "model": self.model,
            "warmUpSeconds": self.warm_up_seconds,
            "fetches": [
                {**asdict(each), "percent": each.percent, "secondsLeft": each.seconds_left} for each in self.fetches
            ],
        }


async def gather(client: KubeClient, namespace: str | None, now: datetime) -> list[PoolReport]:
    """Every pool of a namespace, or of all. Raises KubeError when they cannot be read."""
    found = []
    for resource in (PRFAAS_CLUSTER, PD_CLUSTER):
        found += (await client.list(resource, namespace)).items
    return [await _report(client, pool, now) for pool in sorted(found, key=_place)]


async def _report(client: KubeClient, pool: Object, now: datetime) -> PoolReport:
    metadata, spec, status = pool["metadata"], pool["spec"], pool.get("status") or {}
    selector = f"{labels.CLUSTER}={metadata['name']},{labels.KIND}={pool['kind'].lower()}"
    jobs = (await client.list(JOB, metadata["namespace"], labels=selector)).items
    pods = (await client.list(POD, metadata["namespace"], labels=selector)).items
    fetching = [await _of_job(client, job, pods, now) for job in jobs]
    if ((spec["model"].get("cache")) or {}).get("ephemeral") is not None:
        fetching += [await _of_instance(client, pod, now) for pod in instance_pods(pods)]
    revision = spec["model"].get("revision", "main")
    return PoolReport(
        namespace=metadata["namespace"],
        kind=pool["kind"],
        name=metadata["name"],
        conditions=tuple(
            (each["type"], each["status"], each["reason"], each.get("message", ""))
            for each in status.get("conditions") or []
        ),
        instances=_instances(pool["kind"], spec, status),
        model=f"{spec['model'].get('source') or spec['model']['name']} at {revision}",
        warm_up_seconds=status.get("warmUpSeconds"),
        fetches=tuple(sorted(fetching, key=lambda each: each.place)),
    )


def _instances(kind: str, spec: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    if kind == "PrfaaSCluster":
        return {"prefill": (status.get("readyInstances", 0), spec.get("instances", 1))}
    roles = status.get("roles") or {}
    return {
        role: (found.get("ready", 0), found.get("desired", 0))
        for role in ("prefill", "decode")
        if (found := roles.get(role))
    }


async def _of_job(client: KubeClient, job: Object, pods: Sequence[Object], now: datetime) -> Fetch:
    node = (job["metadata"].get("annotations") or {}).get(labels.NODE)
    state = fetches.state_of_job(job, pods, model.FETCHER, now)
    own = fetches.pods_of(job, pods)
    return await _fetch(client, str(model.Place(node)), state, own[-1] if own else None, model.FETCHER)


async def _of_instance(client: KubeClient, pod: Object, now: datetime) -> Fetch:
    state = fetches.state_of_pod(pod, "initContainerStatuses", model.CONTAINER, now)
    return await _fetch(client, f"instance {pod['metadata']['labels'][labels.INSTANCE]}", state, pod, model.CONTAINER)


async def _fetch(client: KubeClient, place: str, state: fetches.State, pod: Object | None, container: str) -> Fetch:
    name = "Cached" if state.done else state.reason.value
    line = await _last_line(client, pod, container) if pod is not None else {}
    rate = None if state.done else line.get("rate")
    return Fetch(place, name, state.message, line.get("done"), line.get("total"), rate, line.get("file", ""))


async def _last_line(client: KubeClient, pod: Object, container: str) -> Mapping[str, Any]:
    """The last progress that a pod told; of its container before, while the new one has told nothing."""
    metadata = pod["metadata"]
    for previous in (False, True):
        try:
            text = await client.log(metadata["name"], metadata["namespace"], container, lines=LINES, previous=previous)
        except KubeError:  # not started yet, or gone already: there is nothing to show, and nothing wrong
            continue
        if line := last_progress(text.splitlines()):
            return line
    return {}


def last_progress(lines: Iterable[str]) -> dict[str, Any]:
    """The last line of a fetcher's log that says how far it is; empty where none does."""
    for text in reversed([*lines]):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("done"), int) and isinstance(line.get("total"), int):
            return line
    return {}


def _place(pool: Object) -> tuple[str, str, str]:
    return pool["metadata"]["namespace"], pool["kind"], pool["metadata"]["name"]


# For a person


def as_table(reports: Sequence[PoolReport]) -> str:
    """Pools one below the other, each with what is not as it should be."""
    if not reports:
        return "there are no pools"
    return "\n\n".join("\n".join(_block(report)) for report in reports)


def _block(report: PoolReport) -> Iterable[str]:
    counts = ", ".join(f"{ready} of {wanted} {role}" for role, (ready, wanted) in report.instances.items())
    yield f"{report.kind} {report.namespace}/{report.name}: {counts or 'not seen by the operator yet'} ready"
    warm = "not known yet" if report.warm_up_seconds is None else f"{report.warm_up_seconds} s from start to ready"
    yield from _columns([("  model", report.model), ("  warm-up", warm)])
    rows = [(f"  {kind}", status, reason, message) for kind, status, reason, message in report.conditions]
    yield from _columns(rows)
    if report.fetches:
        yield from _columns([("  FETCH", "STATE", "DONE", "SIZE", "RATE", "LEFT", "FILE"), *map(_row, report.fetches)])
    for each in report.fetches:
        if each.message:
            yield f"  {each.place}: {each.message}"


def _row(fetch: Fetch) -> tuple[str, ...]:
    size = "" if fetch.total is None else f"{(fetch.done or 0) / 1e9:.2f} of {fetch.total / 1e9:.2f} GB"
    return (
        f"  {fetch.place}",
        fetch.state,
        "" if fetch.percent is None else f"{fetch.percent} %",
        size,
        "" if fetch.rate is None else f"{fetch.rate / 1e6:.1f} MB/s",
        "" if fetch.seconds_left is None else _duration(fetch.seconds_left),
        fetch.file if fetch.rate is not None else "",
    )


def _duration(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
