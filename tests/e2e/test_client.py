"""The client believes nobody: only the whole right text, from a stream that ended well, counts as verified."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from e2e.client import Outcome, Target, replay, send
from e2e.workload import Ask, text
from prfaas.worker.oracle import expected_text

LOADED = "org/model"
ASK = Ask(0.0, 50, 8, text("client", 50))
RIGHT = expected_text(ASK.prompt, ASK.output_tokens, model=LOADED)
PIECES = [RIGHT[index : index + 4] for index in range(0, len(RIGHT), 4)]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(piece: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": piece}]}).encode() + b"\n\n"


def streaming(*chunks: bytes, cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-prfaas-decision": "remote; link=east; reason=Long"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    return handle


async def ask(handler: Handler) -> Outcome:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await send(session, Target(str(server.make_url("")).rstrip("/"), "model", LOADED), ASK, timeout=5)


async def test_the_right_text_is_verified() -> None:
    outcome = await ask(streaming(*map(event, PIECES), b"data: [DONE]\n\n"))
    assert (outcome.verified, outcome.error, outcome.status, outcome.remote) == (True, None, 200, True)
    assert outcome.ttft is not None
    assert 0 <= outcome.ttft <= outcome.duration


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        (PIECES[:-1], "a token short"),
        ([*PIECES, " foo"], "a token too many"),
        ([*PIECES[:-1], " foo"], "another token"),
        ([PIECES[1], PIECES[0], *PIECES[2:]], "another order"),
        ([], "nothing"),
    ],
)
async def test_any_other_text_is_an_error(pieces: list[str], why: str) -> None:
    outcome = await ask(streaming(*map(event, pieces), b"data: [DONE]\n\n"))
    assert not outcome.verified, why
    assert outcome.error is not None
    assert outcome.error.startswith("wrong text"), why


async def test_a_cut_stream_is_an_error_even_after_the_last_token() -> None:
    outcome = await ask(streaming(*map(event, PIECES), cut=True))
    assert (outcome.verified, outcome.error is not None) == (False, True)


async def test_a_stream_that_never_says_it_is_done_is_an_error() -> None:
    outcome = await ask(streaming(*map(event, PIECES)))
    assert (outcome.verified, outcome.error) == (False, "the stream ended without [DONE]")


async def test_an_error_event_and_an_error_status_are_errors() -> None:
    inside = await ask(streaming(event(PIECES[0]), b'data: {"error": {"message": "KV lost"}}\n\n', b"data: [DONE]\n\n"))
    assert (inside.verified, "KV lost" in str(inside.error)) == (False, True)

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no prefill instance"}}, status=503)

    outside = await ask(refuse)
    assert (outside.verified, outside.status, "no prefill instance" in str(outside.error)) == (False, 503, True)


async def test_a_server_that_is_not_there_is_an_outcome_not_an_exception() -> None:
    outcomes = await replay(Target("http://127.0.0.1:1", "model", LOADED), [ASK, ASK], timeout=5)
    assert [(outcome.verified, outcome.status) for outcome in outcomes] == [(False, 0), (False, 0)]
    assert all(outcome.error and "Cannot connect" in outcome.error for outcome in outcomes)
