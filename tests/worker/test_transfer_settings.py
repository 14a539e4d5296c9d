"""`--kv-transfer-config` and its variables, and the hash that peers compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.kv.settings import draft_model, read_kv_transfer
from tests.facts import facts
from tests.worker.rig import PREFILL, config

BASE = {"kv_role": "kv_producer"}


@pytest.mark.parametrize(
    ("connector", "mode"),
    [
        ("NixlConnector", "pull"),
        ("NixlPullConnector", "pull"),
        ("NixlPushConnector", "push"),
        ("MooncakeConnector", "mooncake"),
    ],
)
def test_the_connector_says_how_caches_move(connector: str, mode: str) -> None:
    read = read_kv_transfer(BASE | {"kv_connector": connector}, {})
    assert read is not None
    assert (read.mode, read.lanes, read.abort_seconds, read.bootstrap_port) == (mode, 4, 480, 8998)


def test_the_extra_configuration_of_nixl() -> None:
    known = {
        "num_threads": 8,
        "kv_lease_duration": 60,
        "enforce_handshake_compat": False,
        "push_registration_timeout": 20,
        "engine_ttl": -1,
        "backends": ["UCX"],
    }
    read = read_kv_transfer(BASE | {"kv_connector": "NixlPushConnector", "kv_connector_extra_config": known}, {})
    assert read is not None
    assert (read.lanes, read.lease_seconds, read.enforce_compatibility) == (8, 60, False)
    assert (read.push_registration_seconds, read.engine_ttl) == (20, -1)
    ttl = {"kv_connector": "NixlPushConnector", "kv_connector_extra_config": {"decoder_kv_blocks_ttl": 100}}
    by_default = read_kv_transfer(BASE | ttl, {})
    assert by_default is not None
    assert by_default.push_registration_seconds == 100


def test_the_environment_of_mooncake() -> None:
    environment = {
        "VLLM_HOST_IP": "10.0.0.7",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": "9000",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "60",
        "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "2.5",
        "MC_TCP_LANES_PER_PEER": "16",
    }
    extra = {"mooncake_protocol": "tcp", "bootstrap_server_address": "10.0.0.1:8998"}
    given = BASE | {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": extra}
    read = read_kv_transfer(given, environment)
    assert read is not None
    assert (read.host, read.bootstrap_port, read.abort_seconds, read.bootstrap_seconds) == ("10.0.0.7", 9000, 60, 2.5)
    assert (read.lanes, read.bootstrap_address) == (16, "10.0.0.1:8998")


@pytest.mark.parametrize(
    ("fields", "environment", "said"),
    [
        ({"kv_connector": "P2pNcclConnector"}, {}, "kv_connector must be one of"),
        ({"kv_role": "kv_neither"}, {}, "kv_role must be one of kv_producer, kv_consumer, kv_both"),
        ({"kv_connector_extra_config": {"num_threads": "4"}}, {}, "num_threads must be a whole number"),
        ({"kv_connector_extra_config": {"enforce_handshake_compat": 0}}, {}, "must be true or false"),
        ({"kv_connector_extra_config": {"kv_lease_duration": 0}}, {}, "kv_lease_duration must be seconds above 0"),
        ({"kv_connector_extra_config": {"engine_ttl": "1h"}}, {}, "engine_ttl must be a number of seconds"),
        ({"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}, {}, "does not read back"),
        ({"kv_connector_extra_config": {"bootstrap_server_address": "h"}}, {}, "must be host:port"),
        ({"kv_connector": "MooncakeConnector"}, {"MC_TCP_LANES_PER_PEER": "17"}, "whole number up to 16"),
        ({"kv_connector": "MooncakeConnector"}, {"MC_TCP_LANES_PER_PEER": "0"}, "from 1 to 16"),
        ({}, {"VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "soon"}, "must be seconds above 0"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], environment: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_kv_transfer(BASE | {"kv_connector": "NixlConnector"} | fields, environment)


EAGLE = {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"model": "org/another"}, True),
        ({"model": "/models/org/model"}, True),
        ({"dtype": "float16"}, True),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"attention_backend": "FLASHMLA"}, True),
        ({"hybrid_manager": False}, True),
        ({"draft_model": draft_model(EAGLE)}, True),
        ({"kv_transfer": config("kv_producer", transfer={"mode": "push"}).kv_transfer}, True),
        ({"draft_model": draft_model({"method": "ngram"})}, False),
        ({"tensor_parallel_size": 8}, False),
        ({"block_size": 64}, False),
        ({"num_gpu_blocks": 100_000}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_the_hash_has_what_vllms_has(changes: dict[str, Any], differs: bool) -> None:
    assert (replace(PREFILL, **changes).compatibility != PREFILL.compatibility) == differs


def test_of_a_draft_model_its_length_of_guessing_may_differ() -> None:
    assert draft_model(EAGLE) == draft_model(EAGLE | {"num_speculative_tokens": 5})
    named = next(text for text in facts("kv_transfer")["nixl_compat_hash"]["inputs"] if text.startswith("speculative"))
    assert all(field in named for field in draft_model(EAGLE) or ())
