"""The routing decision, read as a table of who prefills what, and the rules that hold for every input."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.policy import Fallback, LinkThreshold, RoutingPolicy
from prfaas.routing.decision import Decision, Reason, Refusal, choose_decode, decide
from prfaas.routing.prompt import Prompt
from prfaas.routing.world import Endpoint, Load, Pools

P1, P2 = Endpoint("10.0.1.1", 8000), Endpoint("10.0.1.2", 8000)
D1, D2 = Endpoint("10.0.2.1", 8000), Endpoint("10.0.2.2", 8000)
E1, E2 = Endpoint("10.8.0.1", 8000), Endpoint("10.8.0.2", 8000)
N1 = Endpoint("10.9.0.1", 8000)
POOLS = Pools(prefill=(P1, P2), decode=(D1, D2), remote={"to-east": (E1, E2)})
IDLE = Load()


def policy(fallback: Fallback = Fallback.LOCAL_PREFILL, **thresholds: int) -> RoutingPolicy:
    cuts = thresholds or {"to_east": 1000}
    return RoutingPolicy.build(
        pd_cluster_uid="uid",
        epoch=1,
        version=1,
        model="m",
        thresholds=tuple(LinkThreshold(link=link.replace("_", "-"), tokens=tokens) for link, tokens in cuts.items()),
        fallback=fallback,
    )


def route(
    tokens: int, *, sequences: int = 1, rules: RoutingPolicy | None = None, pools: Pools = POOLS, load: Load = IDLE
) -> Decision | Refusal:
    return decide(Prompt(tokens, sequences), rules or policy(), pools, load, key="r")


def decision(found: Decision | Refusal) -> Decision:
    assert isinstance(found, Decision)
    return found


@pytest.mark.parametrize(("tokens", "link"), [(0, None), (1000, None), (1001, "to-east")])
def test_above_the_threshold_is_remote(tokens: int, link: str | None) -> None:
    found = decision(route(tokens))
    assert found.link == link
    assert found.reason == (Reason.LONG if link else Reason.SHORT)
    assert found.prefill in ((E1, E2) if link else (P1, P2))
    assert found.decode in (D1, D2)


def test_without_links_everything_is_local() -> None:
    bare = RoutingPolicy.build(pd_cluster_uid="uid", epoch=1, version=1, model="m")
    assert decision(route(10**6, rules=bare)).reason is Reason.SHORT


def test_a_long_prompt_without_a_remote_instance_follows_the_fallback() -> None:
    pools = Pools(prefill=(P1,), decode=(D1,), remote={"to-east": ()})
    found = decision(route(5000, pools=pools))
    assert (found.reason, found.prefill, found.link) == (Reason.REMOTE_UNAVAILABLE, P1, None)
    refused = route(5000, pools=pools, rules=policy(Fallback.REJECT))
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.status) == (Reason.REMOTE_UNAVAILABLE, 503)


def test_a_short_prompt_without_a_local_instance_goes_over_the_link() -> None:
    found = decision(route(10, pools=Pools(decode=(D1,), remote={"to-east": (E1,)})))
    assert (found.reason, found.prefill, found.link) == (Reason.LOCAL_UNAVAILABLE, E1, "to-east")


@pytest.mark.parametrize("tokens", [10, 5000])
def test_where_there_is_no_prefill_instance_at_all_the_decode_instance_prefills(tokens: int) -> None:
    found = decision(route(tokens, pools=Pools(decode=(D1,))))
    assert (found.reason, found.decode, found.prefill, found.link) == (Reason.DECODE_ALONE, D1, None, None)
    refused = route(5000, pools=Pools(decode=(D1,)), rules=policy(Fallback.REJECT))
    assert isinstance(refused, Refusal)


def test_where_prefill_instances_only_fail_nothing_is_prefilled_on_a_decode_instance() -> None:
    for pools in (Pools((P1,), (D1,)), Pools((), (D1,), {"to-east": (P1,)})):
        refused = decide(Prompt(10), policy(), pools, IDLE, key="r", exclude=frozenset({P1.address}))
        assert isinstance(refused, Refusal)
        assert (refused.reason, refused.status) == (Reason.NO_PREFILL, 503)


def test_without_a_decode_instance_no_prefill_is_wasted() -> None:
    refused = route(10, pools=Pools(prefill=(P1,), remote={"to-east": (E1,)}))
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.status) == (Reason.NO_DECODE, 503)


def test_several_sequences_have_no_prefill_leg() -> None:
    found = decision(route(10, sequences=2))
    assert (found.reason, found.prefill, found.link) == (Reason.MULTIPLE_SEQUENCES, None, None)
    long = decision(route(5000, sequences=2))
    assert (long.reason, long.prefill) == (Reason.MULTIPLE_SEQUENCES, None)
    refused = route(5000, sequences=2, rules=policy(Fallback.REJECT))
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.status) == (Reason.MULTIPLE_SEQUENCES_TOO_LONG, 400)
    assert "at most 1000 prompt tokens" in refused.message


def test_the_least_busy_instance_is_taken() -> None:
    load = Load(in_flight={P1.address: 2, P2.address: 1, D1.address: 1, E2.address: 3})
    short, long = decision(route(10, load=load)), decision(route(5000, load=load))
    assert (short.prefill, short.decode, long.prefill) == (P2, D2, E1)


def test_the_least_busy_link_is_taken_among_those_whose_threshold_is_passed() -> None:
    pools = Pools(prefill=(P1,), decode=(D1,), remote={"to-east": (E1,), "to-north": (N1,)})
    rules = policy(to_east=1000, to_north=4000)
    assert decision(route(2000, rules=rules, pools=pools, load=Load({E1.address: 9}))).link == "to-east"
    assert decision(route(5000, rules=rules, pools=pools, load=Load({E1.address: 9}))).link == "to-north"
    assert decision(route(5000, rules=rules, pools=pools)).link == "to-east"


def test_equals_are_spread_by_the_requests_key() -> None:
    chosen = Counter(
        decision(decide(Prompt(10), policy(), POOLS, IDLE, key=f"r{number}")).prefill for number in range(400)
    )
    assert set(chosen) == {P1, P2}
    assert min(chosen.values()) > 120


def test_skipped_instances_are_passed_over() -> None:
    load = Load(in_flight={P2.address: 5, E2.address: 5}, skipped=frozenset({P1.address, E1.address}))
    assert decision(route(10, load=load)).prefill == P2
    assert decision(route(5000, load=load)).prefill == E2


def test_a_line_that_does_not_answer_is_not_tried_but_a_local_instance_is_as_last_resort() -> None:
    everyone = frozenset({P1.address, P2.address, D1.address, D2.address, E1.address, E2.address})
    found = decision(route(5000, load=Load(skipped=everyone)))
    assert (found.reason, found.link) == (Reason.REMOTE_UNAVAILABLE, None)
    assert found.prefill in (P1, P2)
    assert found.decode in (D1, D2)


def test_what_failed_this_request_is_excluded_even_as_last_resort() -> None:
    found = decide(Prompt(10), policy(), POOLS, IDLE, key="r", exclude=frozenset({D1.address, P1.address}))
    assert (decision(found).decode, decision(found).prefill) == (D2, P2)
    refused = decide(Prompt(10), policy(), POOLS, IDLE, key="r", exclude=frozenset({D1.address, D2.address}))
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.NO_DECODE


def group(key: str, *endpoints: Endpoint) -> tuple[Endpoint, ...]:
    return tuple(replace(endpoint, compatibility_key=key) for endpoint in endpoints)


def test_a_pair_is_of_one_key_even_if_the_other_key_is_idle() -> None:
    pools = Pools(
        prefill=(*group("a", P1), *group("b", P2)),
        decode=(*group("a", D1), *group("b", D2)),
        remote={"to-east": (*group("a", E1), *group("b", E2))},
    )
    for busy in ({D1.address: 3}, {P1.address: 3, E1.address: 3}):
        short, long = decision(route(10, pools=pools, load=Load(busy))), decision(route(5000, pools=pools))
        assert (short.decode, short.prefill, short.key) == (D2, P2, "b")
        assert long.prefill is not None
        assert long.decode.compatibility_key == long.prefill.compatibility_key
    assert decision(route(10, pools=pools, load=Load({P2.address: 1, D1.address: 2}))).prefill == P2, "least together"


def test_a_line_of_another_key_is_as_if_it_were_not_there() -> None:
    pools = Pools(group("a", P1), group("a", D1), {"to-east": group("b", E1)})
    assert decision(route(5000, pools=pools)).reason is Reason.REMOTE_UNAVAILABLE
    unnamed = Pools((P1,), (D1,), {"to-east": group("b", E1)})
    assert decision(route(5000, pools=unnamed)).reason is Reason.REMOTE_UNAVAILABLE


def test_in_a_gap_another_group_that_is_whole_comes_first_then_the_line_then_the_decode_instance_alone() -> None:
    new, old = group("b", D2), group("a", D1)
    whole = Pools(group("a", P1), (*old, *new), {"to-east": group("b", E2)})
    busy = Load({D1.address: 9})
    assert decision(route(10, pools=whole, load=busy)).decode == D1
    line = replace(whole, prefill=())
    found = decision(route(10, pools=line))
    assert (found.reason, found.decode, found.prefill) == (Reason.LOCAL_UNAVAILABLE, D2, E2)
    alone = replace(line, remote={})
    found = decision(route(10, pools=alone, load=busy))
    assert (found.reason, found.decode, found.prefill) == (Reason.DECODE_ALONE, D2, None)


def test_a_group_that_is_skipped_is_the_last_resort() -> None:
    pools = Pools((*group("a", P1), *group("b", P2)), (*group("a", D1), *group("b", D2)))
    for skipped in (D1, P1):
        load = Load({D2.address: 7}, frozenset({skipped.address}))
        assert decision(route(10, pools=pools, load=load)).decode == D2
    everyone = frozenset({P1.address, P2.address, D1.address})
    assert decision(route(10, pools=pools, load=Load(skipped=everyone))).reason is Reason.SHORT


def test_idle_groups_are_told_apart_by_the_requests_key() -> None:
    pools = Pools((*group("a", P1), *group("b", P2)), (*group("a", D1), *group("b", D2)))
    chosen = Counter(decision(decide(Prompt(10), policy(), pools, IDLE, key=f"r{n}")).key for n in range(400))
    assert min(chosen["a"], chosen["b"]) > 120


def test_groups_share_requests_as_their_instances_can_take_them() -> None:
    decodes = [Endpoint(f"10.0.2.{n}", 8000) for n in range(4)]
    pools = Pools((*group("a", P1), *group("b", P2)), (*group("a", decodes[0]), *group("b", *decodes[1:])))
    flight: Counter[str] = Counter()
    for number in range(200):  # no stream ends: what counts is how they are spread
        found = decision(decide(Prompt(10), policy(), pools, Load(flight), key=f"r{number}"))
        flight[found.decode.address] += 1
    assert {flight[endpoint.address] for endpoint in decodes} == {50}


def test_a_retry_goes_back_to_the_prefill_instance_that_holds_the_prompt() -> None:
    load = Load(in_flight={P1.address: 4, E2.address: 4})
    assert decision(decide(Prompt(10), policy(), POOLS, load, key="r", prefer=P1.address)).prefill == P1
    assert decision(decide(Prompt(5000), policy(), POOLS, load, key="r", prefer=E2.address)).prefill == E2


def test_a_decode_instance_for_a_request_without_a_prompt() -> None:
    assert choose_decode(POOLS, Load({D1.address: 1}), key="r") == D2
    assert choose_decode(Pools(), IDLE, key="r") is None


def test_decision_as_clients_see_it() -> None:
    assert str(decision(route(10))) == "local; reason=Short"
    assert str(decision(route(5000))) == "remote; link=to-east; reason=Long"
    assert str(decision(route(10, pools=Pools((), group("k1", D1))))) == "local; key=k1; reason=DecodeAlone"
    assert str(route(10, pools=Pools())) == "refused; reason=NoDecodeInstance"


ADDRESSES = [f"10.0.0.{n}:8000" for n in range(8)]
addresses = st.lists(
    st.builds(
        Endpoint,
        st.sampled_from([f"10.0.0.{n}" for n in range(8)]),
        st.just(8000),
        compatibility_key=st.sampled_from([None, "a", "b"]),
    ),
    unique=True,
    max_size=4,
).map(tuple)
worlds = st.builds(
    Pools, addresses, addresses, st.dictionaries(st.sampled_from(["to-east", "to-north"]), addresses, max_size=2)
)
loads = st.builds(
    Load, st.dictionaries(st.sampled_from(ADDRESSES), st.integers(0, 5)), st.frozensets(st.sampled_from(ADDRESSES))
)


@given(
    st.integers(0, 3000),
    st.integers(1, 2),
    worlds,
    loads,
    st.sampled_from(Fallback),
    st.frozensets(st.sampled_from(ADDRESSES)),
    st.none() | st.sampled_from(ADDRESSES),
)
def test_rules_that_always_hold(
    tokens: int,
    sequences: int,
    pools: Pools,
    load: Load,
    fallback: Fallback,
    exclude: frozenset[str],
    prefer: str | None,
) -> None:
    rules = policy(fallback, to_east=1000, to_north=2000)
    prompt = Prompt(tokens, sequences)
    found = decide(prompt, rules, pools, load, key="k", exclude=exclude, prefer=prefer)
    assert found == decide(prompt, rules, pools, load, key="k", exclude=exclude, prefer=prefer)
    decodes = [each for each in pools.decode if each.address not in exclude]
    prefills = [*pools.prefill, *(each for members in pools.remote.values() for each in members)]
    if isinstance(found, Refusal):
        # Never while some group can serve it, or a decode instance has nobody to prefill for it.
        if found.reason is not Reason.MULTIPLE_SEQUENCES_TOO_LONG and not (
            tokens > 1000 and fallback is Fallback.REJECT
        ):
            local = {each.compatibility_key for each in pools.prefill if each.address not in exclude}
            any_prefill = {each.compatibility_key for each in prefills}
            assert not [each for each in decodes if each.compatibility_key in local], "a whole group"
            assert not [each for each in decodes if each.compatibility_key not in any_prefill], "a lone instance"
        return
    # Only listed, not excluded instances, in their own role.
    assert found.decode in decodes
    if found.prefill is not None:
        listed = pools.prefill if found.link is None else pools.remote[found.link]
        assert found.prefill in [each for each in listed if each.address not in exclude]
        # KV cache never crosses between keys.
        assert found.prefill.compatibility_key == found.decode.compatibility_key == found.key
    # Nobody crosses a line below its cut unless the pool cannot prefill at all.
    if found.link is not None and found.reason is Reason.LONG:
        threshold = rules.threshold(found.link)
        assert threshold is not None
        assert tokens > threshold
    # Several sequences never share a KV descriptor, and nobody else goes without but for want of an instance.
    alone = (Reason.MULTIPLE_SEQUENCES, Reason.DECODE_ALONE)
    assert (found.prefill is None) == (found.reason in alone)
    assert (found.reason is Reason.MULTIPLE_SEQUENCES) == (sequences > 1)
    if found.reason is Reason.DECODE_ALONE:
        assert found.key not in {each.compatibility_key for each in prefills}
