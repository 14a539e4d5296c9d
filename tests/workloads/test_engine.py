"""Revisions, compatibility keys and spec errors: what changes them and what must not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.workloads import wanted
from prfaas.workloads.engine import command_line, compatibility_key, grace_seconds
from prfaas.workloads.engines.vllm import kv_transfer_config
from prfaas.workloads.errors import SpecError
from prfaas.workloads.instance import child
from prfaas.workloads.meta import Owner


def cluster(**spec: Any) -> PrfaaSCluster:
    base: dict[str, Any] = {
        "model": {"name": "m"},
        "gpusPerInstance": 1,
        "engine": {"image": "r.example/vllm:0.33.0"},
    }
    return PrfaaSCluster.model_validate(
        {
            "apiVersion": "prfaas.io/v1alpha1",
            "kind": "PrfaaSCluster",
            "metadata": {"name": "east", "namespace": "llm", "uid": "u"},
            "spec": base | spec,
        }
    )


def engine(**fields: Any) -> PrfaaSCluster:
    return cluster(engine={"image": "r.example/vllm:0.33.0", **fields})


def revision(one: PrfaaSCluster) -> str:
    return wanted.revisions(Owner.of(one), one.spec)["prefill"]


def pd(roles: dict[str, Any], **engine: Any) -> PDCluster:
    return PDCluster.model_validate(
        {
            "apiVersion": "prfaas.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "west", "namespace": "llm", "uid": "u"},
            "spec": {
                "model": {"name": "m"},
                "gpusPerInstance": 1,
                "engine": {"image": "r.example/vllm:0.33.0", **engine},
                "pool": {"instances": 2},
                "roles": roles,
            },
        }
    )


def test_all_instances_of_a_role_have_one_revision_and_carry_it() -> None:
    east = cluster(instances=3)
    for name in ("east-0", "east-7"):
        instance = child(Owner.of(east), east.spec, name, "prefill")
        assert instance["metadata"]["labels"]["prfaas.io/revision"] == revision(east)
        assert instance["spec"]["template"]["metadata"]["labels"]["prfaas.io/revision"] == revision(east)


@pytest.mark.parametrize(
    "same",
    [
        cluster(instances=5),
        cluster(rollout={"maxUnavailable": 3}),
        cluster(paused=True),
    ],
    ids=["instances", "rollout", "paused"],
)
def test_what_no_pod_sees_restarts_no_pod(same: PrfaaSCluster) -> None:
    assert revision(same) == revision(cluster())


@pytest.mark.parametrize(
    "other",
    [
        engine(args=["--x"]),
        engine(env=[{"name": "A", "value": "1"}]),
        engine(shutdownTimeout="90s"),
        cluster(nodePool={"nodeSelector": {"a": "b"}}),
        cluster(podTemplate={"metadata": {"annotations": {"a": "b"}}}),
        cluster(model={"name": "m", "revision": "v2"}),
    ],
    ids=["args", "env", "shutdown", "nodes", "template", "model"],
)
def test_what_a_pod_sees_is_a_new_revision(other: PrfaaSCluster) -> None:
    assert revision(other) != revision(cluster())


def test_the_roles_of_a_pd_pool_have_revisions_of_their_own() -> None:
    before, after = pd({}), pd({"decode": {"args": ["--max-num-seqs", "8"]}})
    old, new = (wanted.revisions(Owner.of(one), one.spec) for one in (before, after))
    assert old["prefill"] == new["prefill"]
    assert old["decode"] != new["decode"]
    assert old["prefill"] != old["decode"]


def test_the_users_arguments_come_last() -> None:
    assert command_line(engine(args=["--max-num-seqs", "8"]).spec, "prefill")[-2:] == ["--max-num-seqs", "8"]


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_a_failed_load_of_kv_is_an_error_in_both_roles(role: str, kv_role: str) -> None:
    config = json.loads(kv_transfer_config(pd({}).spec, role))
    assert (config["kv_role"], config["kv_load_failure_policy"]) == (kv_role, "fail")


def test_the_grace_period_is_longer_than_prestop_and_shutdown_together() -> None:
    spec = engine(shutdownTimeout="10m").spec
    instance = child(Owner("PrfaaSCluster", "n", "e", "u"), spec, "e-0", "prefill")
    pod = instance["spec"]["template"]["spec"]
    prestop = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == grace_seconds(spec, "prefill") > prestop + 600


def test_compatibility_does_not_depend_on_the_registry_or_on_tuning() -> None:
    key = compatibility_key(cluster().spec)
    assert key == compatibility_key(cluster(engine={"image": "other.example/mirror/vllm:0.33.0"}).spec)
    assert key == compatibility_key(engine(args=["--max-num-seqs", "8"]).spec)
    assert key == compatibility_key(cluster(gpusPerInstance=8).spec)


@pytest.mark.parametrize(
    "other",
    [
        engine(args=["--kv-cache-dtype", "fp8"]),
        engine(image="r.example/vllm:0.34.0"),
        cluster(model={"name": "m", "revision": "v2"}),
    ],
    ids=["kv dtype", "engine version", "model revision"],
)
def test_what_changes_kv_cache_changes_the_key(other: PrfaaSCluster) -> None:
    assert compatibility_key(other.spec) != compatibility_key(cluster().spec)


def test_both_ways_to_write_a_flag_give_one_key() -> None:
    split, joined = engine(args=["--kv-cache-dtype", "fp8", "--x"]), engine(args=["--x", "--kv-cache-dtype=fp8"])
    assert compatibility_key(split.spec) == compatibility_key(joined.spec)
    assert compatibility_key(split.spec) == compatibility_key(engine(args=["--kv_cache_dtype", "fp8"]).spec)


FP8 = ["--kv-cache-dtype", "fp8"]


def test_a_pd_pools_key_is_that_of_a_prefill_pool_whose_kv_its_decode_instances_can_read() -> None:
    plain, fp8 = compatibility_key(cluster().spec), compatibility_key(engine(args=FP8).spec)
    assert compatibility_key(pd({}).spec) == plain
    assert compatibility_key(pd({}, args=FP8).spec) == fp8
    assert compatibility_key(pd({role: {"args": FP8} for role in ("prefill", "decode")}).spec) == fp8
    # Of a pool whose roles differ, decode is what a peer's KV cache meets.
    assert compatibility_key(pd({"decode": {"args": FP8}}).spec) == fp8
    assert compatibility_key(pd({"prefill": {"args": FP8}}).spec) == plain


@pytest.mark.parametrize(
    ("roles", "engine_args", "path", "problem"),
    [
        ({"decode": {"args": FP8}}, [], "spec.roles.decode.args", "'auto' for prefill and 'fp8' for decode"),
        ({"prefill": {"args": FP8}}, [], "spec.roles.prefill.args", "'fp8' for prefill and 'auto' for decode"),
        (
            {"prefill": {"args": ["--kv_cache_dtype=auto"]}},
            FP8,
            "spec.roles.prefill.args",
            "'auto' for prefill and 'fp8' for decode",
        ),
    ],
)
def test_roles_that_could_not_use_each_others_kv_are_an_error(
    roles: dict[str, Any], engine_args: list[str], path: str, problem: str
) -> None:
    west = pd(roles, args=engine_args)
    with pytest.raises(SpecError) as caught:
        wanted.revisions(Owner.of(west), west.spec)
    assert caught.value.path == path
    assert f"--kv-cache-dtype is {problem}" in caught.value.problem
    assert caught.value.remedy == "give it in spec.engine.args, for both"


def test_roles_may_differ_in_all_else() -> None:
    west = pd({"decode": {"args": ["--max-num-seqs", "8", *FP8]}}, args=FP8)
    assert wanted.revisions(Owner.of(west), west.spec)


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.podTemplate.spec.containers[0]"),
        ({"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}, "spec.podTemplate.spec.containers"),
        ({"spec": {"containers": None}}, "spec.podTemplate.spec.containers"),
        ({"metadata": {"labels": {"prfaas.io/role": "decode"}}}, "spec.podTemplate.metadata.labels['prfaas.io/role']"),
    ],
)
def test_an_override_that_cannot_be_built_says_where_what_and_what_helps(template: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        revision(cluster(podTemplate=template))
    assert caught.value.path == path
    assert caught.value.problem
    assert caught.value.remedy
