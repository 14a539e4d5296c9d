"""Peer routers that know vLLM's P/D protocol, before a prefill and a decode worker, with nothing said to them of ours.

An answer that verifies proves that KV bytes crossed: of the prompt, the decode worker uses its last token only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.environments import environment
from e2e.local_router import free_port
from prfaas.worker.oracle import chat_prompt, count_tokens, expected_chat, expected_text
from tests.worker_clients.conftest import Pair
from tests.worker_clients.rig import MODEL, Answer, Server, program

pytestmark = pytest.mark.clients

OUTPUT = 12


@contextmanager
def vllm_router(pair: Pair, folder: Path) -> Iterator[Server]:
    """vllm-router, in its mode for vLLM's prefill and decode."""
    port = free_port()
    command = [
        *(str(environment("vllm-router").program("vllm-router")), "--vllm-pd-disaggregation"),
        *("--prefill", pair.prefill.url, "--decode", pair.decode.url, "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--prometheus-host", "127.0.0.1"),
    ]
    with program(command, folder / "vllm-router.log", port) as router:
        router.until(lambda: router.ask("GET", "/health").status == 200, "vllm-router is healthy")
        yield router


@contextmanager
def smg(pair: Pair, folder: Path) -> Iterator[Server]:
    """smg; each worker is added with its connector, without which smg sends no KV parameters."""
    port = free_port()
    command = [
        *(str(environment("smg").program("smg")), "launch", "--pd-disaggregation", "--backend", "vllm"),
        *("--policy", "round_robin", "--disable-tokenizer-autoload", "--load-monitor-interval", "1"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--prometheus-host", "127.0.0.1"),
    ]
    with program(command, folder / "smg.log", port) as router:
        router.until(lambda: router.ask("GET", "/workers").status == 200, "smg answers")
        for url, kind in ((pair.prefill.url, "prefill"), (pair.decode.url, "decode")):
            added = {"url": url, "worker_type": kind, "runtime_type": "vllm", "kv_connector": "NixlConnector"}
            assert router.ask("POST", "/workers", added).status == 202

        def ready() -> bool:
            known = router.ask("GET", "/workers").json["workers"]
            return [worker["status"] for worker in known] == ["ready", "ready"]

        router.until(ready, "smg finds both workers ready")
        yield router


ROUTERS = {"vllm-router 0.1.17": vllm_router, "smg 1.13.0": smg}


@pytest.fixture(scope="module", params=list(ROUTERS))
def router(request: pytest.FixtureRequest, pair: Pair, folder: Path) -> Iterator[Server]:
    """One router after the other."""
    with ROUTERS[request.param](pair, folder) as started:
        yield started


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> str:
    """A prompt of its own for each test: nothing of it is in a prefix cache."""
    return f"{request.node.name}: " + "tell me about the sea, and take your time. " * 60


@contextmanager
def one_transfer(pair: Pair, prompt_tokens: int) -> Iterator[None]:
    """Within it, one prompt is prefilled by the one worker and its KV is pulled by the other."""

    def counted() -> tuple[float, ...]:
        pulled = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        transfers = pair.decode.metric("vllm:nixl_bytes_transferred_count")
        size = pair.decode.metric("vllm:nixl_bytes_transferred_sum")
        return pulled, transfers, size, pair.prefill.metric("vllm:prompt_tokens_total")

    before = counted()
    yield
    pulled, transfers, size, prefilled = (now - was for now, was in zip(counted(), before, strict=True))
    assert pulled >= prompt_tokens - 1  # the last token is computed by the decode worker
    assert transfers == 1
    assert size > 100_000
    assert prefilled == prompt_tokens


def ask(router: Server, path: str, **fields: Any) -> Answer:
    answer = router.ask("POST", path, {"model": MODEL, "max_tokens": OUTPUT, **fields})
    assert answer.status == 200, (answer.body, router.shown())
    return answer


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def test_a_completion(router: Server, pair: Pair, prompt: str) -> None:
    with one_transfer(pair, count_tokens(prompt)):
        answer = ask(router, "/v1/completions", prompt=prompt).json
    assert answer["choices"][0]["text"] == expected_text(prompt, OUTPUT, model=MODEL)
    assert answer["usage"]["completion_tokens"] == OUTPUT


def test_a_streamed_completion(router: Server, pair: Pair, prompt: str) -> None:
    with one_transfer(pair, count_tokens(prompt)):
        answer = ask(router, "/v1/completions", prompt=prompt, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    text = "".join(event["choices"][0]["text"] for event in answer.events)
    assert text == expected_text(prompt, OUTPUT, model=MODEL)


def test_a_chat(router: Server, pair: Pair, prompt: str) -> None:
    asked = messages(prompt)
    with one_transfer(pair, count_tokens(chat_prompt(asked))):
        answer = ask(router, "/v1/chat/completions", messages=asked).json
    assert answer["choices"][0]["message"]["content"] == expected_chat(asked, OUTPUT, model=MODEL)


def test_a_streamed_chat_with_usage(router: Server, pair: Pair, prompt: str) -> None:
    asked, options = messages(prompt), {"include_usage": True}
    with one_transfer(pair, count_tokens(chat_prompt(asked))):
        answer = ask(router, "/v1/chat/completions", messages=asked, stream=True, stream_options=options)
    *events, last = answer.events
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == expected_chat(asked, OUTPUT, model=MODEL)
    assert last["usage"]["completion_tokens"] == OUTPUT


def test_limits_and_minimum_are_the_decode_legs(router: Server, pair: Pair, prompt: str) -> None:
    """`min_tokens` and `max_completion_tokens` must not make the prefill leg long, or wrong."""
    asked, made = messages(prompt), pair.prefill.metric("vllm:generation_tokens_total")
    limits = {"max_completion_tokens": OUTPUT, "min_tokens": OUTPUT - 2}
    answer = ask(router, "/v1/chat/completions", messages=asked, **limits).json
    assert answer["choices"][0]["message"]["content"] == expected_chat(asked, OUTPUT, model=MODEL)
    assert pair.prefill.metric("vllm:generation_tokens_total") == made + 1


def test_what_the_worker_refuses_reaches_the_client(router: Server) -> None:
    answer = router.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "word" * 140_000, "max_tokens": 1})
    assert answer.status == 400, answer.body
    assert b"maximum context length" in answer.body


def test_a_client_that_leaves_ends_its_request(router: Server, pair: Pair, prompt: str) -> None:
    def aborted() -> float:
        return pair.decode.metric("vllm:request_success_total", finished_reason="abort")

    before = aborted()
    with router.begun("/v1/completions", endless(prompt)):
        assert pair.decode.metric("vllm:num_requests_running") == 1
    pair.decode.until(lambda: aborted() == before + 1, "the request is aborted")
    assert pair.decode.metric("vllm:num_requests_running") == 0


def endless(prompt: str) -> dict[str, Any]:
    """A streamed request that ends by itself only after half a minute."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": 120_000, "stream": True}


@pytest.mark.parametrize("router", ["smg 1.13.0"], indirect=True)
def test_the_load_is_read_from_the_workers_metrics(router: Server, prompt: str) -> None:
    def running() -> dict[str, int]:
        loads = router.ask("GET", "/get_loads").json["loads"]
        return {load["worker_type"]: load["num_running_reqs"] for load in loads if load["token_usage"] > 0}

    with router.begun("/v1/completions", endless(prompt)):
        router.until(lambda: running() == {"decode": 1}, "smg sees the one request, and its blocks")


def test_no_cache_is_left_behind(router: Server, pair: Pair, prompt: str) -> None:
    """Every cache that a prefill leg left was pulled, and freed: by now the prefill worker holds nothing."""
    ask(router, "/v1/completions", prompt=prompt)
    pair.prefill.until(lambda: pair.prefill.metric("vllm:kv_cache_usage_perc") == 0, "all blocks are free")
    assert pair.prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
    assert pair.decode.metric("vllm:nixl_num_failed_transfers_total") == 0
