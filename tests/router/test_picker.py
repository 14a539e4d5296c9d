"""The picker without Envoy and without sockets: what it does with each outcome of a prefill leg."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from prfaas.router.answers import Forward, Reply
from prfaas.router.ledger import Ledger
from prfaas.router.metrics import Metrics
from prfaas.router.picker import Picker, Request
from prfaas.router.policies import PolicyStore
from prfaas.router.prefill import ClientFault, Failed, LegTimes, Outcome, PrefillClient, Prefilled, Trouble
from prfaas.routing.world import Endpoint, Pools
from tests.router.rig import LINK, policy, until

P, D1, D2, E1, E2 = (Endpoint(f"10.0.0.{number}", 8000) for number in range(1, 6))
POOLS = Pools((P,), (D1, D2), {LINK: (E1, E2)})
SHORT, LONG = b'{"prompt": "x"}', json.dumps({"prompt": "y" * 4000}).encode()


class Legs(PrefillClient):
    """Answers by instance; the default is a descriptor."""

    def __init__(self) -> None:
        super().__init__(LegTimes())
        self.outcomes: dict[Endpoint, Outcome] = {}
        self.asked: list[Endpoint] = []
        self.gate: asyncio.Event | None = None

    async def run(self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str]) -> Outcome:
        self.asked.append(endpoint)
        if self.gate:
            await self.gate.wait()
        return self.outcomes.get(endpoint, Prefilled({"from": endpoint.address, "number": len(self.asked)}))


@dataclass
class World:
    pools: Pools = POOLS
    legs: Legs = field(default_factory=Legs)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.ledger = Ledger(now=lambda: self.now)
        self.metrics = Metrics(self.ledger, lambda: self.pools)
        store = PolicyStore(current=policy())
        self.picker = Picker(store, lambda: self.pools, lambda: True, self.ledger, self.legs, self.metrics)

    async def ask(self, raw: bytes = SHORT, stream: str = "s", attempt: int = 1) -> Any:
        answer = await self.picker.complete(Request(stream, attempt, "/v1/completions", {}), raw)
        if isinstance(answer, Forward) and answer.body is not None:
            return answer, json.loads(answer.body).get("kv_transfer_params")
        return answer, None


@pytest.fixture
def world() -> World:
    return World()


async def test_a_line_that_does_not_answer_is_left_alone_as_a_whole(world: World) -> None:
    for endpoint in (E1, E2):
        world.legs.outcomes[endpoint] = Failed(Trouble.UNREACHABLE, "timed out")
    answer, kv = await world.ask(LONG)
    assert (answer.decision, kv["from"]) == ("local; reason=RemoteUnavailable", P.address)
    assert len(world.legs.asked) == 2, "the second instance behind the dead line was not tried"
    assert world.ledger.load().skipped == {E1.address, E2.address}
    await world.ask(LONG, "t")
    assert world.legs.asked[2:] == [P]


async def test_a_line_that_answers_again_is_used_again(world: World) -> None:
    world.legs.outcomes = dict.fromkeys((E1, E2), Failed(Trouble.UNREACHABLE, "timed out"))
    await world.ask(LONG)
    world.legs.outcomes = {}
    world.now += 1.0
    answer, _ = await world.ask(LONG, "t")
    assert answer.decision == f"remote; link={LINK}; reason=Long"
    assert world.legs.asked[-1].address not in world.ledger.load().skipped


@pytest.mark.parametrize("trouble", [Trouble.REFUSED, Trouble.BROKEN])
async def test_one_dead_instance_does_not_take_out_its_line(world: World, trouble: Trouble) -> None:
    world.pools = Pools((P,), (D1,), {LINK: (E1,)})
    world.legs.outcomes[E1] = Failed(trouble, "")
    await world.ask(LONG)
    world.pools = POOLS
    answer, kv = await world.ask(LONG, "t")
    assert (answer.decision, kv["from"]) == (f"remote; link={LINK}; reason=Long", E2.address)


@pytest.mark.parametrize("trouble", [Trouble.OVERLOADED, Trouble.SERVER_ERROR, Trouble.TIMEOUT, Trouble.NO_KV])
async def test_an_instance_that_answers_is_not_left_alone(world: World, trouble: Trouble) -> None:
    world.legs.outcomes[E1] = world.legs.outcomes[E2] = Failed(trouble, "")
    await world.ask(LONG)
    assert not world.ledger.load().skipped


@pytest.mark.parametrize(
    ("trouble", "status"),
    [
        (Trouble.UNREACHABLE, 503),
        (Trouble.REFUSED, 503),
        (Trouble.OVERLOADED, 503),
        (Trouble.BROKEN, 502),
        (Trouble.SERVER_ERROR, 502),
        (Trouble.NO_KV, 502),
        (Trouble.TIMEOUT, 504),
    ],
)
async def test_status_of_a_prompt_that_nobody_could_prefill(world: World, trouble: Trouble, status: int) -> None:
    world.pools = Pools((P,), (D1,))
    world.legs.outcomes[P] = Failed(trouble, "")
    answer, _ = await world.ask()
    assert isinstance(answer, Reply)
    assert answer.status == json.loads(answer.body)["error"]["code"] == status
    assert world.legs.asked == [P], "the same instance is not asked twice"
    assert not world.ledger.in_flight


async def test_the_clients_fault_is_final(world: World) -> None:
    world.legs.outcomes[P] = ClientFault(400, b"{}", "application/json")
    assert await world.ask() == (Reply(400, b"{}", "PrefillRefused", "application/json"), None)
    assert world.legs.asked == [P]
    assert not world.ledger.in_flight


async def test_a_second_attempt_is_a_new_decision_with_a_new_descriptor(world: World) -> None:
    first, kv = await world.ask(LONG)
    world.ledger.in_flight[kv["from"]] = 9  # the other is idle now, but has not seen the prompt
    second, again = await world.ask(LONG, attempt=2)
    assert {first.destination, second.destination} == {D1.address, D2.address}
    assert kv["number"] != again["number"]
    assert kv["from"] == again["from"], "where the prompt is cached"
    third, _ = await world.ask(LONG, attempt=3)
    assert third.status == 503, "both decode instances failed this request"


async def test_two_requests_share_no_past(world: World) -> None:
    world.pools = Pools((P,), (D1,))
    await world.ask(stream="a")
    answer, _ = await world.ask(stream="b", attempt=2)
    assert answer.destination == D1.address


async def test_a_final_503_is_repeated_and_not_thought_over_again(world: World) -> None:
    world.pools = Pools((P,), (D1,))
    world.legs.outcomes[P] = Failed(Trouble.REFUSED, "")
    first, _ = await world.ask()
    second, _ = await world.ask(attempt=2)
    assert second == first
    assert world.legs.asked == [P]


async def test_slots_during_and_after_a_leg(world: World) -> None:
    world.pools = Pools((P,), (D1,))
    world.legs.gate = asyncio.Event()
    asking = asyncio.create_task(world.ask())
    await until("the leg has begun", lambda: world.legs.asked)
    assert dict(world.ledger.in_flight) == {P.address: 1, D1.address: 1}
    world.legs.gate.set()
    await asking
    assert dict(world.ledger.in_flight) == {D1.address: 1}, "prefill is done, decode begins"
    world.ledger.end(("s", 1))
    assert not world.ledger.in_flight


async def test_a_cancelled_leg_leaves_nothing(world: World) -> None:
    world.legs.gate = asyncio.Event()
    asking = asyncio.create_task(world.ask())
    await until("the leg has begun", lambda: world.legs.asked)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    world.ledger.end(("s", 1))  # Envoy's log entry, which always comes
    assert not world.ledger.in_flight
    [sample] = [
        sample
        for family in world.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "prfaas_router_prefill_seconds_count"
    ]
    assert sample.labels == {"link": "", "result": "cancelled"}
