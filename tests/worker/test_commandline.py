"""The command line is vLLM's: what was measured on its own parser, and what it refuses after parsing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.worker.commandline.checks import check, log_level, transfer_config
from prfaas.worker.commandline.parser import parse
from prfaas.worker.commandline.rewrite import CommandLineError
from prfaas.worker.commandline.table import table
from tests.facts import facts
from tests.worker import tables

pytestmark = pytest.mark.slow

Parsed = Callable[..., argparse.Namespace]
NIXL = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_producer"})


def parsed(*words: str, warnings: list[str] | None = None) -> argparse.Namespace:
    """The namespace of vLLM's flags alone."""
    said = [] if warnings is None else warnings
    return parse(words, "vllm serve", lambda _: None, said.append)


def checked(*words: str, warnings: list[str] | None = None, **environment: str) -> argparse.Namespace:
    """The namespace, with what vLLM checks after parsing."""
    args = parsed(*words, warnings=warnings)
    check(args, environment, ([] if warnings is None else warnings).append)
    return args


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the parser says when it ends with 2."""
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_tables_are_the_facts() -> None:
    """`python -m tests.worker.tables` writes them anew."""
    assert tables.FLAGS.read_text() == tables.rendered(tables.flags())
    assert tables.ENVIRONMENT.read_text() == tables.rendered(tables.environment())
    assert len(table().flags) == 321


FLAGS = {flag["flags"][0]: flag for flag in facts("cli_flags")["flags"] if flag["flags"][0] != "model_tag"}


@pytest.mark.parametrize("name", FLAGS)
def test_every_form_of_every_flag_is_known(name: str) -> None:
    flag = FLAGS[name]
    if flag["kind"] == "bool":
        for form in flag["flags"]:
            assert getattr(parsed("m", form), flag["dest"]) is True
        for form in (*flag.get("negative_flags", ()), *flag.get("inverse_flags", ())):
            assert getattr(parsed("m", form), flag["dest"]) is False
        return
    words = {"config_object": "{}", "json_dict": "{}", "json_list": "[]", "float": "1"}
    value = str(flag.get("choices", [words.get(flag["kind"], "1")])[0])
    value = {"--lora-modules": "a=b", "--config": "unread"}.get(name, value)
    for form in flag["flags"]:
        if form == "--model":
            assert parsed("--model", "m").model == "m"
        elif form != "--config":
            assert getattr(parsed("m", form, value), flag["dest"]) is not None
            if form.startswith("--"):
                spelled = "--" + form[2:].replace("-", "_")
                assert getattr(parsed("m", f"{spelled}={value}"), flag["dest"]) is not None


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if "choices" in flag and flag["kind"] != "int"])
def test_a_value_that_is_no_choice_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"argument {name}" in (said := refused(capsys, "m", name, "no-choice"))
    assert "invalid choice" in said


GONE = sorted(set(facts("cli_flags")["flag_names_not_accepted_in_0_33"]) - {"--device"})
"""`--device` is taken for the beginning of `--device-ids`."""


@pytest.mark.parametrize("flag", GONE)
def test_a_flag_that_is_gone_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "m", f"{flag}=1")
    assert "unrecognized arguments" in said


# What was measured on the real parser (cli_flags.json, parser_behaviour_measured), one test an entry.


@pytest.mark.fact("README 1")
def test_a_dotted_flag_replaces_the_json_of_the_same_flag() -> None:
    args = checked("m", "--kv-transfer-config", NIXL, "--kv-transfer-config.kv_port", "1")
    assert args.kv_transfer_config == {"kv_port": 1}
    assert transfer_config(args, {}) == {}, "no connector, and no error"


@pytest.mark.fact("README 3")
def test_dotted_keys_keep_underscores_and_numbers_become_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Unexpected keyword argument" in refused(capsys, "m", "--kv-transfer-config.kv-connector", "X")
    assert "topic" in refused(capsys, "m", "--kv-events-config.topic", "5")
    assert parsed("m", "--kv-events-config.topic", '"5"').kv_events_config == {"topic": "5"}
    extra = parsed("m", "--kv_transfer_config.kv_connector_extra_config.a.b", "8k").kv_transfer_config
    assert extra == {"kv_connector_extra_config": {"a": {"b": 8000}}}
    flag = "--kv-transfer-config.kv_connector_extra_config"
    both = parsed("m", f"{flag}.a", "1", "--port", "2", f"{flag}.b=text").kv_transfer_config
    assert both == {"kv_connector_extra_config": {"a": 1, "b": "text"}}
    listed = parsed("m", f"{flag}.l+", "x,y").kv_transfer_config
    assert listed == {"kv_connector_extra_config": {"l": ["x", "y"]}}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"kv_connector": "X"}, "Please specify kv_role"),
        ({"kv_rank": 0}, "Unexpected keyword argument"),
        ({"kv_role": "both"}, "kv_role"),
        ({"kv_load_failure_policy": "retry"}, "'fail' or 'recompute'"),
        ({"kv_port": "x"}, "valid integer"),
        ([], "object"),
    ],
)
def test_a_wrong_kv_transfer_config_is_refused_by_the_parser(
    value: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "m", "--kv-transfer-config", json.dumps(value))
    assert "argument --kv-transfer-config: " in said
    assert words in said


def test_text_is_read_as_what_the_field_is() -> None:
    assert parsed("m", "--kv-transfer-config", '{"kv_port": "15000"}').kv_transfer_config == {"kv_port": 15_000}
    bytes_of = parsed("m", "--kv-transfer-config", '{"kv_connector_extra_config": {"size": 80m, "name": "80m"}}')
    assert bytes_of.kv_transfer_config == {"kv_connector_extra_config": {"size": 80_000_000, "name": "80m"}}


def test_numbers_have_suffixes(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("m", "--max-num-batched-tokens", "8K").max_num_batched_tokens == 8192
    assert parsed("m", "--max-num-queued-tokens", "1.5k").max_num_queued_tokens == 1500
    assert [parsed("m", "--max-model-len", text).max_model_len for text in ("auto", "-1", "2M", "1t")] == [
        *(-1, -1, 2 * 2**20, 10**12)
    ]
    assert "Decimals are not allowed" in refused(capsys, "m", "--max-model-len", "1.5K")
    assert "invalid int value: '8k'" in refused(capsys, "m", "--port", "8k")


def test_switches_have_two_negations() -> None:
    for form in ("--disable-prefix-caching", "--no-enable-prefix-caching", "--no_enable_prefix_caching"):
        assert parsed("m", form).enable_prefix_caching is False


def test_a_plain_switch_has_no_inverse(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --enable-log-stats" in refused(capsys, "m", "--enable-log-stats")
    assert "unrecognized arguments: --swap-space 4" in refused(capsys, "m", "--swap-space", "4")


def test_an_unambiguous_beginning_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("m", "--max-num-batched", "4096").max_num_batched_tokens == 4096
    assert parsed("m", "--kv-transfer", "{}").kv_transfer_config == {}
    assert "ambiguous option" in refused(capsys, "m", "--max-num", "1")


def test_later_checks_are_later() -> None:
    """The parser lets these pass; the configuration does not."""
    for words in (
        ("--kv-cache-dtype", "foo"),
        ("--attention-backend", "NOPE"),
        ("--block-size", "17"),
        ("--gpu-memory-utilization", "1.5"),
    ):
        parsed("m", *words)
        with pytest.raises(CommandLineError, match=words[0]):
            checked("m", *words)
    assert parsed("m", "--shutdown-timeout", "-1").shutdown_timeout == -1


@pytest.mark.parametrize("words", [("--dtype", "fp16"), ("--scheduling-policy", "lifo"), ("--log-level", "info")])
def test_choices_are_closed(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"argument {words[0]}: invalid choice: '{words[1]}'" in refused(capsys, "m", *words)


@pytest.mark.fact("README 4")
def test_a_list_eats_the_model_behind_it() -> None:
    args = parsed("--api-key", "a", "b", "MODEL")
    assert (args.api_key, args.model_tag, args.model) == (["a", "b", "MODEL"], None, "Qwen/Qwen3-0.6B")
    assert parsed("MODEL", "--api-key", "a", "b").model == "MODEL"


@pytest.mark.fact("README 4")
def test_a_config_file_is_read_as_two_words_only(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    content = {
        "port": 9,
        "enable-prefix-caching": False,
        "headless": False,
        "api-key": ["a", "b"],
        "enforce_eager": True,
    }
    path.write_text(json.dumps(content | {"kv-transfer-config": json.loads(NIXL)}))
    args = parsed("m", "--config", str(path), "--port", "10")
    assert (args.port, args.enable_prefix_caching, args.headless, args.enforce_eager) == (10, False, False, True)
    assert (args.api_key, args.kv_transfer_config) == (["a", "b"], json.loads(NIXL))
    assert parsed("m", "--port", "10", "--config", str(path)).port == 10, "the command line wins wherever it stands"
    assert parsed("m", f"--config={path}").port == 8000, "accepted, and not read"
    path.write_text("model: named\n")
    assert parsed("--config", str(path)).model == "named"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m", "--config"), "No config file specified"),
        (("m", "--config", "a.json"), "must be of a yaml/yml type. json supplied"),
        (("m", "--config", "absent.yaml"), "Unable to read the config file at absent.yaml"),
        (("m", "--config", "a.yaml", "--config", "b.yaml"), "More than one config file"),
        (("--served-model-name", "a", "m"), "`model` should be provided as the first positional argument"),
        (("--model",), "--model needs a value"),
        (("m", "--kv-transfer-config.kv_port"), "--kv-transfer-config.kv_port needs a value"),
    ],
)
def test_what_ends_with_an_exception_before_argparse(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        parsed(*words)


def test_a_config_file_must_name_a_model_where_the_command_line_does_not(tmp_path: Path) -> None:
    path = tmp_path / "serve.yml"
    path.write_text("port: 9\n")
    with pytest.raises(CommandLineError, match="No model specified"):
        parsed("--config", str(path))
    path.write_text("- 1\n")
    with pytest.raises(CommandLineError, match="must be a mapping"):
        parsed("m", "--config", str(path))


def test_the_last_of_two_wins_with_a_warning() -> None:
    warnings: list[str] = []
    assert parsed("m", "--port", "1", "--port", "2", warnings=warnings).port == 2
    assert warnings == ["Found duplicate keys --port"]
    parsed("m", "--kv-transfer-config.kv_port", "1", "--kv-transfer-config.kv_port", "2", warnings=warnings)
    assert warnings[1:] == ["Found duplicate keys --kv-transfer-config.kv_port"]


def test_other_spellings() -> None:
    for words in (("-O2",), ("-O", "2"), ("-O=2",)):
        assert str(parsed("m", *words).optimization_level) == "2"
    assert parsed("m", "-tp=8", "-cc.mode=3").compilation_config == {"mode": 3}
    assert parsed("--model", "m").model == parsed("--model=m").model == "m"
    assert parsed("m", "--max_model_len=8").max_model_len == 8


def test_deprecated_flags_are_accepted_with_a_warning() -> None:
    warnings: list[str] = []
    parsed("m", "--disable-cascade-attn", "--mamba-cache-mode", "align", warnings=warnings)
    assert warnings == ["argument 'disable_cascade_attn' is deprecated", "argument 'mamba_cache_mode' is deprecated"]
    warnings.clear()
    parsed("--model", "m", warnings=warnings)
    assert "positional argument" in warnings[0]


# What is refused after parsing (cli_flags.json, validation_after_parse), each with a line that is accepted.

RUST: dict[str, Any] = {"VLLM_USE_RUST_FRONTEND": "1"}
MULTI_PORT = ("--data-parallel-multi-port-external-lb", "-dp", "4", "--data-parallel-size-local", "2")


@pytest.mark.parametrize(
    ("words", "message", "good"),
    [
        (["--enable-auto-tool-choice"], "requires --tool-call-parser", ["--tool-call-parser", "hermes"]),
        (["--enable-log-outputs"], "requires --enable-log-requests", ["--enable-log-requests"]),
        (["--sse-keep-alive-interval", "-1"], "non-negative", ["--sse-keep-alive-interval", "0"]),
        (["--enable-per-request-metrics", "--disable-log-stats"], "requires engine statistics", None),
        ([*MULTI_PORT, "--uds", "/s"], "does not support --uds", None),
        ([*MULTI_PORT, "--grpc"], "does not support --grpc", None),
        ([*MULTI_PORT, "--ssl-keyfile", "k"], "must be provided together", None),
        ([*MULTI_PORT, "--api-server-count", "2"], "requires --api-server-count=1", None),
        ([*MULTI_PORT, "--data-parallel-rank", "1"], "manages child --data-parallel-rank", None),
        ([*MULTI_PORT, "--data-parallel-external-lb"], "cannot be combined", None),
        (["--data-parallel-multi-port-external-lb"], "requires --data-parallel-size > 1", list(MULTI_PORT)),
        (["--data-parallel-multi-port-external-lb", "-dp", "2"], "size-local >= 2", list(MULTI_PORT)),
        ([*MULTI_PORT[:3], "--data-parallel-size-local", "8"], "cannot exceed", None),
        (["--data-parallel-external-lb", "--data-parallel-hybrid-lb"], "more than one data parallel", None),
        (["--data-parallel-rank", "0", "--data-parallel-start-rank", "0"], "more than one data parallel", None),
        (["--headless", "--api-server-count", "1"], "cannot be used with --headless", ["--api-server-count", "0"]),
        (["--max-num-batched-tokens", "8", "--max-num-seqs", "9"], "greater than or equal", ["--max-num-seqs", "8"]),
        (
            ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8", "--max-model-len", "9"],
            "is smaller than max_model_len",
            ["--max-model-len", "8"],
        ),
        (["--max-num-active-seqs", "9", "--max-num-seqs", "8"], "cannot be greater", ["--max-num-active-seqs", "8"]),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size: Input should be greater", None),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs: Input should be greater", None),
        (["--block-size", "32", "--attention-backend", "FLASHMLA"], "only 64", ["--block-size", "64"]),
    ],
)
def test_what_is_refused_after_parsing(words: list[str], message: str, good: list[str] | None) -> None:
    with pytest.raises(CommandLineError, match=message):
        checked("m", *words)
    if good is not None:
        checked("m", *words, *good)


def test_a_grpc_port_needs_the_rust_front_end() -> None:
    with pytest.raises(CommandLineError, match="requires VLLM_USE_RUST_FRONTEND=1"):
        checked("m", "--grpc-port", "9000")
    checked("m", "--grpc-port", "9000", **RUST)
    for words, message in (
        (["--grpc"], "mutually exclusive"),
        (["--headless"], "requires a Rust frontend"),
        ([*MULTI_PORT], "incompatible with"),
        (["--port", "9000"], "must differ"),
    ):
        with pytest.raises(CommandLineError, match=message):
            checked("m", "--grpc-port", "9000", *words, **RUST)
    with pytest.raises(CommandLineError, match="between 0 and 65535"):
        checked("m", "--grpc-port", "70000", **RUST)


@pytest.mark.fact("README 8")
def test_a_connector_refuses_expandable_segments() -> None:
    variable: dict[str, Any] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    checked("m", **variable)
    with pytest.raises(CommandLineError, match="incompatible with PYTORCH_CUDA_ALLOC_CONF"):
        checked("m", "--kv-transfer-config", NIXL, **variable)
    checked("m", "--kv-transfer-config", NIXL, "--enable-cumem-allocator", **variable)


@pytest.mark.fact("README 8")
def test_a_service_named_vllm_breaks_the_port() -> None:
    checked("m", VLLM_PORT="5000")
    with pytest.raises(CommandLineError, match="appears to be a URI"):
        checked("m", VLLM_PORT="tcp://10.0.0.1:8000")
    with pytest.raises(CommandLineError, match="must be a valid integer"):
        checked("m", VLLM_PORT="many")


def test_unknown_variables_are_warned_of_or_refused() -> None:
    warnings: list[str] = []
    checked("m", warnings=warnings, VLLM_NOPE="1", VLLM_HOST_IP="10.0.0.1", OTHER="1")
    assert warnings == ["Unknown vLLM environment variable detected: VLLM_NOPE"]
    with pytest.raises(CommandLineError, match="Unknown vLLM environment variable detected: VLLM_NOPE"):
        checked("m", "--fail-on-environ-validation", VLLM_NOPE="1")


def test_every_variable_of_vllm_is_known() -> None:
    warnings: list[str] = []
    every: dict[str, Any] = dict.fromkeys(tables.environment(), "1") | {"VLLM_LOGGING_LEVEL": "DEBUG"}
    checked("m", "--fail-on-environ-validation", warnings=warnings, **every)
    assert warnings == []


def test_how_much_is_logged() -> None:
    variable = {"VLLM_LOGGING_LEVEL": "warning"}
    assert log_level(parsed("m"), {}) == "info"
    assert log_level(parsed("m"), variable) == "warning"
    assert log_level(parsed("m", "--logging-config.log_level", "ERROR"), variable) == "error"
    assert log_level(parsed("m", "--log-level", "DEBUG"), variable) == "debug"
    assert log_level(parsed("m", "--log-level", "NOTSET"), variable) == "info"
    with pytest.raises(CommandLineError, match="Invalid value 'loud' for VLLM_LOGGING_LEVEL"):
        checked("m", VLLM_LOGGING_LEVEL="loud")


@pytest.mark.fact("README 2")
def test_kv_offloading_turns_the_connector_off() -> None:
    args = checked("m", "--kv-transfer-config", NIXL, "--kv-offloading-size", "4")
    assert transfer_config(args, {}) == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    other = checked("m", "--kv-offloading-size", "4", "--kv-offloading-backend", "lmcache")
    assert transfer_config(other, {})["kv_connector"] == "LMCacheMPConnector"
    simple = transfer_config(args, {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"})
    assert simple["kv_connector"] == "SimpleCPUOffloadConnector"


def test_a_path_must_hold_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CommandLineError, match="Invalid repository ID or local directory specified"):
        checked(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert checked(str(tmp_path)).model == str(tmp_path)
    assert checked("org/model").model == "org/model"
