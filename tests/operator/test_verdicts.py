"""Conditions by example: what was seen, and what is said about it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from prfaas.api.conditions import Condition, Reason, Type, Verdict, condition
from prfaas.api.policy import RoutingPolicy
from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.kube.errors import Conflict, Forbidden, Invalid, KubeError, NameTaken, NotFound, Unreachable
from prfaas.operator.observed import Instances, PodState, instances, routers
from prfaas.operator.verdicts import (
    Obstacle,
    pods_placed,
    rolling,
    router_ready,
    router_synced,
    routers_complete,
    serving,
    spec_obstacle,
    summary,
    while_rolling,
    write_obstacle,
)
from prfaas.workloads.assignment import Cause, Hold, Step
from prfaas.workloads.errors import SpecError

SPEC = PrfaaSClusterSpec.model_validate({"model": {"name": "m"}, "gpusPerInstance": 8, "engine": {"image": "i"}})
SETTLED = Step()
NO_GPUS = (
    "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
)
REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_GPUS}


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
    template = {"metadata": {"labels": {"prfaas.io/role": "prefill"}}}
    group = {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "east-0"},
        "spec": {"leaderWorkerTemplate": {"leaderTemplate": template, "workerTemplate": template}},
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


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint {gpu: true}, 2 Insufficient cpu. preemption: no.",
            "no room for east-0: Insufficient cpu; node(s) had untolerated taint {gpu: true}",
        ),
        ("no nodes available to schedule pods", "no room for east-0: no nodes available to schedule pods"),
        ("", "no room for east-0: the scheduler does not say why"),
        (
            "0/2 nodes are available: 2 Insufficient memory, 2 Insufficient nvidia.com/gpu.",
            "no room for east-0: no node has 8 nvidia.com/gpu free; add nodes to the pool or lower the number of "
            "instances; also: Insufficient memory",
        ),
    ],
)
def test_gpus_are_blamed_only_when_the_scheduler_does(refusal: str, words: str) -> None:
    waiting = pod(0, node=None, conditions=[REFUSED | {"message": refusal}])
    assert pods_placed(seen([deployment(0)], [waiting]), SPEC, 1).message == words


def crashing(**container: Any) -> dict[str, Any]:
    return {"name": "engine", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, **container}


PULL = "failed to pull image: not found"
BROKEN = {
    "crash": (crashing(), "CrashLoopBackOff of container engine"),
    "crash with words": (
        crashing(lastState={"terminated": {"exitCode": 1, "reason": "Error", "message": "x\nno such model\n"}}),
        "CrashLoopBackOff of container engine: it ended with status 1: no such model",
    ),
    "killed": (
        crashing(lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
        "CrashLoopBackOff of container engine: it ended with status 137: OOMKilled",
    ),
    "pull": (
        {"name": "engine", "state": {"waiting": {"reason": "ErrImagePull", "message": PULL}}},
        f"ImagePullBackOff of container engine: {PULL}",
    ),
    "waiting to pull": (
        {
            "name": "engine",
            "state": {
                "waiting": {
                    "reason": "ImagePullBackOff",
                    "message": f'Back-off pulling image "x": ErrImagePull: {PULL}',
                }
            },
        },
        f"ImagePullBackOff of container engine: {PULL}",
    ),
}


@pytest.mark.parametrize(("container", "words"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("where", ["containerStatuses", "initContainerStatuses"])
def test_a_container_that_will_not_run_by_itself_is_named(where: str, container: dict[str, Any], words: str) -> None:
    broken = pod(0, node="n", **{where: [container]})
    verdict = serving(seen([deployment(0, ready=False)], [broken]), SETTLED)
    assert verdict is not None
    assert verdict.reason is Reason.CRASHING
    assert verdict.message == f"instance east-0: {words}; see `kubectl describe pod -l prfaas.io/instance=east-0`"


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


def test_what_is_wrong_explains_what_cannot_be_known() -> None:
    unknown = Verdict(Type.CREDENTIALS_VALID, None, Reason.UNREACHABLE, "the credentials cannot be tried")
    wrong = Verdict(Type.PEER_API_REACHABLE, False, Reason.UNREACHABLE, "Connect timeout to https://east:6443")
    for needed in ([unknown, wrong], [wrong, unknown]):
        ready, reconciling, _ = summary(needed, obstacle=None, paused=False)
        assert ready.message == reconciling.message == wrong.message


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


def router(name: str, *, ready: bool = False, node: str | None = "n", **status: Any) -> dict[str, Any]:
    state = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "labels": {"prfaas.io/role": "router"}},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": "Running", "podIP": f"ip-{name}", "conditions": state, **status},
    }


def router_pods(*pods: dict[str, Any]) -> tuple[PodState, ...]:
    return routers([*pods, pod(0)])


def test_only_routers_that_stay_count_and_only_running_ones_have_an_address() -> None:
    ending = router("c") | {"metadata": {**router("c")["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    found = router_pods(router("b", phase="Pending"), router("a"), ending)
    assert [(each.name, each.address) for each in found] == [("a", "ip-a"), ("b", "")]


def test_one_router_that_is_ready_serves_whatever_the_others_do() -> None:
    pods = router_pods(router("a", ready=True), router("b", containerStatuses=[crashing()]))
    assert router_ready(pods, None, 2) == Verdict(Type.ROUTER_READY, True, Reason.AVAILABLE)
    complete = routers_complete(pods, None, 2)
    assert complete is not None
    assert complete.reason is Reason.CRASHING


@pytest.mark.parametrize(
    ("pods", "deployment_status", "reason", "words"),
    [
        ((), {}, Reason.NO_ROUTERS, "there is no router pod yet"),
        ((router("a"),), {}, Reason.STARTING, "no router is ready"),
        (
            (router("a", containerStatuses=[crashing(name="picker")]),),
            {},
            Reason.CRASHING,
            "router pod a: CrashLoopBackOff of container picker; see `kubectl describe pod a`",
        ),
        (
            (router("a", initContainerStatuses=[BROKEN["pull"][0]]),),
            {},
            Reason.CRASHING,
            f"router pod a: ImagePullBackOff of container engine: {PULL}; see `kubectl describe pod a`",
        ),
        (
            (
                router(
                    "a", node=None, conditions=[REFUSED | {"message": "0/1 nodes are available: 1 Insufficient cpu."}]
                ),
            ),
            {},
            Reason.UNSCHEDULABLE,
            "no room for router pod a: Insufficient cpu",
        ),
        (
            (),
            {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]},
            Reason.UNSCHEDULABLE,
            "the router's pod is refused: exceeded quota",
        ),
    ],
    ids=["none", "starting", "crashing", "image", "no room", "refused"],
)
def test_why_no_router_is_ready(
    pods: tuple[dict[str, Any], ...], deployment_status: dict[str, Any], reason: Reason, words: str
) -> None:
    verdict = router_ready(router_pods(*pods), {"status": deployment_status}, 1)
    assert verdict == Verdict(Type.ROUTER_READY, False, reason, words)


def test_routers_are_complete_when_the_newest_template_runs_as_often_as_asked_for() -> None:
    def state(**status: int) -> Verdict | None:
        return routers_complete((), {"metadata": {"generation": 2}, "status": status}, 2)

    assert state(observedGeneration=2, availableReplicas=2, updatedReplicas=2) is None
    for status in ((1, 2, 2), (2, 2, 1), (2, 1, 2)):
        names = ("observedGeneration", "availableReplicas", "updatedReplicas")
        missing = state(**dict(zip(names, status, strict=True)))
        assert missing is not None
        assert missing.reason is Reason.STARTING
    assert routers_complete((), None, 2) is not None
    assert router_ready((), None, 0).reason is Reason.NO_ROUTERS


def policy() -> RoutingPolicy:
    return RoutingPolicy.build(pd_cluster_uid="u", epoch=1, version=1, model="m")


def test_routers_that_are_ready_must_follow_the_policy_and_no_others() -> None:
    pods = router_pods(router("a", ready=True), router("b"))
    assert router_synced(policy(), pods, {"ip-a"}).status is True
    for verdict in (
        router_synced(policy(), pods, {"ip-b"}),
        router_synced(None, pods, {"ip-a"}),
        router_synced(policy(), router_pods(router("b")), {"ip-b"}),
    ):
        assert (verdict.status, verdict.reason) == (False, Reason.POLICY_PENDING)
    assert router_synced(policy(), (), set()).reason is Reason.NO_ROUTERS


ROLLS = Step(roll={"east-0": "prefill"}, held={"east-1": Hold(Cause.BUDGET)})


def said_before(reason: Reason) -> list[Condition]:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return [condition(Type.RECONCILING, True, reason, generation=1, now=now)]


def test_a_rollout_that_leaves_others_serving_keeps_the_pool_ready_and_says_what_goes_on() -> None:
    going = seen([deployment(0, ready=False), deployment(1)], [pod(1)])
    rolls = rolling(going, ROLLS, ())
    assert rolls is not None
    assert (rolls.reason, rolls.message) == (Reason.ROLLING_OUT, "not ready yet: east-0")
    placed = pods_placed(going, SPEC, 2)
    assert placed.reason is Reason.PROGRESSING
    ready, reconciling, _ = summary([while_rolling(placed, rolls)], obstacle=None, paused=False, rolls=rolls)
    assert (ready.status, reconciling.status, reconciling.reason) == (True, True, Reason.ROLLING_OUT)
    no_room = pods_placed(seen([deployment(0)], [pod(0, node=None, conditions=[REFUSED])]), SPEC, 1)
    assert while_rolling(no_room, rolls) is no_room


def test_a_pool_of_which_nothing_serves_is_not_ready_whatever_rolls() -> None:
    assert rolling(seen([deployment(0, ready=False)], []), ROLLS, ()) is None


def test_a_pool_that_decodes_serves_with_a_decode_instance() -> None:
    def of(role: str, index: int, ready: bool) -> dict[str, Any]:
        made = deployment(index, ready=ready)
        made["spec"]["template"]["metadata"]["labels"]["prfaas.io/role"] = role
        return made

    assert rolling(seen([of("prefill", 0, True), of("decode", 1, False)], []), ROLLS, ()) is None
    assert rolling(seen([of("prefill", 0, False), of("decode", 1, True)], []), ROLLS, ()) is not None


def test_instances_that_come_or_go_are_no_rollout_and_neither_is_a_crash() -> None:
    here = seen([deployment(0), deployment(1)], [])
    for step in (None, Step(create={"east-2": "prefill"}), Step(delete=("east-0",)), Step()):
        assert rolling(here, step, ()) is None
    broken = seen([deployment(0), deployment(1)], [pod(0, containerStatuses=[crashing()])])
    assert rolling(broken, ROLLS, ()) is None
    crashed = seen([deployment(0, ready=False), deployment(1)], [])
    assert rolling(crashed, Step(), ()) is None


def test_the_last_instance_of_a_rollout_is_still_part_of_it() -> None:
    last = seen([deployment(0), deployment(1, ready=False)], [])
    assert rolling(last, Step(), said_before(Reason.ROLLING_OUT)) is not None
    assert rolling(last, Step(), said_before(Reason.STARTING)) is None
    assert rolling(seen([deployment(0)], []), Step(), said_before(Reason.ROLLING_OUT)) is None


def test_a_rollout_that_waits_says_for_whom_and_what_stays_meanwhile() -> None:
    here = seen([deployment(0), deployment(1)], [])
    waits = rolling(here, Step(held={"east-1": Hold(Cause.PEER, ("to-west",))}), ())
    assert waits is not None
    assert (waits.reason, waits.message) == (
        Reason.WAITING_FOR_PEER,
        "east-1: keeps the old compatibility key until, at the other end of link to-west, its decode instances have "
        "the new key",
    )
    model = rolling(here, Step(held={"east-1": Hold(Cause.MODEL)}), ())
    assert model is not None
    assert model.message == "no instance is changed before the model is on disk; see ModelCached"
