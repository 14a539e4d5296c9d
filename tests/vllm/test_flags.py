"""The table of vLLM's flags, which the worker and the rules of rendering stand on, against vLLM's own parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.vllm_source import VERSION, VllmParser
from tests.facts import facts

pytestmark = pytest.mark.clients

TABLE = facts("cli_flags")
FLAGS: list[dict[str, Any]] = TABLE["flags"]
BY_DEST = {flag["dest"]: flag for flag in FLAGS}

SAMPLES: dict[str, tuple[list[str], Any]] = {
    "grpc_port": (["50051"], 50051),
    "hf_token": (["secret"], "secret"),
    "lora_modules": (
        ["one=/adapters/one"],
        [{"name": "one", "path": "/adapters/one", "base_model_name": None, "is_3d_lora_weight": False}],
    ),
    "middleware": (["a.b"], ["a.b"]),
    "pooler_config": (['{"dimensions":8}'], {"dimensions": 8}),
}
"""Options whose kind alone does not say what they take: words, and the value that they become."""


MODELS_AND_FILES = ("model_tag", "model", "config")
"""Options with tests of their own."""


def forms(flag: dict[str, Any]) -> set[str]:
    """Every way to write a flag that the table has."""
    return {word for kind in ("flags", "negative_flags", "inverse_flags") for word in flag.get(kind, ())}


def sample(flag: dict[str, Any]) -> tuple[list[str], Any]:
    """A value other than the default, as words of a command line and as the parsed value."""
    if flag["dest"] in SAMPLES:
        return SAMPLES[flag["dest"]]
    if flag.get("choices"):
        chosen = next(each for each in flag["choices"] if each != flag["default"])
        listed = flag["kind"] == "list"
        return [str(chosen)], [chosen] if listed else chosen
    match flag["kind"]:
        case "int":
            return ["7"], 7
        case "float":
            return ["0.25"], 0.25
        case "str":
            return ["text"], "text"
        case "bool":
            return [], True
        case "list" if flag.get("element") == "int":
            return ["3", "4"], [3, 4]
        case "list":
            return ["a", "b"], ["a", "b"]
        case "comma_separated_list":
            return ["0,1"], [0, 1]
        case "json_dict" | "str_or_json_dict":
            return ['{"a":1}'], {"a": 1}
        case "json_list":
            return ['["a"]'], ["a"]
        case "config_object":
            return ["{}"], {}
    raise AssertionError(f"no sample of the kind {flag['kind']}")


@pytest.fixture(scope="module")
def options(vllm: VllmParser) -> dict[str, Any]:
    return vllm.options()


def test_the_table_is_of_the_version_that_we_render_for() -> None:
    assert TABLE["vllm"] == VERSION


def test_the_table_has_every_flag_in_every_form_and_no_other(options: dict[str, Any]) -> None:
    real = {dest: set(option["flags"]) for dest, option in options.items()}
    table = {dest: forms(flag) - ({"model_tag"} if dest == "model_tag" else set()) for dest, flag in BY_DEST.items()}
    assert table == real
    assert len(table) == TABLE["counts"]["flags"]


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag["dest"] not in MODELS_AND_FILES], ids=lambda flag: flag["dest"]
)
def test_a_flag_round_trips(flag: dict[str, Any], vllm: VllmParser) -> None:
    words, expected = sample(flag)
    for form in sorted({*flag["flags"]}):
        parsed = vllm.parse(["org/model", form, *words])
        assert parsed.values is not None, parsed.error
        assert shows(parsed.values.get(flag["dest"]), expected), (form, parsed.values.get(flag["dest"]))
    for form in (*flag.get("negative_flags", ()), *flag.get("inverse_flags", ())):
        parsed = vllm.parse(["org/model", form])
        assert parsed.values is not None, parsed.error
        assert parsed.values[flag["dest"]] is False


@pytest.mark.parametrize("words", [["org/model"], ["--model", "org/model"], ["--port", "1", "--model=org/model"]])
def test_the_model_is_positional_however_it_is_given(words: list[str], vllm: VllmParser) -> None:
    assert vllm.parse(words)["model_tag"] == "org/model"


def test_a_configuration_file_is_read_when_it_is_a_word_of_its_own(vllm: VllmParser, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 8123\n")
    assert vllm.parse(["org/model", "--config", str(file)])["port"] == 8123
    assert vllm.parse(["org/model", f"--config={file}"])["port"] == 8000


def shows(value: Any, expected: Any) -> bool:
    """Whether a parsed value is the one expected; of a configuration class the fields named count."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return all(value[key] == each for key, each in expected.items())
    return bool(value == expected)


@pytest.mark.parametrize("gone", TABLE["flag_names_not_accepted_in_0_33"])
def test_a_flag_of_earlier_releases_is_refused(gone: str, vllm: VllmParser) -> None:
    parsed = vllm.parse(["org/model", gone, "1"])
    assert (parsed.status, parsed.values) == (2, None)
    assert f"unrecognized arguments: {gone}" in parsed.error or f"ambiguous option: {gone}" in parsed.error


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["--kv-transfer-config.kv_port", "15001"], "kv_transfer_config", {"kv_port": 15001, "kv_connector": None}),
        (["--kv-events-config.topic=a"], "kv_events_config", {"topic": "a"}),
        (["--max-num-batched-tokens", "8K"], "max_num_batched_tokens", 8192),
        (["--max-num-queued-tokens", "1.5k"], "max_num_queued_tokens", 1500),
        (["--max-model-len", "auto"], "max_model_len", -1),
        (["--max-num-batched", "4096"], "max_num_batched_tokens", 4096),
        (["--max_model_len=4096"], "max_model_len", 4096),
        (["--port", "1", "--port", "2"], "port", 2),
        (["-O3"], "optimization_level", "3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_ways_to_write_a_value(words: list[str], option: str, value: Any, vllm: VllmParser) -> None:
    assert shows(vllm.parse(["org/model", *words])[option], value)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--kv-transfer-config", '{"kv_connector":"NixlConnector"}'], 2, "Please specify kv_role"),
        (["--kv-transfer-config", '{"kv_rank":1}'], 2, "kv_rank"),
        (["--kv-transfer-config.kv-connector", "X"], 2, "kv-connector"),
        (["--kv-events-config.topic", "5"], 2, "topic"),
        (["--dtype", "fp16"], 2, "invalid choice: 'fp16'"),
        (["--enable-log-stats"], 2, "unrecognized arguments: --enable-log-stats"),
        (["--enable-auto-tool-choice"], 1, "requires --tool-call-parser"),
        (["--enable-log-outputs"], 1, "requires --enable-log-requests"),
        (["--sse-keep-alive-interval", "-1"], 1, "non-negative"),
        (["--enable-per-request-metrics", "--disable-log-stats"], 1, "requires engine statistics"),
        (["--headless", "--api-server-count", "1"], 1, "cannot be used with --headless"),
        (["--data-parallel-rank", "1", "--data-parallel-start-rank", "1"], 1, "more than one data parallel load"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_vllm_refuses(words: list[str], status: int, said: str, vllm: VllmParser) -> None:
    parsed = vllm.parse(["org/model", *words])
    assert parsed.status == status
    assert said in parsed.error


def test_a_list_swallows_a_model_that_follows(vllm: VllmParser) -> None:
    parsed = vllm.parse(["--api-key", "a", "b", "org/model"])
    assert parsed["api_key"] == ["a", "b", "org/model"]
    assert parsed["model_tag"] is None
