"""Conditions by example: what was seen, and what is said about it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from prfaas.api.conditions import REASONS, Reason, Type
from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.kube.errors import Conflict, Forbidden, Invalid, KubeError, NameTaken, NotFound, Unreachable
from prfaas.operator.observed import Instances, instances
from prfaas.operator.pd_cluster import router_ready, router_synced
from prfaas.operator.verdicts import (
    Obstacle,
    Verdict,
    conditions,
    pods_placed,
    serving,
    spec_obstacle,
    summary,
    write_obstacle,
)
from prfaas.workloads.assignment import Step
from prfaas.workloads.errors import SpecError

SPEC = PrfaaSClusterSpec.model_validate({"model": {"name": "m"}, "gpusPerInstance": 8, "engine": {"image": "i"}})
SETTLED = Step()
MOVING = Step(held=("east-0",))
REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def deployment(index: int, *, ready: bool = True, **more: Any) -> dict[str, Any]:
    available = 1 if ready else 0
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"east-{index}", "generation": 2, **more.get("metadata", {})},
        "spec": {
            "template": {"metadata": {"labels": {"prfaas.io/role": "prefill", "prfaas.io/revision": "r1"}}},
        },
        "status": {
            "observedGeneration": 2,
            "updatedReplicas": 1,
            "availableReplicas": available,
            **more.get("status", {}),
        },
    }


def pod(index: int, *, node: str | None = "n", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"east-{index}-x", "labels": {"prfaas.io/instance": f"east-{index}"}},
        "spec": {"nodeName": node} if node else {},
        "status": status,
    }


def seen(children: list[dict[str, Any]], pods: list[dict[str, Any]]) -> Instances:
    return instances("east", children, pods)


def test_the_routers_deployment_is_no_instance() -> None:
    router = deployment(0) | {"metadata": {"name": "east-router"}}
    assert seen([router], []).count() == 0


def test_readiness_of_the_template_before_does_not_count() -> None:
    stale = deployment(0, status={"observedGeneration": 1})
    assert seen([stale], []).ready() == 0
    assert seen([deployment(0, status={"updatedReplicas": 0})], []).ready() == 0
    assert seen([deployment(0)], []).ready() == 1


def test_an_instance_over_several_nodes_is_ready_when_its_group_is() -> None:
    group = {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "east-0"},
        "spec": {"leaderWorkerTemplate": {"leaderTemplate": {"metadata": {"labels": {"prfaas.io/role": "prefill"}}}}},
        "status": {"readyReplicas": 1, "updatedReplicas": 1},
    }
    assert seen([group], []).ready("prefill") == 1
    assert seen([group | {"status": {"readyReplicas": 0}}], []).ready() == 0


def test_placed_when_every_instance_has_a_node() -> None:
    assert pods_placed(seen([deployment(0)], [pod(0)]), SPEC, 1).reason is Reason.PLACED
    assert pods_placed(seen([deployment(0)], [pod(0, node=None)]), SPEC, 1).reason is Reason.PROGRESSING
    assert pods_placed(seen([], []), SPEC, 1).reason is Reason.PROGRESSING
    assert pods_placed(seen([], []), SPEC, 0).reason is Reason.NO_INSTANCES


def test_a_pod_that_is_refused_at_its_creation_is_said() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    verdict = pods_placed(seen([deployment(0, status={"conditions": [failure]})], []), SPEC, 1)
    assert (verdict.status, verdict.reason) == (False, Reason.UNSCHEDULABLE)
    assert "exceeded quota: gpus" in verdict.message


def test_an_ending_pod_on_a_dead_node_does_not_hide_that_its_successor_has_no_room() -> None:
    ending = pod(0) | {"metadata": {**pod(0)["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    verdict = pods_placed(seen([deployment(0)], [ending, pod(0, node=None, conditions=[REFUSED])]), SPEC, 1)
    assert verdict.reason is Reason.UNSCHEDULABLE
    assert verdict.message == (
        "no room for east-0: no node has 8 nvidia.com/gpu free; add nodes to the pool or lower the number of instances"
    )


@pytest.mark.parametrize("reason", ["CrashLoopBackOff", "ImagePullBackOff"])
def test_a_container_that_will_not_run_by_itself_is_named(reason: str) -> None:
    broken = pod(0, containerStatuses=[{"state": {"waiting": {"reason": reason}}}])
    verdict = serving(seen([deployment(0, ready=False)], [broken]), SETTLED)
    assert verdict is not None
    assert verdict.reason is Reason.CRASHING
    assert f"instance east-0: {reason}" in verdict.message


def test_one_that_is_starting_is_named_and_one_that_runs_is_not() -> None:
    verdict = serving(seen([deployment(0), deployment(1, ready=False)], []), SETTLED)
    assert verdict == Verdict(Type.READY, False, Reason.STARTING, "not ready: east-1")
    assert serving(seen([deployment(0)], []), SETTLED) is None


def ready_of(verdicts: list[Verdict]) -> tuple[bool | None, ...]:
    return tuple(each.status for each in verdicts)


def test_ready_reconciling_and_stalled_never_contradict_each_other() -> None:
    unmet = Verdict(Type.PODS_PLACED, False, Reason.PROGRESSING, "pods are being placed")
    obstacle = Obstacle(Reason.INVALID_SPEC, "why")
    assert ready_of(summary([None], obstacle=None, paused=False)) == (True, False, False)
    assert ready_of(summary([None], obstacle=None, paused=False, draining=True)) == (True, True, False)
    assert ready_of(summary([unmet], obstacle=None, paused=False)) == (False, True, False)
    assert ready_of(summary([unmet], obstacle=None, paused=True)) == (False, False, False)
    assert ready_of(summary([unmet], obstacle=obstacle, paused=False, draining=True)) == (False, False, True)


def test_ready_takes_the_reason_of_the_first_thing_that_is_missing() -> None:
    first = Verdict(Type.PODS_PLACED, False, Reason.UNSCHEDULABLE, "no room")
    second = Verdict(Type.ROUTER_READY, False, Reason.NO_ROUTERS, "none")
    ready = summary([None, first, second], obstacle=None, paused=False)[0]
    assert (ready.reason, ready.message) == (Reason.UNSCHEDULABLE, "no room")


def test_an_unknown_is_not_ready() -> None:
    unknown = Verdict(Type.PEER_API_REACHABLE, None, Reason.NOT_PROBED, "not asked yet")
    assert summary([unknown], obstacle=None, paused=False)[0].status is False


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NameTaken("Service x exists and is not ours"), Reason.NAME_CONFLICT),
        (Invalid("spec.dnsPolicy: Unsupported value"), Reason.INVALID_SPEC),
        (Forbidden("may not"), Reason.API_ERROR),
        (NotFound("no such kind", request="PATCH /apis/leaderworkerset.x-k8s.io/v1/x"), Reason.INVALID_SPEC),
        (Conflict("changed meanwhile"), None),
        (Unreachable("no answer"), None),
    ],
)
def test_what_a_person_must_cure_is_an_obstacle_and_the_rest_is_tried_again(
    error: KubeError, reason: Reason | None
) -> None:
    obstacle = write_obstacle([error])
    assert (obstacle.reason if obstacle else None) == reason


def test_a_spec_error_keeps_its_path_problem_and_remedy() -> None:
    obstacle = spec_obstacle(SpecError("spec.x", "is wrong", "make it right"))
    assert obstacle.message == "spec.x: is wrong; make it right. What runs is kept."


def test_a_router_counts_only_when_the_newest_template_runs() -> None:
    def state(**status: int) -> Verdict:
        return router_ready({"metadata": {"generation": 2}, "status": status}, 2)

    assert state(observedGeneration=2, availableReplicas=2, updatedReplicas=2).status is True
    assert state(observedGeneration=1, availableReplicas=2, updatedReplicas=2).status is False
    assert state(observedGeneration=2, availableReplicas=2, updatedReplicas=1).status is False
    assert router_ready(None, 2).status is False
    assert router_ready(None, 0).reason is Reason.NO_ROUTERS


def test_no_policy_and_no_routers_are_never_in_step() -> None:
    assert router_synced(None, 0, 0).reason is Reason.NO_ROUTERS
    assert router_synced(None, 2, 0).reason is Reason.POLICY_PENDING


def test_every_verdict_made_here_has_a_documented_reason() -> None:
    made = [
        *summary([None], obstacle=None, paused=True),
        *summary([None], obstacle=None, paused=False, draining=True),
        *summary([], obstacle=Obstacle(Reason.NAME_CONFLICT, ""), paused=False),
        pods_placed(seen([], []), SPEC, 0),
        pods_placed(seen([], []), SPEC, 1),
        pods_placed(seen([deployment(0)], [pod(0, node=None, conditions=[REFUSED])]), SPEC, 1),
        pods_placed(seen([deployment(0)], [pod(0)]), SPEC, 1),
        router_synced(None, 0, 0),
        router_synced(None, 1, 0),
        router_ready(None, 1),
        router_ready(None, 0),
    ]
    for unmet in [*made, serving(seen([deployment(0, ready=False)], []), SETTLED), serving(seen([], []), MOVING)]:
        made = [*made, *summary([unmet], obstacle=None, paused=False)]
    for verdict in made:
        assert verdict.reason in REASONS[verdict.type]
    assert len(conditions(made, 1, datetime(2026, 1, 1, tzinfo=UTC))) == len(made)
