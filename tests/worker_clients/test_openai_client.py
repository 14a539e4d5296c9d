"""The OpenAI Python client, as programs use it: every answer verified, every error of the class that it should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.worker.oracle import chat_prompt, count_tokens, expected_chat, expected_text
from tests.worker_clients.conftest import Client, client_of
from tests.worker_clients.rig import MODEL, worker

pytestmark = pytest.mark.clients

PROMPT = "Tell me about the sea, and take your time."
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


def completion(client: Client, **arguments: Any) -> dict[str, Any]:
    return client.value("completions.create", **({"model": MODEL, "prompt": PROMPT, "max_tokens": 12} | arguments))


def chat(client: Client, **arguments: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12} | arguments
    return client.value("chat.completions.create", **asked)


def test_a_completion(client: Client) -> None:
    answer = completion(client)
    assert answer["class"] == "Completion"
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["choices"][0]["text"] == expected_text(PROMPT, 12, model=MODEL)
    assert answer["choices"][0]["finish_reason"] == "length"
    tokens = count_tokens(PROMPT)
    assert (
        answer["usage"].items()
        >= {
            "prompt_tokens": tokens,
            "completion_tokens": 12,
            "total_tokens": tokens + 12,
        }.items()
    )
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_streamed_completion(client: Client) -> None:
    chunks = client.values("completions.create", model=MODEL, prompt=PROMPT, max_tokens=12)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(PROMPT, 12, model=MODEL)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_chat(client: Client) -> None:
    answer = chat(client)
    assert answer["class"] == "ChatCompletion"
    assert answer["id"].startswith("chatcmpl-")
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", expected_chat(MESSAGES, 12, model=MODEL))
    assert answer["usage"]["prompt_tokens"] == count_tokens(chat_prompt(MESSAGES))


def test_a_chat_without_a_limit_stops_by_itself(client: Client) -> None:
    answer = chat(client, max_completion_tokens=None)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == expected_chat(MESSAGES, None, model=MODEL)


def test_a_streamed_chat_with_its_usage(client: Client) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12}
    *chunks, last = client.values("chat.completions.create", **asked, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks)
    assert text == expected_chat(MESSAGES, 12, model=MODEL)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12


def test_the_clients_own_accumulation_of_a_streamed_chat(client: Client) -> None:
    came = client.told("chat.completions.stream", model=MODEL, messages=MESSAGES)
    assert "raised" not in came, came
    kinds = {event["type"] for event in came["values"]}
    assert kinds == {"chunk", "content.delta", "content.done"}
    assert came["value"]["choices"][0]["message"]["content"] == expected_chat(MESSAGES, None, model=MODEL)


def test_several_answers_to_one_prompt(client: Client) -> None:
    answer = completion(client, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["choices"][0]["text"] == expected_text(PROMPT, 12, model=MODEL)
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == count_tokens(PROMPT)
    spoken = chat(client, n=2)
    assert [choice["index"] for choice in spoken["choices"]] == [0, 1]
    assert spoken["choices"][0]["message"]["content"] == expected_chat(MESSAGES, 12, model=MODEL)


def test_several_answers_in_one_stream(client: Client) -> None:
    chunks = client.values("chat.completions.create", model=MODEL, messages=MESSAGES, max_completion_tokens=12, n=2)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"]["content"] or ""
    assert texts[0] == expected_chat(MESSAGES, 12, model=MODEL)
    assert count_tokens(texts[1]) == 12
    whole = chat(client, n=2)
    assert texts[1] == whole["choices"][1]["message"]["content"]


def test_several_prompts_in_one_request(client: Client) -> None:
    answer = completion(client, prompt=[PROMPT, "Go on."])
    expected = [expected_text(prompt, 12, model=MODEL) for prompt in (PROMPT, "Go on.")]
    assert [choice["text"] for choice in answer["choices"]] == expected


def test_the_usage_tells_what_the_prefix_cache_did(client: Client) -> None:
    asked = [{"role": "user", "content": "Something that nobody said before. " * 9}]
    tokens = count_tokens(chat_prompt(asked))
    whole = tokens // 16 * 16
    assert tokens % 16, "the last block is not whole"

    def details() -> tuple[int, int]:
        told = chat(client, messages=asked)["usage"]["prompt_tokens_details"]
        return told["cached_tokens"], told["created_cache_tokens"]

    assert [details(), details()] == [(0, whole), (whole, 0)]
    answer = client.value("responses.create", model=MODEL, input=asked[0]["content"], max_output_tokens=4)
    told = answer["usage"]["input_tokens_details"]
    assert (told["cached_tokens"], told["cache_write_tokens"]) == (whole, 0)


def test_a_stop_string(client: Client) -> None:
    words = expected_text(PROMPT, 12, model=MODEL).split()
    answer = completion(client, stop=[f" {words[4]}"])
    assert answer["choices"][0]["text"] == "".join(f" {word}" for word in words[:4])
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities(client: Client) -> None:
    probabilities = completion(client, logprobs=2)["choices"][0]["logprobs"]
    assert "".join(probabilities["tokens"]) == expected_text(PROMPT, 12, model=MODEL)
    assert all(value <= 0 for value in probabilities["token_logprobs"])
    content = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == expected_chat(MESSAGES, 12, model=MODEL)
    assert all(len(token["top_logprobs"]) == 2 for token in content)


def test_the_models(client: Client) -> None:
    (model,) = client.value("models.list")["data"]
    assert (model["class"], model["id"], model["owned_by"]) == ("Model", MODEL, "vllm")
    assert model["max_model_len"] == 131_072


def test_vllm_has_no_route_for_one_model(client: Client) -> None:
    assert client.told("models.retrieve", model="m")["raised"][0] == "NotFoundError"


def test_a_response(client: Client) -> None:
    answer = client.value("responses.create", model=MODEL, input=PROMPT, max_output_tokens=12)
    assert (answer["class"], answer["object"]) == ("Response", "response")
    message = answer["output"][-1]
    assert (message["type"], message["role"]) == ("message", "assistant")
    asked = [{"role": "user", "content": PROMPT}]
    assert message["content"][0]["text"] == expected_chat(asked, 12, model=MODEL)
    assert answer["usage"]["input_tokens"] == count_tokens(chat_prompt(asked))
    assert answer["usage"]["output_tokens"] == 12


def test_a_streamed_response(client: Client) -> None:
    events = client.values("responses.create", model=MODEL, input=PROMPT, max_output_tokens=12)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == expected_chat([{"role": "user", "content": PROMPT}], 12, model=MODEL)


def test_the_clients_own_accumulation_of_a_response(client: Client) -> None:
    came = client.told("responses.stream", model=MODEL, input=PROMPT)
    assert "raised" not in came, came
    text = came["value"]["output"][-1]["content"][0]["text"]
    assert text == expected_chat([{"role": "user", "content": PROMPT}], None, model=MODEL)


# Errors: the class is what programs catch; type, code and param are what they look at.


@pytest.mark.parametrize(
    ("arguments", "raised", "status", "kind", "param"),
    [
        ({"model": "another"}, "NotFoundError", 404, "NotFoundError", "model"),
        ({"prompt": "word" * 131_072}, "BadRequestError", 400, "BadRequestError", "input_tokens"),
        ({"max_tokens": "many"}, "BadRequestError", 400, "Bad Request", None),
        ({"key_": "wrong"}, "AuthenticationError", 401, None, None),
    ],
    ids=["unknown model", "too long", "malformed", "wrong key"],
)
def test_errors_of_a_completion(
    client: Client, arguments: dict[str, Any], raised: str, status: int, kind: str | None, param: str | None
) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12} | arguments
    came = client.told("completions.create", **asked)
    assert came["raised"][0] == raised
    assert (came["status_code"], came["type"]) == (status, kind)
    if param is not None:
        assert came["param"] == param
    streamed = client.told("completions.create", stream=True, **asked)
    assert (streamed["raised"], streamed["status_code"]) == (came["raised"], status)
    assert streamed["values"] == []


def test_a_generating_model_has_no_embeddings(client: Client) -> None:
    assert client.told("embeddings.create", model=MODEL, input="a")["raised"][0] == "NotFoundError"


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("error=500", "InternalServerError"),
        ("error=429", "RateLimitError"),
        ("cut=request", "APIConnectionError"),
        ("cut=headers", "APIConnectionError"),
    ],
)
def test_faults_that_were_asked_for(client: Client, fault: str, raised: str) -> None:
    """The worker's faults are to a program what an engine's would be; other requests go on."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12}
    came = client.told("completions.create", **asked, extra_headers={"x-prfaas-fault": fault})
    assert came["raised"][0] == raised
    completion(client)


def test_a_stream_that_is_cut(client: Client) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "stream": True}
    came = client.told("completions.create", **asked, extra_headers={"x-prfaas-fault": "cut=1"})
    assert len(came["values"]) == 1
    assert "OpenAIError" in came["raised"]


@pytest.fixture
def refused(folder: Path) -> Iterator[Client]:
    """A client of a worker whose queue takes nobody."""
    with worker(folder, "full", "--max-num-queued-reqs", "0") as full, client_of(full, folder) as started:
        yield Client(started)


def test_a_full_queue(refused: Client) -> None:
    for stream in (False, True):
        came = refused.told("chat.completions.create", model=MODEL, messages=MESSAGES, stream=stream)
        assert came["raised"][0] == "InternalServerError"
        assert (came["status_code"], came["type"], came["code"]) == (503, "Service Unavailable", "503")
