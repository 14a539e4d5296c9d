"""Every route of vLLM 0.33 is there, absent or refused as vLLM's conditions say; keys, prefixes, errors, browsers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.frontend import FrontEnd
from prfaas.worker.http import GUARDED, Api
from prfaas.worker.routes.table import Route, routes
from tests.facts import facts
from tests.worker import tables
from tests.worker.rig import MODEL, Client, config, serving

FACTS = facts("routes")
EVERYTHING = FrontEnd(
    tokenizer_info=True,
    scale_out=True,
    tokens_only=True,
    profiler=True,
    fault_tolerance=True,
    dev_mode=True,
    lora=True,
    lora_updates=True,
    store_responses=True,
)
OTHER_MODELS = (
    "model task transcription",
    "model task realtime",
    "pooling model",
    "model task classify",
    "model task embed",
    "pooling task token_embed",
    "model with scoring (cross-encoder, embed or late interaction)",
)
"""Conditions of models that do not generate: their routes are absent, as they are in vLLM with a generating model."""
NOT_EMULATED = {
    "POST /v1/systemone",
    "POST /v1/decisions",
    "POST /generative_scoring",
}
"""Answered with vLLM's 501: the model does not support it."""
ABSENT = {
    "POST /cohere/v2/chat": "its package is not there, so neither is the route",
    "POST /cohere/v2/chat/render": "its package is not there, so neither is the route",
    "GET /static/*": "files of the documentation for machines without a network",
}


async def status(client: Client, method: str, path: str, **headers: str) -> tuple[int, Any]:
    """Status and body, JSON where it is."""
    shown = path.replace("{response_id}", "resp_x")
    data = b"{}" if method == "POST" else None
    given = {"Content-Type": "application/json"} | headers
    async with client.session.request(method, client.url + shown, headers=given, data=data) as response:
        text = await response.text()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text


def is_absent(answered: tuple[int, Any]) -> bool:
    """Whether nothing has that path."""
    return answered == (404, {"detail": "Not Found"})


def test_the_table_is_the_facts() -> None:
    assert tables.ROUTES.read_text() == tables.rendered(tables.routes())
    assert len(list(routes())) == FACTS["counts"]["routes"]


def test_every_route_is_answered_or_listed() -> None:
    answered = set(_handlers())
    for route in routes():
        if route.condition not in OTHER_MODELS and route.key not in ABSENT:
            assert (route.key in answered) is (route.key not in NOT_EMULATED), route.key
    assert answered <= {route.key for route in routes()}


def _handlers() -> dict[str, Any]:
    from prfaas.worker.serve import Worker

    return dict(Api(Worker(replace(config(), front=EVERYTHING)).engine).handlers())


async def test_a_server_with_everything_has_every_route() -> None:
    async with serving(replace(config(), front=EVERYTHING)) as (client,):
        for route in routes():
            if route.method == "WEBSOCKET" or route.key in ABSENT:
                continue
            answered = await status(client, route.method, route.path)
            if route.condition in OTHER_MODELS:
                assert is_absent(answered), route.key
            elif route.key in NOT_EMULATED:
                assert (answered[0], answered[1]["error"]["type"]) == (501, "NotImplementedError")
            else:
                assert not is_absent(answered), route.key
                assert answered[0] < 500 or "update" in route.path, (route.key, answered)


async def test_a_server_without_flags_has_only_what_is_always_there() -> None:
    async with serving(config()) as (client,):
        for route in routes():
            if route.method == "WEBSOCKET":
                continue
            answered = await status(client, route.method, route.path)
            there = route.condition in ("always", "model task generate", "unless --disable-fastapi-docs")
            if route.scale_out:
                assert (answered[0], answered[1]["error"]["type"]) == (403, "PermissionDeniedError")
            else:
                assert is_absent(answered) is not there, route.key
        assert sum(route.condition == "always" for route in routes()) == FACTS["counts"]["always"]


@pytest.mark.fact("README 17")
async def test_scale_out_routes_refuse_and_embeddings_are_absent() -> None:
    async with serving(config()) as (client,):
        refused = await status(client, "POST", "/inference/v1/generate")
        assert refused[0] == 403
        assert refused[1]["error"]["type"] == "PermissionDeniedError"
        assert is_absent(await status(client, "POST", "/v1/embeddings"))


@pytest.mark.parametrize("path", FACTS["absent_paths"])
async def test_paths_that_vllm_does_not_have(path: str) -> None:
    async with serving(replace(config(), front=EVERYTHING)) as (client,):
        assert is_absent(await status(client, "GET", path.replace("{id}", MODEL)))


@pytest.mark.fact("README 15")
async def test_the_shapes_of_errors_vary_with_who_raises_them() -> None:
    limited = replace(config(), api_keys=("key",), max_queued_requests=0, front=replace(EVERYTHING, scale_out=False))
    key = {"Authorization": "Bearer key"}
    async with serving(limited) as (client,):
        assert await status(client, "GET", "/v1/models") == (401, {"error": "Unauthorized"})
        assert await status(client, "GET", "/nowhere") == (404, {"detail": "Not Found"})
        assert await status(client, "DELETE", "/health") == (405, {"detail": "Method Not Allowed"})
        assert await status(client, "HEAD", "/health") == (405, "")
        shapes: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {
            ("BadRequestError", 400): ("/v1/completions", {"prompt": ""}),
            ("Bad Request", 400): ("/v1/completions", {"prompt": 5}),
            ("NotFoundError", 404): ("/v1/completions", {"prompt": "x", "model": "no"}),
            ("Service Unavailable", 503): ("/v1/completions", {"prompt": "x"}),
            ("NotImplementedError", 501): ("/generative_scoring", {}),
            ("PermissionDeniedError", 403): ("/inference/v1/generate", {}),
        }
        for (kind, code), (path, asked) in shapes.items():
            got, body = await client.post(path, asked, **key)
            assert (got, body["error"]["type"], body["error"]["code"]) == (code, kind, code)
        await client.session.post(f"{client.url}/pause")
        got, body = await client.post("/v1/completions", {"prompt": "x"}, **key)
        assert (got, body["error"]["type"]) == (503, "ServiceUnavailableError")
        await client.session.post(f"{client.url}/start_profile")
        got, body = await client.post("/start_profile", {})
        assert (got, body["error"]["type"]) == (409, "Conflict")


GUARDED_PATHS = [route for route in routes() if route.method in ("GET", "POST")]


async def test_keys_guard_the_prefixes_that_vllm_guards() -> None:
    guarded = {route["method"] + " " + route["path"]: route["needs_api_key"] for route in FACTS["routes"]}
    assert tuple(FACTS["auth"]["guarded_prefixes"]) == GUARDED
    async with serving(replace(config(), api_keys=("key",), front=EVERYTHING)) as (client,):
        for route in GUARDED_PATHS:
            refused = await status(client, route.method, route.path) == (401, {"error": "Unauthorized"})
            assert refused is guarded[route.key], route.key
        assert (await status(client, "POST", "/invocations"))[0] != 401, "the same answers, and open"
        assert (await status(client, "OPTIONS", "/v1/models"))[0] == 405, "a preflight has no key"


async def test_a_prefix_may_be_left_out_or_be_there() -> None:
    prefixed = replace(config(), api_keys=("key",), front=FrontEnd(root_path="/east"))
    async with serving(prefixed) as (client,):
        for path in ("/v1/models", "/east/v1/models"):
            assert (await status(client, "GET", path))[0] == 401
            assert (await status(client, "GET", path, Authorization="Bearer key"))[0] == 200
        assert (await status(client, "GET", "/east/health"))[0] == 200


async def test_the_documentation_lists_what_there_is() -> None:
    async with serving(config(), replace(config(), front=FrontEnd(docs=False))) as (open_, closed):
        _, document = await status(open_, "GET", "/openapi.json")
        assert "/v1/completions" in document["paths"]
        assert "/sleep" not in document["paths"]
        for path in ("/docs", "/redoc"):
            assert "openapi.json" in (await status(open_, "GET", path))[1]
            assert is_absent(await status(closed, "GET", path))


async def test_browsers_are_answered_where_their_origin_is_allowed() -> None:
    asks = {"Origin": "https://a", "Access-Control-Request-Method": "POST"}
    for front, origin in (
        (FrontEnd(origins=("https://a",)), "https://a"),
        (FrontEnd(origins=("*",)), "*"),
        (FrontEnd(origins=("*",), allow_credentials=True), "https://a"),
    ):
        async with serving(replace(config(), front=front, api_keys=("key",))) as (client,):
            async with client.session.options(f"{client.url}/v1/completions", headers=asks) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == origin
            async with client.session.get(f"{client.url}/health", headers={"Origin": "https://a"}) as response:
                assert response.headers["Access-Control-Allow-Origin"] == origin
                credentials = response.headers.get("Access-Control-Allow-Credentials")
                assert credentials == ("true" if front.allow_credentials else None)
    async with serving(replace(config(), front=FrontEnd(origins=("https://b",))), config()) as (other, none):
        async with other.session.options(f"{other.url}/v1/completions", headers=asks) as response:
            assert response.status == 400
        async with none.session.get(f"{none.url}/health", headers={"Origin": "https://a"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_requests_are_counted_by_route_and_status() -> None:
    async with serving(config()) as (client,):
        await client.complete("x", 1)
        await client.complete("", 1)
        labels = {"handler": "/v1/completions", "method": "POST"}
        assert await client.metric("http_requests_total", **labels, status="2xx") == 1
        assert await client.metric("http_requests_total", **labels, status="4xx") == 1


async def test_invocations_take_what_the_body_is() -> None:
    async with serving(config()) as (client,):
        _, plain = await client.post("/invocations", {"prompt": "x", "max_tokens": 1})
        _, chat = await client.post("/invocations", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        got, neither = await client.post("/invocations", {"input": "x"})
        async with client.session.post(
            f"{client.url}/invocations", data=b"{", headers={"Content-Type": "application/json"}
        ) as response:
            broken = await response.json()
    assert (plain["object"], chat["object"]) == ("text_completion", "chat.completion")
    assert (got, neither["error"]["type"]) == (415, "Unsupported Media Type")
    assert (broken["error"]["type"], broken["error"]["code"]) == ("Bad Request", 400)


async def test_conversations_may_come_together() -> None:
    talks = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    path = "/v1/chat/completions/batch"
    async with serving(config()) as (client,):
        _, body = await client.post(path, {"messages": talks, "max_tokens": 3})
        single = [(await client.post("/v1/chat/completions", {"messages": talk, "max_tokens": 3}))[1] for talk in talks]
        refused = [
            await client.post(path, {"messages": talks, "n": 2}),
            await client.post(path, {"messages": talks[0]}),
            await client.post(path, {"messages": []}),
        ]
    assert [c["message"] for c in body["choices"]] == [each["choices"][0]["message"] for each in single]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [got for got, _ in refused] == [400, 400, 400]


def test_a_condition_that_is_not_known_is_false() -> None:
    assert not Route("GET", "/x", "the moon is full").exists(EVERYTHING)


async def test_a_dead_engine_shows_in_its_health_and_fails_every_request() -> None:
    async with serving(config()) as (client,):
        client.worker.engine.die("a test")
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            assert await status(client, method, path) == (503, "")
        got, body = await client.complete("x", 1)
        assert (got, body["error"]["type"]) == (500, "InternalServerError")
        assert (await status(client, "GET", "/version"))[0] == 200
