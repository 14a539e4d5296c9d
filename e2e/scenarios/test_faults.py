"""Things that break under traffic: an engine, a node, the line, the leader. What is said of each is in docs/."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from e2e.client import Outcome
from e2e.stack import EXCHANGE, NAMESPACE, OPERATOR, OPERATOR_PODS, SYSTEM, Stack, condition, eventually
from e2e.traffic import traffic

SHORT, LONG = 2_000, 40_000


def all_well(outcomes: Sequence[Outcome], remote: bool, count: int) -> bool:
    """The newest `count` outcomes are verified, and at least one of them came the wanted way."""
    newest = outcomes[-count:]
    return len(newest) == count and all(o.verified for o in newest) and any(o.remote is remote for o in newest)


def wrong_answers(outcomes: Sequence[Outcome]) -> list[str]:
    """Answers that were complete and not what the model says: there may never be one."""
    return [outcome.error for outcome in outcomes if outcome.error and outcome.error.startswith("wrong text")]


@pytest.mark.parametrize(("datacenter", "role"), [("west", "decode"), ("west", "prefill"), ("east", "prefill")])
def test_a_crashed_engine_costs_no_more_than_what_was_with_it(stack: Stack, datacenter: str, role: str) -> None:
    with traffic(stack.target(), [SHORT, LONG], streams=6) as flow:
        flow.wait_for(lambda seen: all_well(seen, remote=True, count=10), 0, 60)
        victim = stack.objects(datacenter, "pods", "-l", f"prfaas.io/role={role}")[0]
        mark = flow.mark()
        stack.kill(datacenter, victim)
        flow.wait_for(lambda seen: all_well(seen, remote=True, count=20), mark, 60)
    during = flow.since(mark)
    assert wrong_answers(during) == []
    # A stream can be cut, and a prefill lost, once: at most one request a stream.
    assert sum(outcome.error is not None for outcome in during) <= 6
    eventually(lambda: stack.not_ready() == [], 120, "the crashed engine did not come back")


def test_with_the_operator_stopped_a_crashed_engine_leaves_the_rotation_within_two_seconds(stack: Stack) -> None:
    stack.scale_operator("west", 0)
    victim = stack.objects("west", "pods", "-l", "prfaas.io/role=decode")[0]
    assert stack.routable("decode") == 2
    with traffic(stack.target(), [SHORT], streams=4) as flow:
        flow.wait_for(lambda seen: all_well(seen, remote=False, count=8), 0, 60)
        before = time.monotonic()
        stack.kill("west", victim)
        eventually(lambda: stack.routable("decode") == 1, 30, "the router still names the crashed engine", pause=0.05)
        seconds = time.monotonic() - before
        mark = flow.mark()
        flow.wait_for(lambda seen: all_well(seen, remote=False, count=12), mark, 60)
    assert seconds < 2.0
    assert [outcome.error for outcome in flow.since(mark)[4:] if outcome.error] == []


def instances_by_node(stack: Stack) -> dict[str, set[str]]:
    """Where west's instances are, without those that are on their way out."""
    found: dict[str, set[str]] = {}
    for pod in stack.objects("west", "pods", "-l", "prfaas.io/instance"):
        if "deletionTimestamp" not in pod["metadata"] and pod["spec"].get("nodeName"):
            found.setdefault(pod["spec"]["nodeName"], set()).add(pod["metadata"]["labels"]["prfaas.io/instance"])
    return found


def test_the_instances_of_a_dead_node_come_back_on_another_under_traffic(stack: Stack) -> None:
    # Two instances: either node of the pool has room for both.
    stack.patch("west", "pdcluster", "h20", {"spec": {"pool": {"instances": 2}}})
    stack.wait_ready()
    victim, moved = min(instances_by_node(stack).items())
    with traffic(stack.target(), [SHORT, LONG], streams=4) as flow:
        flow.wait_for(lambda seen: all_well(seen, remote=True, count=8), 0, 60)
        killed = flow.mark()
        stack.datacenters.node(victim, "kill")
        eventually(
            lambda: (
                all(not moved & names for node, names in instances_by_node(stack).items() if node == victim)
                and moved <= set().union(*instances_by_node(stack).values())
            ),
            180,
            f"{sorted(moved)} of {victim} did not come back elsewhere",
        )
        eventually(lambda: stack.not_ready() == [], 180, "the pool is not Ready without its node")
        mark = flow.mark()
        flow.wait_for(lambda seen: all_well(seen, remote=True, count=12), mark, 60)
    assert wrong_answers(flow.since(killed)) == []


def test_a_dead_node_that_leaves_no_room_is_said_and_the_rest_serves(stack: Stack) -> None:
    # Three instances on two nodes with room for two each: the node with two dies.
    placed = instances_by_node(stack)
    victim = max(placed, key=lambda node: len(placed[node]))
    stack.datacenters.node(victim, "kill")

    def told() -> dict[str, Any]:
        return condition(stack.get("west", "pdcluster", "h20"), "PodsPlaced")

    eventually(lambda: told().get("reason") == "Unschedulable", 180, "nothing says that there is no room")
    assert told()["status"] == "False"
    assert "8 nvidia.com/gpu" in told()["message"]
    with traffic(stack.target(), [SHORT, LONG], streams=2) as flow:
        flow.wait_for(lambda seen: all_well(seen, remote=True, count=8), 0, 120)
    assert wrong_answers(flow.outcomes) == []


def test_a_pool_without_room_says_so(stack: Stack) -> None:
    stack.patch("west", "pdcluster", "h20", {"spec": {"pool": {"instances": 5}}})

    def placed() -> dict[str, Any]:
        return condition(stack.get("west", "pdcluster", "h20"), "PodsPlaced")

    eventually(
        lambda: placed().get("reason") == "Unschedulable", 60, "nothing says that the fifth instance has no room"
    )
    assert placed()["status"] == "False"
    assert "nvidia.com/gpu" in placed()["message"]


def test_a_cut_line_keeps_short_prompts_served_and_heals(stack: Stack) -> None:
    with traffic(stack.target(), [SHORT, SHORT, LONG], streams=6) as flow:
        flow.wait_for(lambda seen: all_well(seen, remote=True, count=12), 0, 60)
        cut = flow.mark()
        stack.datacenters.set_line("east", "west", up=False)
        # Long prompts fall back to local prefill, since the sample's policy says so.
        flow.wait_for(lambda seen: len(seen) > 20 and all(o.verified and not o.remote for o in seen[-12:]), cut, 120)
        eventually(
            lambda: (
                condition(stack.get("west", "interclusterlink", "east"), "PeerAPIReachable").get("status") == "False"
            ),
            90,
            "the link does not say that its peer is lost",
        )
        stack.datacenters.set_line("east", "west", up=True)
        healed = flow.mark()
        flow.wait_for(lambda seen: all_well(seen, remote=True, count=12), healed, 120)
    since_cut = flow.since(cut)
    assert wrong_answers(since_cut) == []
    short = [outcome for outcome in since_cut if outcome.ask.prompt_tokens == SHORT]
    assert [outcome.error for outcome in short if outcome.error] == []
    stack.wait_ready()


def test_when_the_leader_is_killed_the_other_replica_acts(stack: Stack) -> None:
    def holder() -> str:
        spec = stack.get("east", "lease", OPERATOR, SYSTEM)["spec"]
        return str(spec.get("holderIdentity") or "")

    before = holder()
    leader = next(
        pod
        for pod in stack.objects("east", "pods", "-l", OPERATOR_PODS, namespace=SYSTEM)
        if before.startswith(pod["metadata"]["name"])
    )
    killed = time.monotonic()
    stack.kill("east", leader)
    stack.patch("east", "prfaascluster", "h200", {"spec": {"instances": 1}})

    def acted() -> bool:
        return [item["metadata"]["name"] for item in stack.objects("east", "deployments")] == ["h200-0"]

    eventually(acted, 60, "nobody acts after the leader's death")
    assert time.monotonic() - killed < 30
    assert holder() != before


def test_a_restarted_operator_writes_nothing(stack: Stack) -> None:
    def versions(datacenter: str) -> dict[str, str]:
        kinds = "deployments,services,endpointslices,configmaps,poddisruptionbudgets,serviceaccounts,rolebindings,"
        ours = "prfaasclusters.prfaas.io,pdclusters.prfaas.io,interclusterlinks.prfaas.io"
        found = {}
        for namespace in (NAMESPACE, EXCHANGE):
            for item in stack.objects(datacenter, kinds + ours, namespace=namespace):
                metadata = item["metadata"]
                found[f"{namespace}/{item['kind']}/{metadata['name']}"] = metadata["resourceVersion"]
        return found

    def seen(datacenter: str) -> bool:
        kinds = {item["kind"] for item in stack.objects(datacenter, "prfaascluster,pdcluster,interclusterlink")}
        return all(stack.reconciles(datacenter, kind) > 0 for kind in kinds)

    before = {datacenter: versions(datacenter) for datacenter in stack.names}
    for datacenter in stack.names:
        stack.scale_operator(datacenter, 0)
        stack.scale_operator(datacenter, stack.replicas)
        eventually(partial(seen, datacenter), 60, f"{datacenter}: the new leader did not reconcile everything")
    after = {datacenter: versions(datacenter) for datacenter in stack.names}
    assert json.dumps(after, indent=1, sort_keys=True) == json.dumps(before, indent=1, sort_keys=True)
