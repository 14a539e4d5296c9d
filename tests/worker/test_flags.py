"""The command line: vLLM's flags that our templates render, and the worker's own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.api.profiles import shipped
from prfaas.cli.worker import IGNORED, IGNORED_SWITCHES, add_parser
from prfaas.worker.config import WorkerConfig
from prfaas.worker.flags import read_config

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def parse(*flags: str, **environment: str) -> WorkerConfig:
    """The configuration that `prfaas worker serve` makes of these arguments."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["worker", "serve", *flags])
    return read_config(args, environment)


def test_defaults_are_vllms() -> None:
    config = parse("org/model", "--profile", "H200x8")
    assert (config.model, config.names, config.profile) == ("org/model", ("org/model",), shipped("H200x8"))
    assert (config.host, config.port, config.block_size, config.shutdown_timeout) == (None, 8000, 16, 0)
    assert (config.time_scale, config.kv_byte_scale, config.keep_alive_seconds) == (1, 1, 5)
    assert (config.kv_transfer, config.max_queued_requests, config.api_keys) == (None, None, ())


def test_every_flag_arrives() -> None:
    config = parse(
        *("org/model", "--profile", "H20x8", "--time-scale", "20", "--kv-byte-scale", "0.0002"),
        *("--host", "0.0.0.0", "--port", "9000", "--max-model-len", "128K", "--max-num-seqs", "12"),
        *("--tensor-parallel-size", "8", "--block-size", "64", "--num-gpu-blocks-override", "4096"),
        *("--dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--attention-backend", "FLASHMLA"),
        *("--shutdown-timeout", "30", "--max-num-queued-reqs", "7", "--max-num-queued-tokens", "1.5k"),
        *("--enable-prompt-tokens-details", "--enable-request-id-headers", "--no-enable-force-include-usage"),
        *("--enable-server-load-tracking", "--served-model-name", "a", "b", "--api-key", "k"),
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE="9",
    )
    assert (config.time_scale, config.kv_byte_scale, config.host, config.port) == (20, 0.0002, "0.0.0.0", 9000)
    assert (config.max_model_len, config.max_num_seqs, config.batch_limit) == (131_072, 12, 12)
    assert (config.tensor_parallel_size, config.block_size, config.total_blocks) == (8, 64, 4096)
    assert (config.dtype, config.kv_cache_dtype, config.attention_backend) == ("bfloat16", "fp8", "FLASHMLA")
    assert (config.shutdown_timeout, config.max_queued_requests, config.max_queued_tokens) == (30, 7, 1_500)
    assert (config.prompt_tokens_details, config.request_id_headers, config.force_include_usage) == (True, True, False)
    assert (config.load_tracking, config.names, config.api_keys) == (True, ("a", "b"), ("k",))
    assert config.keep_alive_seconds == 9


def test_flags_without_effect_are_accepted() -> None:
    valued = [word for flag in IGNORED for word in (flag, "1")]
    switches = [form for flag in IGNORED_SWITCHES for form in (flag, flag.replace("--", "--no-", 1))]
    assert parse("m", "--profile", "H20x8", *valued, *switches) == parse("m", "--profile", "H20x8")


def test_kv_transfer_config() -> None:
    given = NIXL | {
        "kv_role": "kv_both",
        "engine_id": "east-0",
        "kv_buffer_device": "cuda",
        "kv_connector_extra_config": {"kv_lease_duration": 60, "backends": ["UCX"]},
        "kv_load_failure_policy": "recompute",
    }
    transfer = parse(
        *("m", "--profile", "H20x8", "--kv-transfer-config", json.dumps(given)),
        VLLM_NIXL_SIDE_CHANNEL_HOST="10.0.0.7",
        VLLM_NIXL_SIDE_CHANNEL_PORT="5601",
    ).kv_transfer
    assert transfer is not None
    assert (transfer.role, transfer.engine_id, transfer.lease_seconds) == ("kv_both", "east-0", 60)
    assert (transfer.host, transfer.port, transfer.recompute_on_failure) == ("10.0.0.7", 5601, True)


def test_kv_transfer_defaults_are_vllms() -> None:
    first, second = (parse("m", "--profile", "H20x8", "--kv-transfer-config", json.dumps(NIXL)) for _ in range(2))
    assert first.kv_transfer is not None
    assert second.kv_transfer is not None
    assert (first.kv_transfer.host, first.kv_transfer.port, first.kv_transfer.lease_seconds) == ("localhost", 5600, 30)
    assert not first.kv_transfer.recompute_on_failure
    assert first.kv_transfer.engine_id != second.kv_transfer.engine_id
    assert (first.kv_transfer.produces, first.kv_transfer.consumes) == (True, False)
    assert parse("m", "--profile", "H20x8", "--kv-transfer-config", "{}").kv_transfer is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        (NIXL | {"kv_rank": 0}, "has no field kv_rank"),
        ({"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}, "kv_connector must be one of NixlConnector"),
        ({"kv_connector": "NixlConnector"}, "kv_role must be one of .* got None"),
        (NIXL | {"kv_role": "both"}, "kv_role must be one of kv_producer, kv_consumer, kv_both, got both"),
        (NIXL | {"kv_load_failure_policy": "retry"}, "kv_load_failure_policy must be fail or recompute"),
        (NIXL | {"kv_connector_extra_config": {"kv_lease_duration": 0}}, "kv_lease_duration must be seconds above 0"),
        (NIXL | {"kv_connector_extra_config": {"kv_lease_duration": "9"}}, "kv_lease_duration must be seconds"),
    ],
)
def test_a_wrong_kv_transfer_config_says_what_is_wrong(value: Any, message: str) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ValueError, match=f"--kv-transfer-config.*{message}"):
        parse("m", "--profile", "H20x8", "--kv-transfer-config", text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time-scale", "0"], "--time-scale must be a finite number above 0, got 0.0"),
        (["--time-scale", "nan"], "--time-scale must be a finite number above 0"),
        (["--kv-byte-scale", "0"], "--kv-byte-scale must be a finite number above 0, got 0.0"),
        (["--kv-byte-scale", "-1"], "--kv-byte-scale must be a finite number above 0"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be at least 0"),
        (
            ["--max-model-len", "1000", "--num-gpu-blocks-override", "9"],
            "9 blocks of 16 tokens cannot hold one request",
        ),
    ],
)
def test_values_out_of_bounds_name_their_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse("m", "--profile", "H20x8", *flags)


def test_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(shipped("H20x8").to_wire() | {"accelerator": "B300"}))
    assert parse("m", "--profile", str(path)).profile.accelerator == "B300"
    path.write_text(json.dumps(shipped("H20x8").to_wire() | {"gpus": -1}))
    with pytest.raises(ValueError, match=r"--profile .*mine.yaml: .*\ngpus"):
        parse("m", "--profile", str(path))
    with pytest.raises(ValueError, match=r"nope: neither a shipped profile \(H200x8, H20x8\) nor a readable"):
        parse("m", "--profile", "nope")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["m", "--profile", "H20x8", "--swap-space", "4"], "unrecognized arguments: --swap-space 4"),
        (["m", "--profile", "H20x8", "--dtype", "fp16"], "invalid choice: 'fp16'"),
        (["m", "--profile", "H20x8", "--max-model-len", "many"], "'many' is not a number such as 8192, 8k or 8K"),
        (["m"], "the following arguments are required: --profile"),
        (["--profile", "H20x8"], "the following arguments are required: MODEL"),
    ],
)
def test_what_the_parser_refuses_exits_with_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        parse(*flags)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_max_model_len_may_be_left_to_the_model(text: str) -> None:
    assert parse("m", "--profile", "H20x8", "--max-model-len", text).max_model_len == 131_072


@pytest.mark.parametrize("port", ["x", "70000", "-1"])
def test_a_wrong_environment_names_its_variable(port: str) -> None:
    with pytest.raises(ValueError, match="VLLM_NIXL_SIDE_CHANNEL_PORT must be a whole number up to 65535"):
        parse(*("m", "--profile", "H20x8", "--kv-transfer-config", json.dumps(NIXL)), VLLM_NIXL_SIDE_CHANNEL_PORT=port)


def test_api_key_from_the_environment() -> None:
    assert parse("m", "--profile", "H20x8", VLLM_API_KEY="secret").api_keys == ("secret",)
    assert parse("m", "--profile", "H20x8", "--api-key", "flag", VLLM_API_KEY="secret").api_keys == ("flag",)
