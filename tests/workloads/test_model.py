"""The model of a pool: the path that the engine loads, what an instance does before, and the Jobs."""

from __future__ import annotations

import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.cli.main import build_parser
from prfaas.workloads import model, wanted
from prfaas.workloads.engine import command_line, compatibility_key
from prfaas.workloads.instance import child, revision
from prfaas.workloads.meta import Owner
from prfaas.workloads.model import Fetcher, Place

pytestmark = pytest.mark.slow

OWNER = Owner("PrfaaSCluster", "serving", "east", "uid-1")
FETCHER = Fetcher("registry.example/prfaas:0.1.0", "Always")
CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
HOST = {"hostPath": {"path": "/var/lib/models"}}
OWN = {"ephemeral": {"sizeLimit": "200Gi"}}


def spec(**changes: Any) -> PrfaaSClusterSpec:
    """A pool with a model from Hugging Face; `model` is merged, everything else replaced."""
    own = {"name": "org/model", "source": "hf://org/model", "cache": HOST} | changes.pop("model", {})
    whole = {
        "model": {name: value for name, value in own.items() if value is not None},
        "gpusPerInstance": 8,
        "engine": {"image": "registry.example/vllm:0.33.0"},
        **changes,
    }
    return PrfaaSClusterSpec.model_validate(whole)


def pod_of(pool: PoolSpec) -> dict[str, Any]:
    found: dict[str, Any] = child(OWNER, pool, "east-0", "prefill")["spec"]["template"]["spec"]
    return found


def initial(pool: PoolSpec) -> dict[str, Any]:
    (found,) = pod_of(pool)["initContainers"]
    return dict(found)


# The path


def test_without_a_source_the_engine_is_given_the_name_and_nothing_is_mounted() -> None:
    pool = spec(model={"source": None, "cache": None, "name": "/opt/model"})
    assert model.engine_model(pool) == "/opt/model"
    pod = pod_of(pool)
    assert "initContainers" not in pod
    assert not [volume for volume in pod["volumes"] if volume["name"] == "model"]


@pytest.mark.parametrize("cache", [CLAIM, HOST, OWN])
@pytest.mark.parametrize("source", ["hf://other/place", "s3://bucket/x"])
def test_the_path_is_of_name_and_revision_alone(cache: dict[str, Any], source: str) -> None:
    pool = spec(model={"source": source, "cache": cache, "revision": "v2"})
    assert model.engine_model(pool) == "/models/org/model/v2"
    assert "/models/org/model/v2" in command_line(pool, "prefill")


def test_both_ends_have_one_key_wherever_their_models_come_from() -> None:
    west = PDClusterSpec.model_validate(
        {
            "model": {"name": "org/model", "source": "pvc://models/org/model"},
            "gpusPerInstance": 8,
            "engine": {"image": "registry.example/vllm:0.33.0"},
            "pool": {"instances": 2},
        }
    )
    assert compatibility_key(west) == compatibility_key(spec())
    assert compatibility_key(west) != compatibility_key(spec(model={"revision": "v2"}))


names = st.text(st.sampled_from("aB0._-/ é:\n"), min_size=1, max_size=12)


@given(names, names, names, names)
def test_paths_stay_inside_and_differ_where_names_do(name: str, revision: str, other: str, another: str) -> None:
    def path(name: str, revision: str) -> str:
        return model.folder(spec(model={"name": name, "revision": revision}).model)

    found = path(name, revision)
    assert all(part not in ("", ".", "..") for part in found.split("/"))
    assert Path("/models", found).is_relative_to("/models")
    assert " " not in found
    assert (found == path(other, another)) == ((name, revision) == (other, another))


# Instances


@pytest.mark.parametrize("cache", [CLAIM, HOST])
def test_an_instance_waits_for_the_marker_with_a_shell_of_its_engines_image(cache: dict[str, Any]) -> None:
    pool = spec(model={"cache": cache})
    container = initial(pool)
    assert (container["name"], container["image"]) == ("model", pool.engine.image)
    assert container["command"][-1] == "/models/org/model/main/.prfaas-complete.json"
    assert container["volumeMounts"] == [{"name": "model", "mountPath": "/models", "readOnly": True}]
    engine = pod_of(pool)["containers"][0]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in engine["volumeMounts"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine["env"]
    assert "envFrom" not in container


def test_the_shell_waits_until_the_marker_is_there_and_stops_when_told(tmp_path: Path) -> None:
    command = initial(spec())["command"][:-1]
    marker = tmp_path / "marker"
    waiting = subprocess.Popen([*command, str(marker)])
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.3)
    marker.touch()
    assert waiting.wait(10) == 0
    marker.unlink()
    stopped = subprocess.Popen([*command, str(marker)])
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(0.3)
    began = time.monotonic()
    stopped.terminate()
    assert stopped.wait(10) == 143
    assert time.monotonic() - began < 1.5


def test_an_instance_of_its_own_folder_fetches_with_the_secret_and_the_limit() -> None:
    pool = spec(model={"cache": OWN, "secretRef": {"name": "hugging-face"}, "endpoint": "https://mirror.example"})
    container = initial(pool)
    assert container["envFrom"] == [{"secretRef": {"name": "hugging-face"}}]
    assert container["securityContext"]["runAsNonRoot"] is True
    args = build_parser().parse_args(container["command"][1:])
    assert (args.source, str(args.to), args.revision) == ("hf://org/model", "/models/org/model/main", "main")
    assert (args.endpoint, args.size_limit) == ("https://mirror.example", 200 * 2**30)
    assert {"name": "model", "emptyDir": {"sizeLimit": "200Gi"}} in pod_of(pool)["volumes"]


def test_a_claim_is_mounted_where_the_engine_looks() -> None:
    pool = spec(model={"source": "pvc://models/weights/long", "cache": None})
    pod = pod_of(pool)
    assert "initContainers" not in pod
    mount = {"name": "model", "mountPath": "/models/org/model/main", "readOnly": True, "subPath": "weights/long"}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]


def test_a_user_may_let_the_engine_go_online() -> None:
    engine = {"image": "x", "env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}
    found = [each for each in pod_of(spec(engine=engine))["containers"][0]["env"] if each["name"] == "HF_HUB_OFFLINE"]
    assert found == [{"name": "HF_HUB_OFFLINE", "value": "0"}]


def test_every_node_of_a_group_waits() -> None:
    group = child(OWNER, spec(gpusPerInstance=16, nodesPerInstance=2), "east-0", "prefill")["spec"]
    for part in ("leaderTemplate", "workerTemplate"):
        assert [each["name"] for each in group["leaderWorkerTemplate"][part]["spec"]["initContainers"]] == ["model"]


# The fetcher's image


def test_a_new_operator_restarts_no_instance() -> None:
    pool = spec(model={"cache": OWN})
    instances = {"east-0": "prefill"}
    old = model.with_fetcher(wanted.prfaas_cluster(OWNER, pool, instances), FETCHER)
    upgraded = model.with_fetcher(wanted.prfaas_cluster(OWNER, pool, instances), Fetcher("prfaas:2"), old)
    assert upgraded == old
    changed = spec(model={"cache": OWN, "revision": "v2"})
    assert revision(OWNER, changed, "prefill") != revision(OWNER, pool, "prefill")
    rolled = model.with_fetcher(wanted.prfaas_cluster(OWNER, changed, instances), Fetcher("prfaas:2"), old)
    images = [
        container["image"]
        for obj in rolled
        if obj["kind"] == "Deployment"
        for container in obj["spec"]["template"]["spec"]["initContainers"]
    ]
    assert images == ["prfaas:2"]


def test_groups_get_the_image_at_every_node() -> None:
    pool = spec(gpusPerInstance=16, nodesPerInstance=2, model={"cache": OWN})
    (group,) = model.with_fetcher([child(OWNER, pool, "east-0", "prefill")], FETCHER)
    for part in ("leaderTemplate", "workerTemplate"):
        (container,) = group["spec"]["leaderWorkerTemplate"][part]["spec"]["initContainers"]
        assert (container["image"], container["imagePullPolicy"]) == (FETCHER.image, "Always")


# Jobs


def job(pool: PoolSpec, node: str | None = None, fetcher: Fetcher = FETCHER) -> dict[str, Any]:
    return model.job(OWNER, pool, Place(node), fetcher)


def test_a_nodes_job_is_pinned_there_and_bears_the_pools_taints() -> None:
    pool = spec(nodePool={"tolerations": [{"key": "gpu", "operator": "Exists"}], "nodeSelector": {"gpu": "h200"}})
    made = job(pool, "node-1")
    pod = made["spec"]["template"]["spec"]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert made["metadata"]["annotations"] == {"prfaas.io/node": "node-1"}
    assert pod["volumes"][0]["hostPath"] == {"path": "/var/lib/models", "type": "DirectoryOrCreate"}


def test_a_claims_job_is_where_the_instances_are_and_without_root() -> None:
    pod = job(spec(model={"cache": CLAIM}, nodePool={"nodeSelector": {"gpu": "h200"}}))["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["fsGroup"]) == (True, 65532)


@pytest.mark.parametrize("cache", [CLAIM, HOST])
def test_a_job_is_confined_and_holds_its_secret_by_name_alone(cache: dict[str, Any]) -> None:
    made = job(spec(model={"cache": cache, "secretRef": {"name": "token"}}), "node-1")
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["envFrom"] == [{"secretRef": {"name": "token"}}]
    assert (container["image"], container["imagePullPolicy"]) == (FETCHER.image, "Always")
    args = build_parser().parse_args(container["command"][1:])
    assert (args.command, str(args.report)) == ("fetch", "/dev/termination-log")
    assert shlex.join(container["command"]).count("token") == 0
    assert pod["restartPolicy"] == "OnFailure"


def test_what_changes_the_template_makes_another_job_but_not_another_model() -> None:
    before = job(spec(), "node-1")
    others = [
        job(spec(), "node-2"),
        job(spec(), "node-1", Fetcher("prfaas:2")),
        job(spec(model={"secretRef": {"name": "token"}}), "node-1"),
        job(spec(nodePool={"tolerations": [{"key": "a", "operator": "Exists"}]}), "node-1"),
    ]
    assert len({each["metadata"]["name"] for each in [before, *others]}) == 5
    assert len({each["metadata"]["labels"]["prfaas.io/model"] for each in [before, *others]}) == 1
    moved = [spec(model={"revision": "v2"}), spec(model={"source": "s3://bucket/x"}), spec(model={"cache": CLAIM})]
    assert len({model.identity(each) for each in [spec(), *moved]}) == 4


def test_names_fit_for_the_longest_pool() -> None:
    owner = Owner("PrfaaSCluster", "serving", "n" * 40, "uid")
    assert len(model.job(owner, spec(), Place("node"), FETCHER)["metadata"]["name"]) <= 63
