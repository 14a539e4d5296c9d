"""A leg fails, through the real Envoy: another instance is tried, once, and the client never gets half of an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from e2e.local_router import EnvoyProcess, free_port
from prfaas.router.prefill import LegTimes
from prfaas.routing.world import Endpoint
from tests.router.rig import (
    LINK,
    Call,
    Engine,
    Rig,
    engine,
    good,
    reset,
    rig,
    silent,
    status,
    until,
)

pytestmark = pytest.mark.envoy


def nobody() -> Endpoint:
    """An address that refuses connections."""
    return Endpoint("127.0.0.1", free_port(), "nobody")


# The prefill leg fails


@pytest.mark.parametrize("fault", [status(500), status(503), reset, status(200, {"choices": []})])
async def test_another_prefill_instance_is_tried_once(router: Rig, fault: Any) -> None:
    async with engine("bad", fault) as bad, engine("p") as p, engine("d") as d:
        await router.use((bad.endpoint, p.endpoint), (d.endpoint,))
        # Both are idle: which is asked first is a matter of the request's key, so ask until the bad one was.
        while not bad.calls:
            answer = await router.post(router.short)
            assert answer.status == 200
        assert d.calls[-1].kv["remote_engine_id"] == "p"
        assert len(p.calls) == len(d.calls)
        assert len(bad.calls) == 1


@pytest.mark.parametrize(
    ("fault", "code"), [(status(500), 502), (status(503), 503), (reset, 502), (status(200, {"choices": []}), 502)]
)
async def test_when_both_fail_the_client_gets_a_proper_error(router: Rig, fault: Any, code: int) -> None:
    async with engine("a", fault) as a, engine("b", fault) as b, engine("d") as d:
        await router.use((a.endpoint, b.endpoint), (d.endpoint,))
        answer = await router.post(router.short)
        assert answer.status == code
        assert "2 instances failed" in answer.error()["message"]
        assert answer.decision == "refused; reason=PrefillFailed"
        assert [len(a.calls), len(b.calls), len(d.calls)] == [1, 1, 0]
        assert "127.0.0.1" not in answer.error()["message"]


async def test_prefill_without_a_descriptor_is_never_decoded_silently(router: Rig) -> None:
    async with engine("p", status(200, {"choices": [], "kv_transfer_params": None})) as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        assert (await router.post(router.short)).status == 502
        assert not d.calls
        assert router.samples("prfaas_router_prefill_seconds_count") == {("", "NoKV"): 1}


async def test_what_prefill_says_about_the_clients_request_reaches_the_client_unchanged(router: Rig) -> None:
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": "input_tokens", "code": 400}}
    async with engine("a", status(400, error)) as a, engine("b", status(400, error)) as b, engine("d") as d:
        await router.use((a.endpoint, b.endpoint), (d.endpoint,))
        answer = await router.post(router.short)
        assert answer.status == 400
        assert answer.json == error
        assert len(a.calls) + len(b.calls) == 1
        assert not d.calls
        assert not router.process.ledger.load().skipped, "a client's mistake must not take an instance out"


async def test_a_remote_instance_that_refuses_gives_way_to_the_local_pool_and_is_left_alone(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        dead = nobody()
        await router.use((p.endpoint,), (d.endpoint,), (dead,))
        answer = await router.post(router.long)
        assert (answer.status, answer.decision) == (200, "local; reason=RemoteUnavailable")
        assert dead.address in router.process.ledger.load().skipped
        assert (await router.post(router.long)).decision == "local; reason=RemoteUnavailable"
        legs = router.samples("prfaas_router_prefill_seconds_count")
        assert legs == {(LINK, "Refused"): 1, ("", "ok"): 2}, "the second request did not try the dead one"


async def test_a_leg_that_takes_too_long_is_given_up(running_envoy: EnvoyProcess) -> None:
    async with (
        rig(running_envoy, leg=LegTimes(connect=1.0, total=0.2)) as router,
        engine("p", silent) as p,
        engine("d") as d,
    ):
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(router.short)
        assert answer.status == 504
        assert answer.error()["type"] == "GatewayTimeoutError"
        await until("prefill sees the leg end", p.gone.is_set)


async def test_a_slow_prefill_is_waited_for_beyond_the_pickers_own_deadline(router: Rig) -> None:
    async def slow(engine: Engine, request: Any, call: Call) -> Any:
        await asyncio.sleep(1.3)  # Envoy's message_timeout is 1 s here
        return await good(engine, request, call)

    async with engine("p", slow) as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        assert (await router.post(router.short)).status == 200


async def test_the_leg_is_cancelled_when_the_client_leaves(router: Rig) -> None:
    async with engine("p", silent) as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        post = asyncio.create_task(router.post(router.short))
        await until("the leg has begun", lambda: p.calls)
        post.cancel()
        await until("prefill sees it end", p.gone.is_set)
        await router.idle()
        assert not d.calls
        await until("the end is counted", lambda: router.samples("prfaas_router_requests_total"))
        # Labels in order: code, decision, link, reason.
        assert router.samples("prfaas_router_requests_total") == {("0", "local", "", "Short"): 1}


# The decode leg fails


@pytest.mark.parametrize("fault", [status(503), reset])
async def test_decode_that_fails_before_the_first_byte_gets_a_new_decision_and_a_new_leg(
    router: Rig, fault: Any
) -> None:
    async with engine("p") as p, engine("q") as q, engine("bad", fault) as bad, engine("d") as d:
        await router.use((p.endpoint, q.endpoint), (bad.endpoint, d.endpoint))
        while not bad.calls:
            legs, decoded = len(p.calls) + len(q.calls), len(d.calls)
            answer = await router.post(router.short)
            assert answer.status == 200
            assert answer.json["choices"][0]["text"] == "answer of d"
        assert len(p.calls) + len(q.calls) == legs + 2
        assert len(d.calls) == decoded + 1
        assert bad.calls[0].kv != d.calls[-1].kv, "a descriptor is for one decode attempt"
        assert bad.calls[0].kv["remote_engine_id"] == d.calls[-1].kv["remote_engine_id"], "its cache holds the prompt"
        assert bad.calls[0].headers["x-request-id"] == d.calls[-1].headers["x-request-id"]
        assert router.samples("prfaas_router_retries_total") == {(): 1}


async def test_decode_that_refuses_connections_is_replaced_and_left_alone(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        dead = nobody()
        await router.use((p.endpoint,), (dead, d.endpoint))

        async def seen() -> bool:
            assert (await router.post(router.short)).status == 200
            return dead.address in router.process.ledger.load().skipped

        await until("the dead instance was met", seen)
        before = len(p.calls)
        assert (await router.post(router.short)).status == 200
        assert len(p.calls) == before + 1, "no leg was wasted on it"


async def test_when_no_other_decode_instance_is_left_the_error_is_proper(router: Rig) -> None:
    async with engine("p") as p, engine("d", status(503)) as d:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(router.short)
        assert answer.status == 503
        assert "No decode instance" in answer.error()["message"]
        assert [len(p.calls), len(d.calls)] == [1, 1]


@pytest.mark.parametrize("code", [400, 500])
async def test_what_decode_answers_is_passed_on_and_not_repeated(router: Rig, code: int) -> None:
    error = {"error": {"message": "as told", "type": "x", "param": None, "code": code}}
    async with engine("p") as p, engine("a", status(code, error)) as a, engine("b", status(code, error)) as b:
        await router.use((p.endpoint,), (a.endpoint, b.endpoint))
        answer = await router.post(router.short)
        assert answer.status == code
        assert answer.json == error
        assert len(a.calls) + len(b.calls) == 1


async def test_an_answer_cut_after_its_first_byte_is_not_repeated(router: Rig) -> None:
    async def cut(engine: Engine, request: Any, call: Call) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 0\n\n")
        await router_saw.wait()
        request.transport.abort()
        return response

    router_saw = asyncio.Event()
    async with engine("p") as p, engine("a", cut) as a, engine("b", cut) as b:
        await router.use((p.endpoint,), (a.endpoint, b.endpoint))
        body = json.dumps(router.short | {"stream": True})
        async with router.session.post(router.envoy.url + "/v1/completions", data=body) as response:
            assert await response.content.readuntil(b"\n\n") == b"data: 0\n\n"
            router_saw.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        assert len(a.calls) + len(b.calls) == 1
    await router.idle()


async def test_decode_is_aborted_when_the_client_leaves(router: Rig) -> None:
    async with engine("p") as p, engine("d", silent) as d:
        await router.use((p.endpoint,), (d.endpoint,))
        post = asyncio.create_task(router.post(router.short))
        await until("decode has begun", lambda: d.calls)
        assert router.process.ledger.in_flight[d.endpoint.address] == 1
        post.cancel()
        await until("decode sees it end", d.gone.is_set)
        await router.idle()
