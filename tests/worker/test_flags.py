"""From flags to what a worker does: the fields of its configuration, and what only this worker refuses."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from prfaas.api.profiles import shipped
from prfaas.cli.worker import add_parser
from prfaas.worker.commandline.checks import check
from prfaas.worker.config import WorkerConfig
from prfaas.worker.flags import read_config
from prfaas.worker.frontend import Adapter, Tls

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
OWN = ("--profile", "H20x8")


def parse(*flags: str, **environment: str) -> WorkerConfig:
    """The configuration that `prfaas worker serve` makes of these arguments."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["worker", "serve", *flags])
    check(args, environment, lambda _: None)
    return read_config(args, environment)


def test_defaults_are_vllms() -> None:
    config = parse("org/model", "--profile", "H200x8")
    assert (config.model, config.names, config.profile) == ("org/model", ("org/model",), shipped("H200x8"))
    assert (config.host, config.port, config.block_size, config.shutdown_timeout) == (None, 8000, 16, 0)
    assert (config.time_scale, config.kv_byte_scale, config.keep_alive_seconds) == (1, 1, 5)
    assert (config.kv_transfer, config.max_queued_requests, config.api_keys) == (None, None, ())
    assert (config.prefix_caching, config.hash_algorithm, config.scheduling_policy) == (True, "sha256", "fcfs")
    assert (config.max_num_batched_tokens, config.chunked_prefill, config.kv_events) == (8192, True, None)
    assert parse(*OWN).model == "Qwen/Qwen3-0.6B"
    front = config.front
    assert (front.tls, front.docs, front.dev_mode, front.sse_keep_alive) == (None, True, False, 0)
    assert (front.max_prompts, front.max_answers, front.max_stop_strings, front.max_logprobs) == (1024, 16_384, 4, 20)


def test_every_flag_arrives() -> None:
    config = parse(
        *("org/model", "--profile", "H20x8", "--time-scale", "20", "--kv-byte-scale", "0.0002"),
        *("--host", "0.0.0.0", "--port", "9000", "--max-model-len", "128K", "--max-num-seqs", "12"),
        *("--tensor-parallel-size", "8", "--block-size", "64", "--num-gpu-blocks-override", "4096"),
        *("--dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--attention-backend", "FLASHMLA"),
        *("--shutdown-timeout", "30", "--max-num-queued-reqs", "7", "--max-num-queued-tokens", "1.5k"),
        *("--enable-prompt-tokens-details", "--enable-request-id-headers", "--no-enable-force-include-usage"),
        *("--enable-server-load-tracking", "--served-model-name", "a", "b", "--api-key", "k"),
        *("--disable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor", "--scheduling-policy", "priority"),
        *("--max-num-batched-tokens", "128K", "--no-enable-chunked-prefill", "--attention", "hybrid"),
        *("--prefix-cache-retention-interval", "64"),
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE="9",
        PYTHONHASHSEED="7",
        VLLM_HOST_IP="10.0.0.9",
    )
    assert (config.time_scale, config.kv_byte_scale, config.host, config.port) == (20, 0.0002, "0.0.0.0", 9000)
    assert (config.max_model_len, config.max_num_seqs, config.batch_limit) == (131_072, 12, 12)
    assert (config.tensor_parallel_size, config.block_size, config.total_blocks) == (8, 64, 4096)
    assert (config.dtype, config.kv_cache_dtype, config.attention_backend) == ("bfloat16", "fp8", "FLASHMLA")
    assert (config.shutdown_timeout, config.max_queued_requests, config.max_queued_tokens) == (30, 7, 1_500)
    assert (config.prompt_tokens_details, config.request_id_headers, config.force_include_usage) == (True, True, False)
    assert (config.load_tracking, config.names, config.api_keys) == (True, ("a", "b"), ("k",))
    assert (config.prefix_caching, config.hash_algorithm, config.scheduling_policy) == (
        False,
        "sha256_cbor",
        "priority",
    )
    assert (config.max_num_batched_tokens, config.chunked_prefill) == (131_072, False)
    assert (config.attention, config.retention_interval, config.python_hash_seed) == ("hybrid", 64, "7")
    assert (config.keep_alive_seconds, config.event_host) == (9, "10.0.0.9")


def test_the_front_end_arrives() -> None:
    front = parse(
        *("m", *OWN, "--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-ca-certs", "ca", "--ssl-cert-reqs", "2"),
        *("--enable-ssl-refresh", "--ssl-ciphers", "HIGH"),
        *("--uds", "/run/s", "--root-path", "/prefix/", "--sse-keep-alive-interval", "3"),
        *("--enable-per-request-metrics", "--max-logprobs", "5", "--h11-max-incomplete-event-size", "9000"),
        *("--enable-tokenizer-info-endpoint", "--tokens-only", "--profiler-config.profiler", "cuda"),
        *("--disable-fastapi-docs", "--enable-offline-docs", "--enable-lora"),
        *("--lora-modules", "a=/a", '{"name": "b", "path": "/b"}', "--enable-auto-tool-choice"),
        *("--tool-call-parser", "hermes", "--scheduling-policy", "priority", "--fingerprint-mode", "custom"),
        *("--fingerprint-value", "mine", "--override-generation-config", '{"max_new_tokens": 9}'),
        *("--allowed-origins", '["https://a"]', "--allow-credentials", "--headless"),
        VLLM_SERVER_DEV_MODE="1",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="true",
        VLLM_ENABLE_RESPONSES_API_STORE="1",
        VLLM_ENABLE_COHERE_API="1",
        VLLM_MAX_COMPLETION_PROMPTS="2",
        VLLM_MAX_N_SEQUENCES="3",
        VLLM_MAX_STOP_STRINGS="1",
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1",
        VLLM_SKIP_MODEL_NAME_VALIDATION="1",
    ).front
    assert front.tls == Tls("c", "k", "ca", 2, "HIGH", refresh=True)
    assert (front.uds, front.root_path, front.sse_keep_alive, front.headless) == ("/run/s", "/prefix", 3, True)
    assert (front.per_request_metrics, front.max_logprobs, front.max_header_bytes) == (True, 5, 9_000)
    assert front.tokenizer_info
    assert front.scale_out
    assert front.tokens_only
    assert front.profiler
    assert not front.docs
    assert front.lora
    assert front.auto_tools
    assert front.adapters == (Adapter("a", "/a"), Adapter("b", "/b"))
    assert front.priorities
    assert front.fingerprint == "mine"
    assert front.default_max_tokens == 9
    assert (front.origins, front.allow_credentials) == (("https://a",), True)
    assert front.dev_mode
    assert front.lora_updates
    assert front.store_responses
    assert (front.max_prompts, front.max_answers, front.max_stop_strings) == (2, 3, 1)
    assert front.keep_alive_on_death
    assert front.any_model_name
    assert not front.random_request_ids


def test_what_needs_data_parallel_ranks_arrives() -> None:
    external = ("-dp", "2", "--data-parallel-rank", "0")
    assert parse("m", *OWN, *external, "--enable-fault-tolerance", "--enable-expert-parallel").front.fault_tolerance
    assert parse(
        "m", *OWN, "--enable-elastic-ep", "--enable-expert-parallel", "--enable-eplb", "-tp", "2"
    ).front.elastic
    front = parse(
        "m", *OWN, "--data-parallel-multi-port-external-lb", "-dp", "4", "--data-parallel-size-local", "2"
    ).front
    assert (front.local_ranks, front.supervisor_port) == (2, 9256)
    assert (parse("m", *OWN).front.local_ranks, parse("m", *OWN).front.supervisor_port) == (1, None)


def test_the_fingerprint_names_the_version_the_parallelism_and_a_hash() -> None:
    plain, parallel = parse("m", *OWN), parse("m", *OWN, "-tp", "8", "-pp", "2")
    other = parse("n", *OWN)
    for config, shape in ((plain, r"vllm-0\.33\.0-[0-9a-f]{8}"), (parallel, r"vllm-0\.33\.0-tp8-pp2-[0-9a-f]{8}")):
        assert config.front.fingerprint is not None
        assert re.fullmatch(shape, config.front.fingerprint)
    assert plain.front.fingerprint != other.front.fingerprint
    hashed = parse("m", *OWN, "-tp", "8", "--fingerprint-mode", "hash").front.fingerprint
    assert hashed is not None
    assert "tp8" not in hashed
    assert parse("m", *OWN, "--fingerprint-mode", "none").front.fingerprint is None


@pytest.mark.fact("README 5")
@pytest.mark.parametrize(("backend", "size"), [("FLASHMLA", 64), ("CUTLASS_MLA", 128), ("FLASH_ATTN", 16)])
def test_some_attention_backends_have_a_block_size_of_their_own(backend: str, size: int) -> None:
    assert parse("m", *OWN, "--attention-backend", backend).block_size == size


def test_kv_transfer_config() -> None:
    given = NIXL | {
        "kv_role": "kv_both",
        "engine_id": "east-0",
        "kv_buffer_device": "cuda",
        "kv_connector_extra_config": {"kv_lease_duration": 60, "backends": ["UCX"]},
        "kv_load_failure_policy": "recompute",
    }
    transfer = parse(
        *("m", *OWN, "--kv-transfer-config", json.dumps(given)),
        VLLM_NIXL_SIDE_CHANNEL_HOST="10.0.0.7",
        VLLM_NIXL_SIDE_CHANNEL_PORT="5601",
    ).kv_transfer
    assert transfer is not None
    assert (transfer.role, transfer.engine_id, transfer.lease_seconds) == ("kv_both", "east-0", 60)
    assert (transfer.host, transfer.port, transfer.recompute_on_failure) == ("10.0.0.7", 5601, True)


def test_kv_transfer_defaults_are_vllms() -> None:
    first, second = (parse("m", *OWN, "--kv-transfer-config", json.dumps(NIXL)) for _ in range(2))
    assert first.kv_transfer is not None
    assert second.kv_transfer is not None
    assert (first.kv_transfer.host, first.kv_transfer.port, first.kv_transfer.lease_seconds) == ("localhost", 5600, 30)
    assert not first.kv_transfer.recompute_on_failure
    assert first.kv_transfer.engine_id != second.kv_transfer.engine_id
    assert (first.kv_transfer.produces, first.kv_transfer.consumes) == (True, False)
    assert parse("m", *OWN, "--kv-transfer-config", "{}").kv_transfer is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}, "kv_connector must be one of NixlConnector"),
        (NIXL | {"kv_connector_extra_config": {"kv_lease_duration": 0}}, "kv_lease_duration must be seconds above 0"),
        (NIXL | {"kv_connector_extra_config": {"kv_lease_duration": "9"}}, "kv_lease_duration must be seconds"),
    ],
)
def test_a_kv_transfer_config_that_this_worker_cannot_stand_for_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-transfer-config.*{message}"):
        parse("m", *OWN, "--kv-transfer-config", json.dumps(value))


def test_kv_events_config() -> None:
    given = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "hwm": 7}
    events = parse("m", *OWN, "--kv-events-config", json.dumps(given)).kv_events
    assert events is not None
    assert (events.on, events.endpoint, events.replay_endpoint, events.hwm) == (
        True,
        "tcp://*:5557",
        "tcp://*:5558",
        7,
    )
    whole = parse("m", *OWN, "--kv-events-config", "{}", VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="0").kv_events
    assert whole is not None
    assert (whole.on, whole.int_hashes, events.int_hashes) == (False, False, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time-scale", "0"], "--time-scale must be a finite number above 0, got 0.0"),
        (["--time-scale", "nan"], "--time-scale must be a finite number above 0"),
        (["--kv-byte-scale", "0"], "--kv-byte-scale must be a finite number above 0, got 0.0"),
        (["--kv-byte-scale", "-1"], "--kv-byte-scale must be a finite number above 0"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be at least 0"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile needs --ssl-certfile"),
        (["--grpc"], "--grpc: this worker stands for HTTP only"),
        (["--runner", "pooling"], "--runner pooling: this worker stands for a generating model only"),
        (["--convert", "embed"], "--convert: this worker stands for a generating model only"),
        (
            ["--max-model-len", "1000", "--num-gpu-blocks-override", "9"],
            "9 blocks of 16 tokens cannot hold one request",
        ),
    ],
)
def test_values_out_of_bounds_name_their_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse("m", *OWN, *flags)


def test_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(shipped("H20x8").to_wire() | {"accelerator": "B300"}))
    assert parse("m", "--profile", str(path)).profile.accelerator == "B300"
    path.write_text(json.dumps(shipped("H20x8").to_wire() | {"gpus": -1}))
    with pytest.raises(ValueError, match=r"--profile .*mine.yaml: .*\ngpus"):
        parse("m", "--profile", str(path))
    with pytest.raises(ValueError, match=r"nope: neither a shipped profile \(.*H200x8, H20x8.*\) nor a readable"):
        parse("m", "--profile", "nope")


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_max_model_len_may_be_left_to_the_model(text: str) -> None:
    assert parse("m", *OWN, "--max-model-len", text).max_model_len == 131_072


@pytest.mark.parametrize("port", ["x", "70000", "-1"])
def test_a_wrong_environment_names_its_variable(port: str) -> None:
    with pytest.raises(ValueError, match="VLLM_NIXL_SIDE_CHANNEL_PORT must be a whole number up to 65535"):
        parse(*("m", *OWN, "--kv-transfer-config", json.dumps(NIXL)), VLLM_NIXL_SIDE_CHANNEL_PORT=port)
    with pytest.raises(ValueError, match="VLLM_MAX_STOP_STRINGS must be a whole number"):
        parse("m", *OWN, VLLM_MAX_STOP_STRINGS="many")


def test_api_key_from_the_environment() -> None:
    assert parse("m", *OWN, VLLM_API_KEY="secret").api_keys == ("secret",)
    assert parse("m", *OWN, "--api-key", "flag", VLLM_API_KEY="secret").api_keys == ("flag",)


def test_states_may_be_kept_without_an_interval() -> None:
    assert parse("m", *OWN).retention_interval == 0
    assert parse("m", *OWN, "--prefix-cache-retention-interval", "None").retention_interval is None


@pytest.mark.fact("README 2")
def test_kv_offloading_replaces_the_connector() -> None:
    config = parse("m", *OWN, "--kv-transfer-config", json.dumps(NIXL), "--kv-offloading-size", "4")
    assert config.kv_transfer is None, "prefill/decode is off, without a word"
    assert config.exposed.conditions == {"offload", "offload_cpu"}


def test_a_multi_connector_transfers_with_its_first_child_that_can() -> None:
    store = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    both["kv_connector_extra_config"] = {"connectors": [store, NIXL]}  # type: ignore[assignment]  # of mixed values
    config = parse("m", *OWN, "--kv-transfer-config", json.dumps(both))
    assert config.kv_transfer is not None
    assert config.kv_transfer.role == NIXL["kv_role"]
    assert config.exposed.conditions == {"mooncake_store", "nixl"}
