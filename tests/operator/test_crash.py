"""The operator may die after any write: the next one brings about the same end, with nothing doubled or left behind."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.operator.prfaas_cluster import reconcile
from tests.hand import Hand
from tests.operator import bench as here
from tests.operator.bench import Bench

pytestmark = pytest.mark.apiserver
KIND = "PrfaaSCluster"


class Crash(BaseException):
    """Ends everything at once, as SIGKILL would."""


class Fuse:
    """Lets so many writes pass, then crashes."""

    def __init__(self, writes: int) -> None:
        self.left = writes
        self.blown = False

    def __call__(self) -> None:
        if self.left == 0:
            self.blown = True
            raise Crash
        self.left -= 1


def shape(children: dict[str, Any]) -> dict[str, Any]:
    return {name: obj["spec"] for name, obj in children.items()}


async def crashing(bench: Bench, writes: int) -> bool:
    """One reconcile that dies at its write number `writes`; whether it came so far."""
    fuse = Fuse(writes)
    doomed = replace(bench.client, write_gate=fuse)
    crashed = Bench.create(bench.server, doomed, bench.namespace, reconcile)
    with contextlib.suppress(Crash):
        await crashed.run(KIND, "east")
    return fuse.blown


async def test_a_life_of_one_write_each_brings_it_all_about(apiserver: ApiServer, client: Hand, namespace: str) -> None:
    bench = Bench.create(apiserver, client, namespace, reconcile)
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER)
    mark = bench.server.audit.mark()
    lives = 1
    while await crashing(bench, 1):
        lives += 1
        assert lives < 30
    written = [event.resource for event in bench.writes_since(mark)]
    assert written.count("deployments") == 3
    assert {"services", "poddisruptionbudgets", "configmaps", "prfaasclusters"} <= set(written)
    assert len(written) >= lives - 1 > 4
    await bench.settle(KIND, "east")
    assert (await bench.conditions(KIND, "east"))["Ready"] == ("True", "AsSpecified")


async def test_a_change_survives_a_crash_at_each_of_its_writes(
    apiserver: ApiServer, client: Hand, namespace: str
) -> None:
    bench = Bench.create(apiserver, client, namespace, reconcile)
    await bench.place(KIND, "east", here.PRFAAS_CLUSTER | {"instances": 2})
    await bench.settle(KIND, "east")
    ends = []
    for at in range(4):
        await bench.edit(KIND, "east", {"instances": 4})
        await crashing(bench, at)
        await bench.settle(KIND, "east")
        ends.append(shape(await bench.children()))
        await bench.edit(KIND, "east", {"instances": 2})
        await crashing(bench, at)
        await bench.settle(KIND, "east")
        assert set(await bench.instances()) == {"east-0", "east-1"}
    assert all(end == ends[0] for end in ends)
    assert set(ends[0]) == {"east-0", "east-1", "east-2", "east-3"}
