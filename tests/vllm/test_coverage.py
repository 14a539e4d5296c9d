"""What the worker's registries claim is complete, enough, and shows in a worker that runs as a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.facts import facts
from tests.vllm.coverage import ENTRIES, LEAST, MEASURED, coverage, errors
from tests.vllm.live import MODEL, Answer, Server, worker
from tests.worker.process import free_port

pytestmark = pytest.mark.slow

NO_MODEL = "of another kind of model"
CONDITIONS = {
    # the facts' condition: whether the process below meets it, or no worker can
    "always": "met",
    "model task generate": "met",
    "--enable-tokenizer-info-endpoint": "met",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1": "met",
    "--profiler-config.profiler set": "met",
    "VLLM_SERVER_DEV_MODE=1": "met",
    "model task generate and (--enable-scale-out or --tokens-only)": "met",
    "--tokens-only (unless dev mode already has it)": "met",
    "--enable-fault-tolerance": "met",
    "unless --disable-fastapi-docs": "met",
    "--enable-offline-docs": "met",
    "model task generate and VLLM_ENABLE_COHERE_API=1 and package cohere": "a package that vLLM does not bring",
    "as /cohere/v2/chat plus --enable-scale-out or --tokens-only": "a package that vLLM does not bring",
    **dict.fromkeys(
        (
            *("model task transcription", "model task realtime", "pooling model", "model task classify"),
            *("model task embed", "pooling task token_embed"),
            "model with scoring (cross-encoder, embed or late interaction)",
        ),
        NO_MODEL,
    ),
}
EVERYTHING = (
    *("--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-lora", "--enable-offline-docs"),
    *(
        "--enable-fault-tolerance",
        "--data-parallel-size",
        "2",
        "--data-parallel-rank",
        "0",
        "--max-model-len",
        "4096",
        "--api-key",
        "right",
    ),
    *("--profiler-config", '{"profiler":"torch","torch_profiler_dir":"/tmp/traces"}'),
)
KEY = {"Authorization": "Bearer right"}
PROMPT = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def everything() -> Iterator[Server]:
    """A worker with every route that a generating model can have."""
    with worker(*EVERYTHING, VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """A worker with nothing but a queue limit and a short context."""
    with worker("--max-num-queued-reqs", "1", "--max-model-len", "1024", "--max-num-seqs", "1") as server:
        yield server


@pytest.mark.parametrize("name", ENTRIES)
def test_a_registry_is_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = coverage(name)
    with capsys.disabled():
        print(f"\n  {found}")
    assert found.emulated, f"tests/worker/coverage/{name}.yaml says nothing"
    assert not found.malformed, f"neither `emulated` nor `not emulated: REASON`: {found.malformed}"
    assert not found.unknown, f"tests/worker/coverage/{name}.yaml has what vLLM has not: {found.unknown}"
    assert not found.missing, f"tests/worker/coverage/{name}.yaml lacks: {found.missing}"


@pytest.mark.parametrize("name", MEASURED)
def test_enough_is_emulated(name: str) -> None:
    found = coverage(name)
    assert found.share >= LEAST, f"{found}: {dict(found.reasons)}"


def test_every_condition_of_a_route_is_known() -> None:
    assert {route["condition"] for route in facts("routes")["routes"]} == set(CONDITIONS)


ROUTES = [route for route in facts("routes")["routes"] if route["method"] != "WEBSOCKET"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route['method']} {route['path']}, {route['condition']}")
def test_a_route_that_is_emulated_shows(route: dict[str, Any], everything: Server) -> None:
    name = f"{route['method']} {route['path']}"
    if name not in coverage("routes").emulated:
        return
    answer = everything.ask(route["method"], a_path(route), {} if route["method"] == "POST" else None, KEY)
    if CONDITIONS[route["condition"]] == "met":
        assert not answer.no_such_path
        assert answer.status != 405
    else:
        assert answer.no_such_path, f"{CONDITIONS[route['condition']]}: vLLM would not have it"


def a_path(route: dict[str, Any]) -> str:
    """One path that a route has."""
    path: str = route["path"]
    return path.replace("{response_id}", "resp_1").replace("*", "swagger-ui.css")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route['method']} {route['path']}, {route['condition']}")
def test_a_route_without_its_condition_is_not_there(route: dict[str, Any], plain: Server) -> None:
    conditional = route["condition"] not in ("always", "model task generate", "unless --disable-fastapi-docs")
    answer = plain.ask(route["method"], a_path(route), {} if route["method"] == "POST" else None)
    if not conditional:
        assert not answer.no_such_path
    elif "--enable-scale-out" in route["condition"] and "cohere" not in route["path"]:
        assert answer.error == (403, "PermissionDeniedError"), "vLLM has these routes, and refuses"
    else:
        assert answer.no_such_path


def test_the_supervisor_answers() -> None:
    if "supervisor GET /health" not in coverage("routes").emulated:
        return
    port = free_port()
    flags = ("--data-parallel-multi-port-external-lb", "--data-parallel-size", "2", "--data-parallel-size-local", "2")
    with worker(*flags, "--data-parallel-supervisor-port", str(port)):
        for path in ("/health", "/ready", "/readyz"):
            assert Server(port).ask("GET", path).status in (200, 503)
        assert Server(port).ask("GET", "/v1/models").status == 404


def test_the_bootstrap_server_answers() -> None:
    if "bootstrap GET /query" not in coverage("routes").emulated:
        return
    port = free_port()
    config = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
    with worker("--kv-transfer-config", json.dumps(config), VLLM_MOONCAKE_BOOTSTRAP_PORT=str(port)):
        assert Server(port).ask("GET", "/query").status == 200
        assert Server(port).ask("POST", "/register", {}).status in (400, 422)


CONNECTORS: dict[str, dict[str, Any]] = {
    "NixlConnector": {},
    "MooncakeConnector": {},
    "MooncakeStoreConnector": {},
    "SimpleCPUOffloadConnector": {},
    "HF3FSKVConnector": {},
    "HiSparseConnector": {},
    "UMBPStoreConnector": {},
}


def connectors(**offloading: Any) -> str:
    """The value of --kv-transfer-config that names every connector with metrics of its own."""
    children = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        for name, extra in (CONNECTORS | {"OffloadingConnector": offloading}).items()
    ]
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return json.dumps(whole | {"kv_connector_extra_config": {"connectors": children}})


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """Families that a worker shows which meets every condition of a metric; two, since some exclude each other."""
    families: set[str] = set()
    flags = ("--enable-lora", "--kv-cache-metrics", "--tool-call-parser", "hermes", "--watermark-config", '{"key":1}')
    drafts = ("--speculative-config", '{"method":"ngram","num_speculative_tokens":2}')
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
    for config in (connectors(spec_name="TieringOffloadingSpec"), connectors(store_threshold=2)):
        diffusion = ("--diffusion-config", '{"canvas_length":8}')
        with worker(*flags, *drafts, *diffusion, "--kv-transfer-config", config, **variables) as server:
            assert server.ask("POST", "/v1/completions", PROMPT).status == 200
            for path in ("/sleep", "/wake_up", "/init_weight_transfer_engine"):
                assert server.ask("POST", path, {}).status == 200
            lines = server.ask("GET", "/metrics").text.splitlines()
        families |= {line.split()[2] for line in lines if line.startswith("# TYPE")}
    return families


@pytest.mark.parametrize("metric", facts("metrics")["metrics"], ids=lambda metric: metric["name"])
def test_a_metric_that_is_emulated_shows(metric: dict[str, Any], shown: set[str]) -> None:
    name = metric["name"]
    forms = {name, f"{name}_total", *metric.get("exposed_as", ())}
    assert bool(forms & shown) == (name in coverage("metrics").emulated), metric["exists_when"]


# Error bodies


def long_prompt(server: Server) -> Answer:
    return server.ask("POST", "/v1/completions", PROMPT | {"prompt": "word " * 20_000}, KEY)


def without_stream(server: Server) -> Answer:
    return server.ask("POST", "/v1/completions", PROMPT | {"stream_options": {"include_usage": True}}, KEY)


def profiler_twice(server: Server) -> Answer:
    server.ask("POST", "/start_profile", {}, KEY)
    try:
        return server.ask("POST", "/start_profile", {}, KEY)
    finally:
        server.ask("POST", "/stop_profile", {}, KEY)


def unreachable_media(server: Server) -> Answer:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/none.png"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
    return server.ask("POST", "/v1/chat/completions", body, KEY)


def while_paused(server: Server) -> Answer:
    server.ask("POST", "/pause", {}, KEY)
    try:
        return server.ask("POST", "/v1/completions", PROMPT, KEY)
    finally:
        server.ask("POST", "/resume", {}, KEY)


PROVOKED: dict[str, tuple[Callable[[Server], Answer], tuple[int, str | None]]] = {
    "400 BadRequestError: "
    "VLLMValidationError, VLLMClientError, ValueError, TypeError, OverflowError, template errors": (
        lambda server: server.ask("POST", "/v1/completions", PROMPT | {"temperature": -1}, KEY),
        (400, "BadRequestError"),
    ),
    "400 Bad Request: body fails pydantic or is not JSON, wrong Content-Type": (
        lambda server: server.ask("POST", "/v1/completions", "{", KEY),
        (400, "Bad Request"),
    ),
    "400 BadRequestError: prompt longer than the context": (long_prompt, (400, "BadRequestError")),
    "400 BadRequestError: stream_options without stream": (without_stream, (400, "BadRequestError")),
    "404 NotFoundError: unknown model name": (
        lambda server: server.ask("POST", "/v1/completions", PROMPT | {"model": "other"}, KEY),
        (404, "NotFoundError"),
    ),
    "409 Conflict: profiler already active": (profiler_twice, (409, "Conflict")),
    "422 UnprocessableEntityError: media not reachable and alike": (
        unreachable_media,
        (422, "UnprocessableEntityError"),
    ),
    "501 NotImplementedError: endpoint not supported by the model": (
        lambda server: server.ask("POST", "/generative_scoring", {}, KEY),
        (501, "NotImplementedError"),
    ),
    "503 ServiceUnavailableError: paused engine, retryable failures": (while_paused, (503, "ServiceUnavailableError")),
    "404: unknown path (FastAPI default: the custom handler is registered for fastapi.HTTPException only)": (
        lambda server: server.ask("GET", "/nowhere"),
        (404, None),
    ),
    "405: wrong method": (lambda server: server.ask("DELETE", "/health"), (405, None)),
    "as raised: fastapi.HTTPException raised by a handler (bad JSON in /invocations, /inference/v1/abort_requests)": (
        lambda server: server.ask("POST", "/invocations", "{", KEY),
        (400, "Bad Request"),
    ),
    "401: api key missing or wrong": (
        lambda server: server.ask("POST", "/v1/completions", PROMPT, {"Authorization": "Bearer wrong"}),
        (401, None),
    ),
}
SEEN_BY = {
    "403 PermissionDeniedError: scale-out routes without the flag": (
        "vllm/test_coverage.py",
        "test_a_route_without_its_condition_is_not_there",
    ),
    "503 Service Unavailable: queue limits --max-num-queued-reqs, --max-num-queued-tokens": (
        "vllm/test_coverage.py",
        "test_overload_shows",
    ),
    "500 InternalServerError: finish reason error (KV load failure, engine error)": (
        "vllm/test_coverage.py",
        "test_a_failed_load_and_a_dead_engine_show",
    ),
    "500 InternalServerError: engine dead": ("vllm/test_coverage.py", "test_a_failed_load_and_a_dead_engine_show"),
    "503: /health, /ping with a dead engine": ("vllm/test_coverage.py", "test_a_failed_load_and_a_dead_engine_show"),
    "503: elastic EP scaling or retired rank": (
        "worker/test_dev_routes.py",
        "test_while_it_scales_everything_but_health_is_refused",
    ),
}
"""Errors that need more than one request, or a process of their own: module and test that see them."""


@pytest.mark.parametrize("error", list(errors()))
def test_an_error_body_that_is_emulated_shows(error: str, everything: Server) -> None:
    if error not in coverage("errors").emulated:
        return
    if error in SEEN_BY:
        module, test = SEEN_BY[error]
        assert f"def {test}(" in (Path(__file__).parents[1] / module).read_text()
        return
    provoke, expected = PROVOKED[error]
    usual(provoke(everything), *expected)


def usual(answer: Answer, status: int, kind: str | None) -> None:
    """Asserts that an answer is an error, in vLLM's usual shape if it has a type."""
    assert answer.error == (status, kind), answer.text
    if kind is not None:
        assert set(answer.body["error"]) == {"message", "type", "param", "code"}
        assert answer.body["error"]["code"] == status


def test_overload_shows() -> None:
    with worker("--max-num-queued-reqs", "1", "--time-scale", "60") as server:
        stream = json.dumps(PROMPT | {"max_tokens": 30_000, "stream": True})
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as busy:
            busy.request("POST", "/v1/completions", stream, {"Content-Type": "application/json"})
            assert busy.getresponse().readline().startswith(b"data: ")
            usual(server.ask("POST", "/v1/completions", PROMPT), 503, "Service Unavailable")


def test_a_failed_load_and_a_dead_engine_show() -> None:
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"})
    nowhere = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "cmpl-1-01234567",
        "remote_num_tokens": 4,
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 8,
    }
    with worker("--kv-transfer-config", config, VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as server:
        failed = server.ask("POST", "/v1/completions", PROMPT | {"kv_transfer_params": nowhere})
        usual(failed, 500, "InternalServerError")
        assert failed.body["error"]["message"] == "Internal server error"
        assert server.ask("GET", "/health").status == 200, "only that request failed"
        server.ask("POST", "/v1/completions", PROMPT | {"kv_transfer_params": {"do_remote_prefill": True}})
        usual(server.ask("POST", "/v1/completions", PROMPT), 500, "InternalServerError")
        assert [server.ask("GET", path) for path in ("/health", "/ping")] == [Answer(503, "")] * 2


# Flags and variables


@pytest.mark.parametrize("name", ["flags", "env"])
def test_what_is_not_emulated_has_a_reason_that_says_something(name: str) -> None:
    short = {entry: reason for entry, reason in coverage(name).reasons.items() if len(reason.split()) < 3}
    assert not short
