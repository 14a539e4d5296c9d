"""Another KV cache type under traffic, in one datacenter and then in the other: nobody notices, and nothing is mixed.

Engines whose caches differ in type refuse each other, so a pair of two keys would fail its request; the routers' own
count of pairs says besides that none was ever chosen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from e2e.client import Outcome
from e2e.stack import Stack, condition, eventually
from e2e.traffic import Traffic, traffic

SHORT, LONG = 2_000, 40_000
POOLS = {"east": ("prfaascluster", "h200"), "west": ("pdcluster", "h20")}
WHOLE = {"east": {"prefillReady": 2, "decodeReady": 0}, "west": {"prefillReady": 1, "decodeReady": 2}}
PAIRS = re.compile(
    r'^prfaas_router_pairs_total\{decode_key="(.*)",link="(.*)",prefill_key="(.*)"\} (\S+)$', re.MULTILINE
)


def status(stack: Stack, datacenter: str) -> dict[str, Any]:
    found: dict[str, Any] = stack.get(datacenter, *POOLS[datacenter])["status"]
    return found


def keys(stack: Stack, datacenter: str) -> set[str]:
    """Keys of the pool's instances."""
    return {group["compatibilityKey"] for group in status(stack, datacenter)["groups"]}


def pairs(stack: Stack) -> set[tuple[str, str, str]]:
    """(decode key, link, prefill key) of every request that the routers have sent on since they run."""
    return {(decode, link, prefill) for decode, link, prefill, _ in PAIRS.findall(stack.router_metrics())}


def whole(stack: Stack, datacenter: str, key: str) -> bool:
    """Whether every instance of a pool is ready and has this key, and nothing is left to do."""
    pool = stack.get(datacenter, *POOLS[datacenter])
    groups = pool["status"]["groups"]
    counts = [{name: group[name] for name in WHOLE[datacenter]} for group in groups]
    return (
        [group["compatibilityKey"] for group in groups] == [key]
        and counts == [WHOLE[datacenter]]
        and condition(pool, "Reconciling").get("status") == "False"
    )


def served(outcomes: Sequence[Outcome], count: int) -> bool:
    """Whether so many requests were answered, and the newest of them both ways."""
    return len(outcomes) >= count and {outcome.remote for outcome in outcomes[-count:]} == {True, False}


class Rollout:
    """A setting that gives the key another value, in one datacenter and then in the other, under `flow`."""

    def __init__(self, stack: Stack, flow: Traffic, setting: dict[str, str]) -> None:
        self.stack, self.flow, self.setting = stack, flow, setting
        self.unready: list[str] = []
        """When and why a pool was not Ready while it went on."""

    def go(self, first: str, then: str) -> str:
        """Roll it out; the new key. Raises AssertionError where it halts, goes too far, or ends otherwise."""
        (old,) = keys(self.stack, first)
        self._change(first)
        eventually(lambda: self._watched(self._waits(first)), 240, f"{first} does not say that it waits for {then}")
        (new,) = keys(self.stack, first) - {old}
        assert keys(self.stack, first) == {old, new}, "it keeps an instance of the old key meanwhile"
        self._serve_on()
        self._change(then)
        for datacenter in (then, first):
            eventually(partial(self._is_over, datacenter, new), 300, f"{datacenter} did not go over to the new key")
        return new

    def _change(self, datacenter: str) -> None:
        self.stack.patch(datacenter, *POOLS[datacenter], {"spec": {"engine": self.setting}})

    def _waits(self, datacenter: str) -> bool:
        pool = self.stack.get(datacenter, *POOLS[datacenter])
        return condition(pool, "Reconciling").get("reason") == "WaitingForPeer"

    def _is_over(self, datacenter: str, new: str) -> bool:
        return self._watched(whole(self.stack, datacenter, new))

    def _serve_on(self) -> None:
        halted = self.flow.mark()
        self.flow.wait_for(lambda seen: served(seen, 20), halted, 120)

    def _watched(self, done: bool) -> bool:
        for datacenter, (kind, name) in POOLS.items():
            ready = condition(self.stack.get(datacenter, kind, name), "Ready")
            if ready["status"] != "True":
                self.unready.append(f"{datacenter}: {ready['reason']}: {ready.get('message', '')}")
        return done


def test_a_new_key_goes_through_both_datacenters_and_back_and_no_request_fails(stack: Stack) -> None:
    (old,) = keys(stack, "west")
    assert keys(stack, "east") == {old}
    before = stack.get("west", *POOLS["west"])["spec"]["engine"]["kvCacheDtype"]

    with traffic(stack.target(), [SHORT, LONG], streams=6) as flow:
        flow.wait_for(lambda seen: served(seen, 12), 0, 60)
        there = Rollout(stack, flow, {"kvCacheDtype": "fp8"})
        new = there.go("west", "east")
        middle = flow.mark()
        flow.wait_for(lambda seen: served(seen, 20), middle, 120)
        turned = flow.mark()
        back = Rollout(stack, flow, {"kvCacheDtype": before})
        assert back.go("east", "west") == old
        ended = flow.mark()
        flow.wait_for(lambda seen: served(seen, 20), ended, 120)

    assert [outcome.error for outcome in flow.outcomes if outcome.error] == []
    assert all(outcome.verified for outcome in flow.outcomes)
    chosen = pairs(stack)
    assert [pair for pair in chosen if pair[2] not in ("", pair[0])] == [], "a mixed pair"
    assert {(old, "", old), (old, "east", old), (new, "", new), (new, "east", new)} <= chosen
    for key, since in ((new, flow.outcomes[middle:turned]), (old, flow.since(ended))):
        decisions = {outcome.decision for outcome in since}
        assert decisions, "and from then on the wanted key alone"
        assert all(f"key={key};" in decision for decision in decisions)
    assert there.unready + back.unready == []
