"""What each setting of the engine and the network becomes in the instances' pods."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.workloads.engine import check, command_line
from prfaas.workloads.engines.interface import with_address_of
from prfaas.workloads.errors import SpecError
from prfaas.workloads.instance import child
from prfaas.workloads.meta import Owner
from tests.workloads.pools import IMAGE, pd_pool, prefill_pool


def template(pool: PrfaaSCluster | PDCluster, role: str = "prefill") -> dict[str, Any]:
    """The pod template of an instance."""
    made: dict[str, Any] = child(Owner.of(pool), pool.spec, "east-0", role)["spec"]["template"]
    return made


def container(pool: PrfaaSCluster | PDCluster, role: str = "prefill") -> dict[str, Any]:
    """The engine's container."""
    made: dict[str, Any] = template(pool, role)["spec"]["containers"][0]
    return made


def engine(**settings: Any) -> dict[str, Any]:
    """The engine's container of a prefill pool."""
    return container(prefill_pool({"engine": settings}))


def environment(made: dict[str, Any]) -> dict[str, Any]:
    """Variables by name: a value, or where it comes from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in made["env"]}


def flag(made: dict[str, Any], name: str) -> str | None:
    """The value behind a flag of a container's arguments."""
    words = made["args"]
    return words[words.index(name) + 1] if name in words else None


POD_IP = {"fieldRef": {"fieldPath": "status.podIP"}}


@pytest.mark.fact("README 2")
@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_kv_transfer_is_one_json_value_with_the_real_role(role: str, kv_role: str) -> None:
    made = container(pd_pool({"engine": {"lanes": 8, "kvLease": "90s"}}), role)

    assert json.loads(str(flag(made, "--kv-transfer-config"))) == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 90, "num_threads": 8},
    }
    assert "--kv-offloading-size" not in made["args"]
    assert not any("." in word for word in made["args"] if word.startswith("--"))


def test_a_lease_lasts_three_times_as_long_as_routers_stay_with_a_silent_instance() -> None:
    made = engine()
    probe = made["readinessProbe"]
    lease = json.loads(str(flag(made, "--kv-transfer-config")))["kv_connector_extra_config"]["kv_lease_duration"]

    assert lease >= 3 * probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.fact("6.6 row 58")
def test_what_kv_cache_travels_over_is_named() -> None:
    tcp, rdma = engine(lanes=8), engine(transport="RDMA")

    assert environment(tcp)["UCX_TLS"] == "tcp,sm,self,cuda_copy,cuda_ipc"
    assert environment(rdma)["UCX_TLS"] == "rc,sm,self,cuda_copy,cuda_ipc"
    assert rdma["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "securityContext" not in tcp


@pytest.mark.parametrize(("transport", "protocol"), [("TCP", "tcp"), ("RDMA", "rdma")])
def test_mooncake_names_its_protocol_and_its_bootstrap_port(transport: str, protocol: str) -> None:
    made = engine(connector="Mooncake", transport=transport)
    config = json.loads(str(flag(made, "--kv-transfer-config")))

    assert config["kv_connector"] == "MooncakeConnector"
    assert config["kv_connector_extra_config"] == {"mooncake_protocol": protocol}
    assert environment(made)["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "8998"
    assert environment(made)["VLLM_HOST_IP"] == POD_IP
    assert {"name": "bootstrap", "containerPort": 8998, "protocol": "TCP"} in made["ports"]


def test_mooncakes_lanes_are_its_own_variable() -> None:
    assert environment(engine(connector="Mooncake", lanes=4))["MC_TCP_LANES_PER_PEER"] == "4"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_shapes_kv_cache_is_written_out_and_equal_on_both_sides(role: str) -> None:
    settings = {"attentionBackend": "FLASH_ATTN_MLA", "kvCacheDtype": "fp8", "dtype": "bfloat16", "blockSize": 64}

    made = container(pd_pool({"engine": settings}), role)

    assert [flag(made, name) for name in ("--attention-backend", "--kv-cache-dtype", "--dtype", "--block-size")] == [
        "FLASH_ATTN_MLA",
        "fp8",
        "bfloat16",
        "64",
    ]


@pytest.mark.fact("README 5")
@pytest.mark.parametrize(
    ("backend", "size"), [("FLASHMLA", "64"), ("flashmla", "64"), ("CUTLASS_MLA", "128"), ("FLASH_ATTN", None)]
)
def test_a_backend_with_one_block_size_gets_it(backend: str, size: str | None) -> None:
    assert flag(engine(attentionBackend=backend), "--block-size") == size


@pytest.mark.fact("README 9")
def test_kv_events_are_published_and_replayed_on_sockets_that_bind() -> None:
    made = engine()
    config = json.loads(str(flag(made, "--kv-events-config")))

    assert config == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5657",
    }
    assert {"kv-events": 5557, "kv-replay": 5657}.items() <= {
        port["name"]: port["containerPort"] for port in made["ports"]
    }.items()
    assert "--kv-events-config" not in engine(kvEvents=False)["args"]


def test_prefix_caching_is_said_either_way() -> None:
    assert "--enable-prefix-caching" in engine()["args"]
    assert "--no-enable-prefix-caching" in engine(prefixCaching=False, kvEvents=False)["args"]


def test_ports_of_data_parallel_ranks_do_not_meet() -> None:
    made = engine(parallelism={"data": 4})
    ports = {port["name"]: port["containerPort"] for port in made["ports"]}
    ranks = 32

    taken = [ports[name] + rank for name in ("kv", "kv-events", "kv-replay") for rank in range(ranks)]

    assert len(taken) == len(set(taken))
    assert (flag(made, "--data-parallel-size"), flag(made, "--tensor-parallel-size")) == ("4", "2")


def test_an_engine_may_take_as_long_to_start_as_the_probe_allows() -> None:
    made = engine(startupDeadline="1h")
    probe = made["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    assert environment(made)["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"


def test_queue_limits() -> None:
    made = engine(maxQueuedRequests=64, maxQueuedTokens=1_000_000)

    assert (flag(made, "--max-num-queued-reqs"), flag(made, "--max-num-queued-tokens")) == ("64", "1000000")


def test_tls_mounts_the_secret_and_probes_over_it() -> None:
    pool = prefill_pool({"engine": {"tls": {"secretName": "engine-tls"}}})
    made = container(pool)

    assert flag(made, "--ssl-keyfile") == "/etc/prfaas/tls/tls.key"
    assert flag(made, "--ssl-certfile") == "/etc/prfaas/tls/tls.crt"
    assert {"name": "tls", "mountPath": "/etc/prfaas/tls", "readOnly": True} in made["volumeMounts"]
    assert {"name": "tls", "secret": {"secretName": "engine-tls"}} in template(pool)["spec"]["volumes"]
    assert {made[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "HTTPS"
    }


def test_an_api_key_comes_from_its_secret_and_is_on_no_command_line() -> None:
    made = engine(apiKeySecretRef={"name": "key", "key": "token"})

    assert environment(made)["VLLM_API_KEY"] == {"secretKeyRef": {"name": "key", "key": "token"}}
    assert "--api-key" not in made["args"]


def test_pull_secrets_runtime_class_and_shared_memory() -> None:
    spec = template(
        prefill_pool(
            {
                "engine": {"imagePullSecrets": [{"name": "a"}, {"name": "b"}], "sharedMemory": "16Gi"},
                "nodePool": {"runtimeClassName": "nvidia"},
            }
        )
    )["spec"]

    assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}


def test_claims_take_the_place_of_counted_gpus() -> None:
    claims = [
        {"name": "gpus", "resourceClaimTemplateName": "eight-h200"},
        {"name": "nic", "resourceClaimTemplateName": "nics", "request": "rdma"},
    ]
    pool = prefill_pool(
        {"nodePool": {"resourceClaims": claims}, "engine": {"resources": {"limits": {"memory": "1Gi"}}}}
    )

    assert template(pool)["spec"]["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": "eight-h200"},
        {"name": "nic", "resourceClaimTemplateName": "nics"},
    ]
    assert container(pool)["resources"] == {
        "limits": {"memory": "1Gi"},
        "claims": [{"name": "gpus"}, {"name": "nic", "request": "rdma"}],
    }


def test_kv_cache_is_offered_at_the_pods_own_address() -> None:
    assert environment(engine())["VLLM_NIXL_SIDE_CHANNEL_HOST"] == POD_IP


def test_kv_cache_is_offered_at_the_nodes_address_on_its_network() -> None:
    pool = prefill_pool({"network": {"exposure": "HostNetwork"}})

    assert environment(container(pool))["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    assert template(pool)["spec"]["hostNetwork"] is True
    assert template(pool)["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"


SECOND = {"exposure": "Secondary", "attachment": "fabric/line", "interface": "net1"}


def test_a_second_interface_is_asked_for_and_looked_up() -> None:
    pool = prefill_pool({"network": SECOND})
    made = container(pool)

    assert template(pool)["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "fabric/line@net1"}
    assert made["command"] == with_address_of("net1", ["VLLM_NIXL_SIDE_CHANNEL_HOST"], ["vllm", "serve"])
    assert made["args"][0] == "example/model"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in environment(made)
    assert environment(made)["UCX_NET_DEVICES"] == "net1"


def run(interface: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What stands in front of the engine, with a program that shows its environment and arguments as the engine."""
    show = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    command = with_address_of(interface, ["FIRST", "SECOND"], [sys.executable, "-c", show])
    return subprocess.run(
        [sys.executable, *command[1:], "--model", "$x"], env=variables, capture_output=True, text=True, check=False
    )


def test_the_engine_gets_the_interfaces_address_and_its_own_arguments() -> None:
    shown = run("lo", SECOND="10.1.2.3")

    variables, arguments = json.loads(shown.stdout)
    assert (variables["FIRST"], variables["SECOND"]) == ("127.0.0.1", "10.1.2.3")
    assert arguments == ["--model", "$x"]


def test_an_interface_that_is_not_there_is_told() -> None:
    shown = run("net77")

    assert shown.returncode == 1
    assert "the pod has no interface net77 with an IPv4 address" in shown.stderr


@pytest.mark.fact("README 8")
def test_no_service_variable_reaches_the_engine() -> None:
    assert template(prefill_pool())["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("network", [{}, {"exposure": "HostNetwork"}, SECOND])
def test_the_fake_engines_template_differs_in_image_and_command_only(role: str, network: dict[str, str]) -> None:
    command = ["prfaas", "worker", "serve", "--profile", "H20x8", "--time-scale", "5"]
    settings = {"attentionBackend": "FLASH_ATTN_MLA", "blockSize": 64, "lanes": 4, "maxQueuedRequests": 9}
    real = pd_pool({"engine": settings, "network": network})
    fake = pd_pool({"engine": {**settings, "image": "prfaas:dev", "command": command}, "network": network})

    one, other = (copy.deepcopy(template(pool, role)) for pool in (real, fake))
    commands = [made["spec"]["containers"][0].pop("command") for made in (one, other)]
    images = [made["spec"]["containers"][0].pop("image") for made in (one, other)]
    for made in (one, other):
        # A hash over the whole template.
        del made["metadata"]["labels"]["prfaas.io/revision"]
        made["metadata"]["labels"].pop("prfaas.io/compatibility-key", None)

    assert one == other
    assert images == [IMAGE, "prfaas:dev"]
    assert [words[-len(command) :] for words in commands[1:]] == [command]


@pytest.mark.parametrize(
    ("tag", "refused"), [("v0.29.1", True), ("0.9", True), ("v0.33.0", False), ("v1.0", False), ("nightly", False)]
)
@pytest.mark.fact("6.6 row 53")
@pytest.mark.fact("6.6 row 54")
def test_a_vllm_in_which_hybrid_models_fail_is_refused(tag: str, refused: bool) -> None:
    spec = prefill_pool({"engine": {"image": f"registry.example/vllm-openai:{tag}"}}).spec

    if refused:
        with pytest.raises(SpecError, match="hybrid models fail in it"):
            check(spec)
    else:
        check(spec)


def transfer(**fields: Any) -> list[str]:
    """Arguments with a KV transfer of the user's own."""
    return ["--kv-transfer-config", json.dumps({"kv_role": "kv_producer", **fields})]


@pytest.mark.fact("6.6 row 55")
def test_the_check_that_keeps_corrupt_kv_cache_out_cannot_be_switched_off() -> None:
    args = transfer(kv_connector="NixlConnector", kv_connector_extra_config={"enforce_handshake_compat": False})

    with pytest.raises(SpecError, match="vllm #53912"):
        check(prefill_pool({"engine": {"args": args}}).spec)
    assert "enforce_handshake_compat" not in str(flag(engine(), "--kv-transfer-config"))


@pytest.mark.fact("6.6 row 56")
@pytest.mark.parametrize("connector", ["LMCacheConnectorV1", "LMCacheMPConnector"])
def test_a_connector_whose_answers_differ_is_refused(connector: str) -> None:
    with pytest.raises(SpecError, match="vllm #52617"):
        check(prefill_pool({"engine": {"args": transfer(kv_connector=connector)}}).spec)


def test_nodes_after_the_first_have_no_server_and_the_same_engine() -> None:
    spec = prefill_pool({"gpusPerInstance": 16, "nodesPerInstance": 2}).spec
    first, second = (command_line(spec, "prefill", node_rank=rank, headless=rank == "1") for rank in ("0", "1"))

    assert [word for word in second if word != "--headless"] == [
        "1" if first[index - 1] == "--node-rank" else word for index, word in enumerate(first)
    ]
