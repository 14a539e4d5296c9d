"""Requests through the real Envoy and the picker: where they go, and what is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.api.policy import Fallback
from prfaas.routing.world import Endpoint
from tests.router.rig import (
    LINK,
    MAX_BODY,
    Engine,
    Gate,
    Rig,
    engine,
    policy,
    until,
)

pytestmark = pytest.mark.envoy


async def test_a_short_prompt_is_prefilled_here(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d, engine("e") as e:
        await router.use((p.endpoint,), (d.endpoint,), (e.endpoint,))
        answer = await router.post(router.short | {"max_tokens": 7})
        assert answer.status == 200
        assert answer.json["choices"][0]["text"] == "answer of d"
        assert answer.decision == "local; reason=Short"
        assert [len(x.calls) for x in (p, d, e)] == [1, 1, 0]
        assert p.calls[0].body["max_tokens"] == 1
        assert d.calls[0].body["max_tokens"] == 7
        assert d.calls[0].kv["remote_engine_id"] == "p"


async def test_a_long_prompt_is_prefilled_over_the_link(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d, engine("e") as e:
        await router.use((p.endpoint,), (d.endpoint,), (e.endpoint,))
        answer = await router.post(router.long)
        assert answer.status == 200
        assert answer.decision == f"remote; link={LINK}; reason=Long"
        assert [len(x.calls) for x in (p, d, e)] == [0, 1, 1]
        assert d.calls[0].kv["remote_engine_id"] == "e"


async def test_chat_takes_the_same_way(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post({"messages": [{"role": "user", "content": "hi"}]}, path="/v1/chat/completions")
        assert answer.status == 200
        assert [p.calls[0].path, d.calls[0].path] == ["/v1/chat/completions"] * 2


async def test_both_legs_carry_the_request_id_and_the_clients_key(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(router.short, headers={"x-request-id": "mine", "authorization": "Bearer key"})
        assert answer.headers["x-request-id"] == "mine"
        for call in (p.calls[0], d.calls[0]):
            assert call.headers["x-request-id"] == "mine"
            assert call.headers["authorization"] == "Bearer key"
        await router.post(router.short)
        assert p.calls[1].headers["x-request-id"] == d.calls[1].headers["x-request-id"] != "mine"


async def test_the_answer_streams_through_chunk_by_chunk(router: Rig) -> None:
    gate = Gate()
    async with engine("p") as p, engine("d", gate) as d:
        await router.use((p.endpoint,), (d.endpoint,))
        body = json.dumps(router.short | {"stream": True})
        async with router.session.post(router.envoy.url + "/v1/completions", data=body) as response:
            assert response.status == 200
            for number in range(3):
                gate.step()  # the engine writes the next chunk only now that the one before has arrived
                assert await response.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
            assert await response.content.read() == b""
    await router.idle()


async def test_a_whole_stream_is_passed_on_unchanged(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(router.short | {"stream": True, "stream_options": {"include_usage": True}})
        assert answer.headers["content-type"] == "text/event-stream"
        events = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(4)]
        assert answer.raw == b"".join(events) + b"data: [DONE]\n\n"
        assert "stream_options" not in p.calls[0].body
        assert d.calls[0].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("extra", [{"n": 2}, {"prompt": ["a", "b"]}])
async def test_several_sequences_run_without_kv_transfer(router: Rig, extra: dict[str, Any]) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(router.short | extra | {"kv_transfer_params": {"remote_host": "evil"}})
        assert answer.status == 200
        assert answer.decision == "local; reason=MultipleSequences"
        assert not p.calls
        assert "kv_transfer_params" not in d.calls[0].body


async def test_a_body_of_eight_megabytes(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d, engine("e") as e:
        await router.use((p.endpoint,), (d.endpoint,), (e.endpoint,))
        prompt = "z" * (8 * 1024 * 1024)
        answer = await router.post({"prompt": prompt})
        assert answer.status == 200
        assert e.calls[0].body["prompt"] == d.calls[0].body["prompt"] == prompt
        assert d.calls[0].headers["content-length"] == str(len(d.calls[0].raw))


async def test_a_body_above_the_limit_is_refused_before_anyone_sees_it(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(b'{"prompt": "' + b"z" * MAX_BODY + b'"}')
        assert answer.status == 413
        assert answer.error()["type"] == "RequestTooLargeError"
        assert not p.calls
        assert not d.calls


@pytest.mark.parametrize("raw", [b"", b"not json", b"[]", b'{"prompt": "\xff"}'])
async def test_what_is_not_a_json_object_is_a_400(router: Rig, raw: bytes) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(raw)
        assert answer.status == 400
        assert answer.error()["type"] == "BadRequestError"
        assert not d.calls


async def test_other_paths_and_methods(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        models = await router.get("/v1/models")
        assert models.json["data"][0]["served_by"] == "d"
        assert (await router.get("/health")).status == 200
        missing = await router.post({}, path="/v1/responses")
        assert missing.status == 404
        assert missing.error()["type"] == "NotFoundError"
        wrong = await router.get("/v1/completions")
        assert wrong.status == 405
        assert wrong.error()["message"] == "Use POST /v1/completions"
        assert not p.calls
        assert len(d.calls) == 1


# Nobody to ask


async def test_without_a_policy_nothing_is_served(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        router.policies.current = None
        for answer in (await router.post(router.short), await router.get("/health")):
            assert answer.status == 503
            assert "no routing policy" in answer.error()["message"]
        assert not p.calls
        assert not d.calls


async def test_before_the_endpoints_are_known_nothing_is_served(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        router.source.synced = False
        assert (await router.post(router.short)).status == 503


async def test_without_instances_the_error_says_which_are_missing(router: Rig) -> None:
    async with engine("p") as p:
        await router.use((p.endpoint,), ())
        for answer in (await router.post(router.short), await router.get("/health"), await router.get("/v1/models")):
            assert answer.status == 503
            assert "No decode instance" in answer.error()["message"]
            assert answer.headers["retry-after"] == "1"
        assert not p.calls, "a prefill without anybody to decode it would be wasted"


async def test_where_nobody_prefills_the_decode_instance_does_it_without_a_descriptor(router: Rig) -> None:
    async with engine("d") as d:
        await router.use((), (d.endpoint,))
        for body in (router.short, router.long):
            answer = await router.post(body | {"kv_transfer_params": {"do_remote_prefill": True}})
            assert (answer.status, answer.decision) == (200, "local; reason=DecodeAlone")
        assert [call.kv for call in d.calls] == [None, None]


def of(key: str, *engines: Engine) -> tuple[Endpoint, ...]:
    """Endpoints of a group."""
    return tuple(replace(each.endpoint, compatibility_key=key) for each in engines)


async def test_two_groups_serve_side_by_side_and_no_descriptor_crosses_between_them(router: Rig) -> None:
    async with (
        engine("p-old") as p_old,
        engine("p-new") as p_new,
        engine("d-old") as d_old,
        engine("d-new") as d_new,
        engine("e-old") as e_old,
        engine("e-new") as e_new,
    ):
        decodes = (*of("old", d_old), *of("new", d_new))
        await router.use((*of("old", p_old), *of("new", p_new)), decodes, (*of("old", e_old), *of("new", e_new)))
        bodies = [router.short, router.long] * 20
        answers = await asyncio.gather(*(router.post(body) for body in bodies))
        assert {answer.status for answer in answers} == {200}
        for decode, prefills in ((d_old, {"p-old", "e-old"}), (d_new, {"p-new", "e-new"})):
            assert {call.kv["remote_engine_id"] for call in decode.calls} == prefills
        decisions = {str(answer.decision) for answer in answers}
        assert decisions == {
            f"{where}; key={key}; reason={reason}"
            for where, reason in (("local", "Short"), (f"remote; link={LINK}", "Long"))
            for key in ("old", "new")
        }
        # Between two steps of a rollout: the new group has no prefill instance here, the old one none there.
        await router.use(of("old", p_old), decodes, of("new", e_new))
        assert (await router.post(router.short)).decision == "local; key=old; reason=Short"
        assert (await router.post(router.long)).decision == f"remote; link={LINK}; key=new; reason=Long"
        await router.use((), decodes, of("new", e_new))
        assert (await router.post(router.short)).decision == f"remote; link={LINK}; key=new; reason=LocalUnavailable"
        await router.use((), decodes)
        assert str((await router.post(router.long)).decision).endswith("reason=DecodeAlone")
        # Labels in order: decode_key, link, prefill_key.
        pairs = router.samples("prfaas_router_pairs_total")
        assert {(decode, prefill) for decode, _, prefill in pairs if prefill} == {("old", "old"), ("new", "new")}
        assert sum(pairs.values()) == 44


async def test_a_long_prompt_without_a_remote_instance_follows_the_policy(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        assert (await router.post(router.long)).decision == "local; reason=RemoteUnavailable"
        router.policies.offer(policy(fallback=Fallback.REJECT, version=2))
        answer = await router.post(router.long)
        assert answer.status == 503
        assert "No remote prefill instance" in answer.error()["message"]
        assert (await router.post(router.short)).status == 200


# Load and endpoints


async def test_requests_spread_over_decode_instances_by_what_they_have_in_flight(router: Rig) -> None:
    gates = [Gate() for _ in range(3)]
    async with (
        engine("p") as p,
        engine("a", gates[0]) as a,
        engine("b", gates[1]) as b,
        engine("c", gates[2]) as c,
    ):
        await router.use((p.endpoint,), (a.endpoint, b.endpoint, c.endpoint))
        posts = []
        for _ in range(9):
            posts.append(asyncio.create_task(router.post(router.short)))
            await until("it is decoded", lambda: len(a.calls) + len(b.calls) + len(c.calls) == len(posts))
        assert [len(x.calls) for x in (a, b, c)] == [3, 3, 3]
        for gate in gates:
            gate.step(9)
        assert {answer.status for answer in await asyncio.gather(*posts)} == {200}
    await router.idle()


async def test_an_instance_leaves_when_its_slice_says_so_and_its_stream_runs_to_the_end(router: Rig) -> None:
    gate = Gate()
    async with engine("p") as p, engine("old", gate) as old, engine("new") as new:
        await router.use((p.endpoint,), (old.endpoint,))
        stream = asyncio.create_task(router.post(router.short))
        await until("it is decoded", lambda: old.calls)
        await router.use((p.endpoint,), (new.endpoint,))
        for _ in range(4):
            assert (await router.post(router.short)).json["choices"][0]["text"] == "answer of new"
        gate.step(3)
        answer = await stream
        assert answer.raw == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert len(old.calls) == 1


async def test_requests_are_counted_by_decision_link_reason_and_code(router: Rig) -> None:
    async with engine("p") as p, engine("d") as d, engine("e") as e:
        await router.use((p.endpoint,), (d.endpoint,), (e.endpoint,))
        for body in (router.short, router.long, router.long, {"n": 2, "prompt": "x"}, b"oops"):
            await router.post(body)
        await router.use((), (d.endpoint,), ())
        await router.post(router.short)
        await router.idle()
        # Labels in order: code, decision, link, reason.
        assert router.samples("prfaas_router_requests_total") == {
            ("200", "local", "", "Short"): 1,
            ("200", "remote", LINK, "Long"): 2,
            ("200", "local", "", "MultipleSequences"): 1,
            ("400", "none", "", "BadBody"): 1,
            ("200", "local", "", "DecodeAlone"): 1,
        }
        assert router.samples("prfaas_router_uncached_tokens_count") == {("local",): 3, ("remote",): 2}
