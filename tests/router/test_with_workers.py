"""The router and our worker together: a verified text proves that the KV cache took the way the router chose."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from e2e.client import Outcome, Target, send
from e2e.workload import Ask, text
from prfaas.routing.world import Endpoint
from tests.router.rig import LINK, Rig
from tests.worker.rig import MODEL, Client, config, serving

pytestmark = pytest.mark.envoy


def endpoint(client: Client, key: str | None = None) -> Endpoint:
    return Endpoint("127.0.0.1", client.worker.port, compatibility_key=key)


async def test_every_token_is_right_whatever_way_it_took(router: Rig) -> None:
    async with serving(config("kv_producer"), config("kv_producer"), config("kv_consumer"), config("kv_consumer")) as (
        here,
        there,
        *decoders,
    ):
        await router.use((endpoint(here),), tuple(map(endpoint, decoders)), (endpoint(there),))
        target = Target(router.envoy.url, MODEL, MODEL)
        asks = [
            Ask(at=0.0, prompt_tokens=tokens, output_tokens=12, prompt=text(f"ask {number}", tokens))
            for number, tokens in enumerate([10, 100, 101, 300] * 5)
        ]
        outcomes: list[Outcome] = await asyncio.gather(*(send(router.session, target, ask) for ask in asks))
        assert [outcome.error for outcome in outcomes] == [None] * len(asks)
        assert all(outcome.verified for outcome in outcomes)
        assert [outcome.remote for outcome in outcomes] == [ask.prompt_tokens > 100 for ask in asks]
        pulled = [await decoder.metric("vllm:nixl_bytes_transferred_count") for decoder in decoders]
        assert sum(pulled) == len(asks), "every prompt was prefilled elsewhere and pulled once"
        assert min(pulled) > 0
    await router.idle()
    assert router.samples("prfaas_router_prefill_seconds_count") == {("", "ok"): 10, (LINK, "ok"): 10}


async def test_two_cache_types_serve_side_by_side_and_would_fail_if_they_were_mixed(router: Rig) -> None:
    """Engines compare cache types when they first meet: that no request fails proves that no pair was mixed."""
    old, new = (replace(config("kv_producer"), kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    decode_old, decode_new = (replace(config("kv_consumer"), kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    async with serving(old, new, old, decode_old, decode_new) as (here, here_new, there, d_old, d_new):

        async def ask(count: int) -> list[Outcome]:
            target = Target(router.envoy.url, MODEL, MODEL)
            asks = [
                Ask(at=0.0, prompt_tokens=tokens, output_tokens=6, prompt=text(f"ask {number}", tokens))
                for number, tokens in enumerate([10, 300] * (count // 2))
            ]
            return await asyncio.gather(*(send(router.session, target, each) for each in asks))

        decodes = (endpoint(d_old, "old"), endpoint(d_new, "new"))
        await router.use((endpoint(here, "old"), endpoint(here_new, "new")), decodes, (endpoint(there, "old"),))
        outcomes = await ask(20)
        assert [outcome.error for outcome in outcomes if outcome.error] == []
        assert {outcome.decision.partition("; reason")[0] for outcome in outcomes} == {
            "local; key=old",
            "local; key=new",
            f"remote; link={LINK}; key=old",
        }
        # The same instances, with nothing that tells them apart.
        await router.use((endpoint(here),), (endpoint(d_new),))
        assert all(outcome.error for outcome in await ask(4))


async def test_chat_and_what_the_worker_refuses(router: Rig) -> None:
    async with serving(config("kv_producer"), config("kv_consumer")) as (prefill, decode):
        await router.use((endpoint(prefill),), (endpoint(decode),))
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 4}
        answer = await router.post(chat | {"min_tokens": 4}, path="/v1/chat/completions")
        assert answer.status == 200, answer
        assert answer.json["usage"]["completion_tokens"] == 4
        wrong = await router.post({"model": "no-such-model", "prompt": "hello"})
        assert wrong.status == 404
        assert wrong.error()["type"] == "NotFoundError"


@pytest.mark.parametrize("tokens", [10, 300])
async def test_a_key_that_engines_ask_for_goes_through_both_legs(router: Rig, tokens: int) -> None:
    """`engine.apiKeySecretRef`: the router has no key of its own and hands on what the client sent."""
    producer, consumer = (replace(each, api_keys=("key",)) for each in (config("kv_producer"), config("kv_consumer")))
    async with serving(producer, producer, consumer) as (here, there, decode):
        await router.use((endpoint(here),), (endpoint(decode),), (endpoint(there),))
        ask = {"model": MODEL, "prompt": text("ask", tokens), "max_tokens": 4}
        right = {"authorization": "Bearer key"}

        assert (await router.post(ask, headers=right)).status == 200
        assert await decode.metric("vllm:nixl_bytes_transferred_count") == 1
        assert (await router.get("/v1/models")).status == 401
        for wrong in ({}, {"authorization": "Bearer other"}):
            refused = await router.post(ask, headers=wrong)
            assert (refused.status, refused.json) == (401, {"error": "Unauthorized"})
        assert (await router.get("/health")).status == 200
    await router.idle()
