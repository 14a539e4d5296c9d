"""SGLang, the second engine: its flags are SGLang's own, with the values that the spec means.

Its parser needs its whole package; the flags here are read by argparse from a list taken from its source.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.workloads.engine import check, command_line
from prfaas.workloads.engines import sglang_rules
from prfaas.workloads.errors import SpecError
from prfaas.workloads.instance import child
from prfaas.workloads.meta import Owner
from tests.workloads.pools import pd_pool

FLAGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "sglang-0.5.23" / "flags.json").read_text(encoding="utf-8")
)["flags"]


def parser() -> argparse.ArgumentParser:
    """A parser that knows the flags of the list and no other."""
    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, entry in FLAGS.items():
        names = [name, *entry.get("aliases", ())]
        if entry["takes"] == "0":
            made.add_argument(*names, action="store_true")
        else:
            made.add_argument(*names, choices=entry.get("choices"))
    return made


def pool(**engine: Any) -> Any:
    """A pool of SGLang instances that is not behind our router."""
    return pd_pool(
        {
            "model": {"name": "example/model", "servedName": "model", "revision": "r7", "maxModelLength": 131584},
            "engine": {"kind": "SGLang", "image": "registry.example/sglang:v0.5.23", **engine},
            "router": {"replicas": 0},
        }
    )


def parsed(made: Any, role: str = "prefill", **node: Any) -> argparse.Namespace:
    """The flags of an instance's command line, all of which the parser must know."""
    words = command_line(made.spec, role, **node)
    assert words[:3] == ["python3", "-m", "sglang.launch_server"]
    return parser().parse_args(words[3:])


def container(made: Any, role: str = "prefill") -> dict[str, Any]:
    """The engine's container."""
    instance = child(Owner.of(made), made.spec, "east-0", role)
    found: dict[str, Any] = instance["spec"]["template"]["spec"]["containers"][0]
    return found


def environment(made: Any) -> dict[str, Any]:
    """The variables of a prefill instance."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(made)["env"]}


engines = st.fixed_dictionaries(
    {},
    optional={
        "connector": st.sampled_from(["Nixl", "Mooncake"]),
        "transport": st.sampled_from(["TCP", "RDMA"]),
        "attentionBackend": st.sampled_from(["fa3", "flashmla", "flashinfer"]),
        "kvCacheDtype": st.sampled_from(sglang_rules.CACHE_TYPES),
        "dtype": st.sampled_from(["auto", "half", "bfloat16"]),
        "blockSize": st.sampled_from([1, 64]),
        "kvEvents": st.booleans(),
        "parallelism": st.sampled_from([{}, {"tensor": 4, "data": 2}, {"pipeline": 2}]),
        "port": st.integers(1, 65535),
        "tls": st.just({"secretName": "tls"}),
        "apiKeySecretRef": st.just({"name": "key", "key": "token"}),
    },
)


@given(engines, st.sampled_from(["prefill", "decode"]))
@settings(deadline=None)
def test_every_line_is_sglangs_and_says_what_the_spec_means(engine: dict[str, Any], role: str) -> None:
    made = pool(**engine)
    check(made.spec)
    spec, found = made.spec.engine, parsed(made, role)

    assert (found.model_path, found.served_model_name, found.revision) == ("example/model", "model", "r7")
    assert (found.host, found.port, found.context_length) == ("0.0.0.0", str(spec.port), "131584")
    assert found.disaggregation_mode == role
    assert found.disaggregation_bootstrap_port == ("8998" if role == "prefill" else None)
    assert (found.dtype, found.kv_cache_dtype) == (spec.dtype, spec.kv_cache_dtype)
    assert found.attention_backend == spec.attention_backend
    assert found.page_size == (None if spec.block_size is None else str(spec.block_size))
    sizes = [int(each or 1) for each in (found.tp_size, found.pp_size, found.dp_size)]
    assert sizes[0] * sizes[1] * sizes[2] == 8
    assert (found.kv_events_config is not None) == spec.kv_events
    assert (found.ssl_keyfile is not None) == (spec.tls is not None)
    assert found.api_key == (None if spec.api_key_secret_ref is None else "$(PRFAAS_ENGINE_API_KEY)")
    assert found.enable_metrics


@pytest.mark.parametrize(
    ("connector", "transport", "backend"),
    [
        ("Nixl", "TCP", "nixl"),
        ("Nixl", "RDMA", "nixl"),
        ("Mooncake", "TCP", "mooncake_tcp"),
        ("Mooncake", "RDMA", "mooncake"),
    ],
)
def test_the_transfer_backend_is_connector_and_transport(connector: str, transport: str, backend: str) -> None:
    made = pool(connector=connector, transport=transport)

    assert parsed(made).disaggregation_transfer_backend == backend
    assert ("UCX_TLS" in environment(made)) == (connector == "Nixl")


def test_lanes_are_nixls_threads_or_mooncakes_lanes() -> None:
    assert environment(pool(lanes=4))["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] == '{"num_threads":"4"}'
    assert environment(pool(lanes=4, connector="Mooncake"))["MC_TCP_LANES_PER_PEER"] == "4"


def test_the_prefill_instances_address_and_bootstrap_port_are_what_decode_needs() -> None:
    made = pool()

    assert environment(made)["SGLANG_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "bootstrap" in [port["name"] for port in container(made)["ports"]]
    assert "bootstrap" not in [port["name"] for port in container(made, "decode")["ports"]]


def test_the_key_is_on_the_command_line_by_its_variable_alone() -> None:
    made = pool(apiKeySecretRef={"name": "key", "key": "token"})

    assert environment(made)["PRFAAS_ENGINE_API_KEY"] == {"secretKeyRef": {"name": "key", "key": "token"}}


def test_no_prefix_cache_is_no_radix_cache() -> None:
    assert parsed(pool(prefixCaching=False, kvEvents=False)).disable_radix_cache
    assert not parsed(pool()).disable_radix_cache


def test_nodes_of_one_instance_meet_at_the_first() -> None:
    made = pd_pool(
        {
            "gpusPerInstance": 16,
            "nodesPerInstance": 2,
            "engine": {"kind": "SGLang", "image": "registry.example/sglang:v0.5.23"},
            "router": {"replicas": 0},
        }
    )

    found = parsed(made, node_rank="$(LWS_WORKER_INDEX)", headless=True)

    assert (found.tp_size, found.nnodes, found.node_rank) == ("16", "2", "$(LWS_WORKER_INDEX)")
    assert found.dist_init_addr == "$(LWS_LEADER_ADDRESS):20000"


@pytest.mark.parametrize("flag", sorted({*sglang_rules.FIELDS, *sglang_rules.BREAKS}))
def test_what_the_operator_decides_is_refused_under_every_name(flag: str) -> None:
    shorter = [flag[:length] for length in range(6, len(flag)) if flag[:length] not in FLAGS]

    for name in (flag, f"{flag}=1", *shorter):
        with pytest.raises(SpecError, match=r"^spec\.engine\.args: "):
            check(pool(args=[name, "1"]).spec)


def test_no_flag_hides_in_the_command() -> None:
    with pytest.raises(SpecError, match=r"^spec\.engine\.command: --quantization is a flag"):
        check(pool(command=["python3", "-m", "sglang.launch_server", "--quantization", "fp8"]).spec)


@pytest.mark.parametrize("flag", ["--mem-fraction-static", "--trust-remote-code", "--context-length", "--quantization"])
def test_other_flags_of_sglang_are_let_through(flag: str) -> None:
    check(pool(args=[flag]).spec)


def test_the_cache_types_that_are_let_through_are_sglangs() -> None:
    assert set(sglang_rules.CACHE_TYPES) == set(FLAGS["--kv-cache-dtype"]["choices"])


def test_its_health_may_take_the_time_of_a_token() -> None:
    assert {container(pool())[probe]["timeoutSeconds"] for probe in ("startupProbe", "readinessProbe")} == {10}
