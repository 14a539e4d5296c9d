"""Another KV cache type under traffic, in one datacenter and then in the other: nobody notices, and nothing is mixed.

Engines whose caches differ in type refuse each other, so a pair of two keys would fail its request; the routers' own
count of pairs says besides that none was ever chosen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from e2e.client import Outcome
from e2e.stack import Stack, condition, eventually
from e2e.traffic import traffic

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


@pytest.mark.parametrize(
    ("first", "then", "setting"),
    [("west", "east", {"kvCacheDtype": "fp8"}), ("east", "west", {"attentionBackend": "TRITON_MLA"})],
    ids=["decode first", "prefill first"],
)
def test_a_new_key_goes_through_both_datacenters_and_no_request_fails(
    stack: Stack, first: str, then: str, setting: dict[str, str]
) -> None:
    (old,) = keys(stack, "west")
    assert keys(stack, "east") == {old}
    unready: list[str] = []

    def watched(done: bool) -> bool:
        """`done`, after a look at whether the pools have stayed Ready."""
        for datacenter, (kind, name) in POOLS.items():
            ready = condition(stack.get(datacenter, kind, name), "Ready")
            if ready["status"] != "True":
                unready.append(f"{datacenter}: {ready['reason']}: {ready.get('message', '')}")
        return done

    def waits(datacenter: str) -> bool:
        """Whether a pool does nothing more until its peer does."""
        pool = stack.get(datacenter, *POOLS[datacenter])
        return condition(pool, "Reconciling").get("reason") == "WaitingForPeer"

    with traffic(stack.target(), [SHORT, LONG], streams=6) as flow:
        flow.wait_for(lambda seen: served(seen, 12), 0, 60)
        stack.patch(first, *POOLS[first], {"spec": {"engine": setting}})
        eventually(lambda: watched(waits(first)), 240, f"{first} does not say that it waits for {then}")
        (new,) = keys(stack, first) - {old}
        assert keys(stack, first) == {old, new}, "it keeps an instance of the old key meanwhile"

        def over(datacenter: str) -> bool:
            return watched(whole(stack, datacenter, new))

        halted = flow.mark()
        flow.wait_for(lambda seen: served(seen, 20), halted, 120)
        stack.patch(then, *POOLS[then], {"spec": {"engine": setting}})
        for datacenter in (then, first):
            eventually(partial(over, datacenter), 300, f"{datacenter} did not go over to the new key")
        ended = flow.mark()
        flow.wait_for(lambda seen: served(seen, 20), ended, 120)

    assert [outcome.error for outcome in flow.outcomes if outcome.error] == []
    assert all(outcome.verified for outcome in flow.outcomes)
    chosen = pairs(stack)
    assert [pair for pair in chosen if pair[2] not in ("", pair[0])] == [], "a mixed pair"
    assert {(old, "", old), (old, "east", old), (new, "", new), (new, "east", new)} <= chosen
    decisions = {outcome.decision for outcome in flow.since(ended)}
    assert decisions, "and from then on the new key alone"
    assert all(f"key={new};" in decision for decision in decisions)
    assert unready == []
