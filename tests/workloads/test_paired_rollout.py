"""A key goes through two datacenters: exact steps by example, and both sides together as a state machine.

The machine has a PDCluster in west and a prefill pool in east, joined by a link. Each takes a step from what it sees
whenever hypothesis says so, instances become ready in any order and crash, and specs change at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from prfaas.workloads.assignment import Cause, Observed, Step, Wanted, instance_index, instance_name, plan
from prfaas.workloads.pairing import DECODE, LOCAL, REMOTE, Ability, Consumer, Member, Pairing, Supplier

OLD, NEW = "old", "new"


def child(cluster: str, index: int, role: str, key: str, *, ready: bool = True) -> Observed:
    return Observed(instance_name(cluster, index), index, role, f"{role}-{key}", ready, key)


def west(*instances: str) -> list[Observed]:
    """`D` a decode and `P` a prefill instance of the old key, small letters of the new one; `!`: not ready."""
    made = []
    for index, text in enumerate(instances):
        role = "decode" if text[0] in "dD" else "prefill"
        made.append(child("west", index, role, NEW if text[0].islower() else OLD, ready="!" not in text))
    return made


def step(
    observed: list[Observed],
    counts: dict[str, int],
    *,
    east: Iterable[str] | None = None,
    heading: str | None = None,
    budget: int = 1,
    hold: bool = False,
) -> Step:
    """A step of west towards the new key. `east`: keys that are ready there; None: there is no link."""
    suppliers = () if east is None else (Supplier("to-east", frozenset(east), heading),)
    target = Wanted(counts, {role: f"{role}-{NEW}" for role in counts})
    return plan("west", observed, target, budget, pairing=Pairing(NEW, suppliers), hold=hold)


ONE_AND_TWO = {"prefill": 1, "decode": 2}


def test_where_prefill_is_single_decode_goes_first() -> None:
    assert step(west("P", "D", "D"), ONE_AND_TWO).roll == {"west-1": "decode"}


def test_while_an_instance_starts_nothing_else_goes() -> None:
    result = step(west("P", "d!", "D"), ONE_AND_TWO)
    assert not result.roll
    assert {why.cause for why in result.held.values()} == {Cause.BUDGET}


def test_then_the_single_prefill_instance_follows_and_makes_the_new_group_whole() -> None:
    assert step(west("P", "d", "D"), ONE_AND_TWO).roll == {"west-0": "prefill"}


def test_the_last_old_decode_instance_waits_for_the_peers_first_new_one() -> None:
    waits = step(west("p", "d", "D"), ONE_AND_TWO, east={OLD})
    assert not waits.roll
    assert (waits.held["west-2"].cause, waits.held["west-2"].peers) == (Cause.PEER, ("to-east",))
    assert step(west("p", "d", "D"), ONE_AND_TWO, east={OLD, NEW}).roll == {"west-2": "decode"}


@pytest.mark.parametrize("east", [None, set[str]()])
def test_where_no_peer_prefills_nothing_is_waited_for(east: set[str] | None) -> None:
    assert step(west("p", "d", "D"), ONE_AND_TWO, east=east).roll == {"west-2": "decode"}


def test_of_two_and_two_each_role_keeps_one_until_the_new_group_is_whole() -> None:
    counts = {"prefill": 2, "decode": 2}
    assert step(west("D", "D", "P", "P"), counts).roll == {"west-0": "decode"}
    assert step(west("d", "D", "P", "P"), counts).roll == {"west-2": "prefill"}
    waits = step(west("d", "D", "p!", "P"), counts, budget=4)
    assert not waits.roll
    assert {why.cause for why in waits.held.values()} == {Cause.GROUP}
    assert set(step(west("d", "D", "p", "P"), counts, budget=4).roll) == {"west-1", "west-3"}


def test_both_roles_go_over_evenly() -> None:
    counts = {"prefill": 2, "decode": 3}
    assert step(west("d", "D", "D", "P", "P"), counts).roll == {"west-3": "prefill"}
    assert step(west("d", "D", "D", "p", "P"), counts).roll == {"west-1": "decode"}


def test_a_single_decode_instance_serves_until_a_prefill_instance_has_taken_its_role() -> None:
    counts = {"prefill": 2, "decode": 1}
    assert step(west("D", "P", "P"), counts).convert == {"west-2": "decode"}
    assert not step(west("D", "P", "d!"), counts).convert
    last = step(west("D", "P", "d"), counts)
    assert {**last.convert, **last.roll} == {"west-0": "prefill"}


def test_a_pool_of_two_begins_when_its_peer_means_to_go_along() -> None:
    counts = {"prefill": 1, "decode": 1}
    waits = step(west("D", "P"), counts, east={OLD}, heading=OLD)
    assert not waits.convert
    assert {why.cause for why in waits.held.values()} == {Cause.PEER}
    assert step(west("D", "P"), counts, east={OLD}, heading=NEW).convert == {"west-1": "decode"}
    assert step(west("D", "P"), counts).convert == {"west-1": "decode"}


def test_what_has_gone_over_goes_back_when_the_spec_does() -> None:
    back = {role: f"{role}-{OLD}" for role in ONE_AND_TWO}
    result = plan("west", west("P", "d", "D"), Wanted(ONE_AND_TWO, back), 1, pairing=Pairing(OLD))
    assert result.roll == {"west-1": "decode"}


def test_independent_pools_go_by_the_budget_alone() -> None:
    target = Wanted(ONE_AND_TWO, {role: f"{role}-{NEW}" for role in ONE_AND_TWO})
    assert plan("west", west("P", "D", "D"), target, 1).roll == {"west-0": "prefill"}


def test_without_its_model_nothing_that_runs_is_touched_and_what_is_missing_is_made() -> None:
    result = step(west("P!", "D"), ONE_AND_TWO, hold=True)
    assert (result.roll, result.convert, result.create) == ({}, {}, {"west-2": "decode"})
    assert {why.cause for why in result.held.values()} == {Cause.MODEL}
    assert not step(west("D", "P"), {"prefill": 1, "decode": 1}, hold=True).convert


def test_a_pool_that_shrinks_in_between_keeps_a_group_whole() -> None:
    assert step(west("d", "D", "D", "P", "P"), {"prefill": 2, "decode": 2}).delete == ("west-2",)
    assert step(west("d", "d", "D", "P"), ONE_AND_TWO).delete == ("west-1",)


def east_step(observed: list[Observed], *consumers: Consumer, budget: int = 1) -> Step:
    counts = {"prefill": len(observed)}
    target = Wanted(counts, {"prefill": f"prefill-{NEW}"})
    return plan("west", observed, target, budget, pairing=Pairing(NEW, consumers=consumers))


def decodes(*keys: str, ready: Iterable[str] | None = None, name: str = "to-west") -> Consumer:
    return Consumer(name, frozenset(keys), frozenset(keys if ready is None else ready))


def test_a_prefill_pool_makes_its_first_new_instance_at_once_and_keeps_an_old_one_for_its_peer() -> None:
    assert east_step(west("P", "P"), decodes(OLD)).roll == {"west-0": "prefill"}
    waits = east_step(west("p", "P"), decodes(OLD, NEW))
    assert not waits.roll
    assert (waits.held["west-1"].cause, waits.held["west-1"].peers) == (Cause.PEER, ("to-west",))
    assert east_step(west("p", "P"), decodes(NEW)).roll == {"west-1": "prefill"}


def test_a_single_prefill_instance_goes_once_the_peer_can_serve_with_the_new_key() -> None:
    assert not east_step(west("P"), decodes(OLD)).roll
    assert not east_step(west("P"), decodes(OLD, NEW, ready=[OLD])).roll
    assert east_step(west("P"), decodes(OLD, NEW)).roll == {"west-0": "prefill"}
    both = (decodes(OLD, NEW), decodes(OLD, name="to-south"))
    assert east_step(west("P"), *both).held["west-0"].peers == ("to-south",)


def test_a_peer_of_which_nothing_is_known_may_need_everything() -> None:
    unknown = Consumer("to-west", None)
    assert not east_step(west("p", "P"), unknown).roll
    assert east_step(west("P", "P"), unknown).roll == {"west-0": "prefill"}


def test_a_prefill_pool_without_peers_waits_for_nobody() -> None:
    assert east_step(west("P")).roll == {"west-0": "prefill"}


def test_abilities() -> None:
    pairing = Pairing(NEW, (Supplier("a", frozenset({OLD})),), (Consumer("b", frozenset({OLD})),))
    assert pairing.abilities([]) == set()
    assert pairing.abilities([Member("decode", NEW)]) == {DECODE}
    assert pairing.abilities([Member("decode", NEW), Member("prefill", OLD)]) == {DECODE, Ability("peer", "b", OLD)}
    assert pairing.abilities([Member("decode", OLD)]) == {DECODE, REMOTE}
    assert LOCAL in pairing.abilities([Member("decode", NEW), Member("prefill", NEW)])


class Pool:
    """One side: its children, and the key that its spec asks for."""

    def __init__(self, cluster: str, counts: dict[str, int], key: str, budget: int) -> None:
        self.cluster, self.counts, self.key, self.budget = cluster, counts, key, budget
        self.children: dict[str, Observed] = {}
        self.apply(plan(cluster, [], self.wanted, budget))
        self.start_all()

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.counts, {role: f"{role}-{self.key}" for role in self.counts})

    @property
    def ready(self) -> list[Member]:
        return [Member(each.role, each.key) for each in self.children.values() if each.ready]

    def keys(self, role: str, *, ready: bool = True) -> frozenset[str]:
        return frozenset(each.key for each in self.children.values() if each.role == role and (each.ready or not ready))

    def apply(self, result: Step) -> None:
        for name in result.delete:
            del self.children[name]
        for name, role in {**result.create, **result.convert, **result.roll}.items():
            index = instance_index(self.cluster, name)
            assert index is not None
            self.children[name] = child(self.cluster, index, role, self.key, ready=False)

    def start_all(self) -> None:
        self.children = {name: replace(each, ready=True) for name, each in self.children.items()}


class Datacenters(RuleBasedStateMachine):
    """Both sides. Each knows of the other what was published last; with `prompt` that is what is so."""

    keys = st.sampled_from(["a", "b", "c"])

    @initialize(
        prefill=st.integers(1, 3),
        decode=st.integers(1, 3),
        east=st.integers(0, 3),
        budgets=st.tuples(st.integers(1, 2), st.integers(1, 2)),
        prompt=st.booleans(),
    )
    def begin(self, prefill: int, decode: int, east: int, budgets: tuple[int, int], prompt: bool) -> None:
        self.west = Pool("west", {"prefill": prefill, "decode": decode}, "a", budgets[0])
        self.east = Pool("east", {"prefill": east}, "a", budgets[1])
        self.prompt = prompt
        self.crashed = self.thrice = False
        self.publish_east()
        self.publish_west()

    @property
    def roomy(self) -> bool:
        """Whether two groups fit into west at a time."""
        prefill, decode = self.west.counts["prefill"], self.west.counts["decode"]
        return min(prefill, decode) > 1 or (decode == 1 and prefill > 2)

    @rule()
    def publish_east(self) -> None:
        self.supplier = Supplier("to-east", self.east.keys("prefill"), self.east.key)

    @rule()
    def publish_west(self) -> None:
        self.consumer = Consumer("to-west", self.west.keys("decode", ready=False), self.west.keys("decode"))

    @rule()
    def west_acts(self) -> None:
        if self.prompt:
            self.publish_east()
        self._act(self.west, Pairing(self.west.key, (self.supplier,)))

    @rule()
    def east_acts(self) -> None:
        if self.prompt:
            self.publish_west()
        self._act(self.east, Pairing(self.east.key, consumers=(self.consumer,)))

    def _act(self, pool: Pool, pairing: Pairing) -> Step:
        before, unready = pairing.abilities(pool.ready), sum(not each.ready for each in pool.children.values())
        remote = self.west.keys("decode") & self.east.keys("prefill")
        result = plan(pool.cluster, list(pool.children.values()), pool.wanted, pool.budget, pairing=pairing)
        disturbed = {name for name in {*result.roll, *result.convert} if pool.children[name].ready}
        assert not disturbed or unready + len(disturbed) <= pool.budget, "the budget"
        pool.apply(result)
        lost = before - pairing.abilities(pool.ready)
        assert DECODE not in lost
        assert REMOTE not in lost
        if self.roomy and not self.crashed and not self.thrice:
            assert LOCAL not in lost
        if pool is self.west and DECODE in before:
            assert pool.keys("decode"), "somebody decodes"
        can_spare = self.east.counts["prefill"] > len({*self.west.keys("decode", ready=False), self.east.key})
        if self.prompt and not self.crashed and remote and can_spare:
            assert self.west.keys("decode") & self.east.keys("prefill"), "remote prefill is there as it was"
        return result

    @precondition(lambda self: any(not each.ready for pool in self.pools for each in pool.children.values()))
    @rule(data=st.data())
    def one_is_ready(self, data: st.DataObject) -> None:
        waiting = [(pool, name) for pool in self.pools for name, each in pool.children.items() if not each.ready]
        pool, name = data.draw(st.sampled_from(waiting), label="starts")
        pool.children[name] = replace(pool.children[name], ready=True)

    @precondition(lambda self: any(each.ready for pool in self.pools for each in pool.children.values()))
    @rule(data=st.data())
    def one_crashes(self, data: st.DataObject) -> None:
        running = [(pool, name) for pool in self.pools for name, each in pool.children.items() if each.ready]
        pool, name = data.draw(st.sampled_from(running), label="crashes")
        pool.children[name] = replace(pool.children[name], ready=False)
        self.crashed = True

    @rule(key=keys)
    def west_is_changed(self, key: str) -> None:
        self.west.key = key
        self.thrice |= len({key, *(each.key for each in self.west.children.values())}) > 2

    @rule(key=keys)
    def east_is_changed(self, key: str) -> None:
        self.east.key = key

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.west, self.east

    def settle(self) -> tuple[Step, Step]:
        """Both act, and everything starts, until neither does anything."""
        for _ in range(60):
            for pool in self.pools:
                pool.start_all()
            self.publish_east()
            self.publish_west()
            ours = self._act(self.west, Pairing(self.west.key, (self.supplier,)))
            self.publish_west()
            theirs = self._act(self.east, Pairing(self.east.key, consumers=(self.consumer,)))
            if not any((each.roll or each.convert or each.create or each.delete) for each in (ours, theirs)):
                return ours, theirs
        raise AssertionError("it never ends")

    def teardown(self) -> None:
        """Whatever happened: with two specs it halts and says for whom, with one it ends."""
        if not hasattr(self, "west"):
            return
        halted = self.settle()
        assert self.west.keys("decode")
        for result in halted:
            assert all(why.cause is Cause.PEER and why.peers for why in result.held.values()), "it says for whom"
        if sum(self.west.counts.values()) > 2:
            assert LOCAL in Pairing("").abilities(self.west.ready)
        key = self.west.key
        self.east.key = key
        for result in self.settle():
            assert result.settled
        for pool in self.pools:
            assert {each.key for each in pool.children.values()} <= {key}
            roles = [each.role for each in pool.children.values()]
            assert {role: roles.count(role) for role in pool.counts} == pool.counts


TestDatacenters = Datacenters.TestCase
TestDatacenters.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
