"""Long prompts cross the line, short ones stay, and every answer proves where its KV cache came from."""

from __future__ import annotations

import asyncio
import json

import pytest

from e2e.client import replay
from e2e.stack import LineMeter, Stack
from e2e.workload import Ask, text

THRESHOLD = 19_400


def asks(lengths: list[int]) -> list[Ask]:
    return [Ask(0.05 * number, tokens, 12, text(f"scenario {number}", tokens)) for number, tokens in enumerate(lengths)]


def test_long_prompts_are_prefilled_over_the_line_and_all_answers_are_verified(stack: Stack) -> None:
    meter = LineMeter(stack)
    outcomes = asyncio.run(replay(stack.target(), asks([THRESHOLD, THRESHOLD + 1, 300, 60_000, 2_000, 131_072] * 3)))
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert all(outcome.verified for outcome in outcomes)
    assert [outcome.remote for outcome in outcomes] == [
        ask.prompt_tokens > THRESHOLD for ask in asks([THRESHOLD, THRESHOLD + 1, 300, 60_000, 2_000, 131_072] * 3)
    ]
    assert meter.use().apart_percent < 3


def test_short_prompts_send_no_kv_over_the_line(stack: Stack) -> None:
    meter = LineMeter(stack)
    outcomes = asyncio.run(replay(stack.target(), asks([100, 5_000, THRESHOLD])))
    assert all(outcome.verified and not outcome.remote for outcome in outcomes)
    assert meter.use().kv == 0


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ("{", 400, "JSON"),
        ('{"prompt": "x", "max_tokens": 2, "model": "other"}', 404, "other"),
        (json.dumps({"model": "kimi-linear", "prompt": "x" * 9_000_000}), 413, ""),
    ],
)
def test_a_bad_request_gets_an_openai_error(stack: Stack, body: str, status: int, says: str) -> None:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        f"{stack.target().url}/v1/completions", body.encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as answer:
        error = json.loads(answer.read())["error"]
        assert answer.status == status
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]
