"""`prfaas render`: what the operator would create, from files alone, and what is wrong with them."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.api import labels
from prfaas.api.policy import RoutingPolicy
from prfaas.cli.main import main
from prfaas.cli.render import UNKNOWN_UID, shell_word

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "manifests" / "samples"
POOL: dict[str, Any] = {
    "apiVersion": "prfaas.io/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "h20", "namespace": "serving"},
    "spec": {
        "model": {"name": "example/model"},
        "gpusPerInstance": 8,
        "engine": {"image": "registry.example/vllm:0.33.0"},
        "pool": {"instances": 3, "initialPrefill": 1},
    },
}


def pool(**spec: Any) -> dict[str, Any]:
    return POOL | {"spec": POOL["spec"] | spec}


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes documents into one file; returns its path."""

    def write(*documents: dict[str, Any], name: str = "pools.yaml") -> str:
        (tmp_path / name).write_text(yaml.safe_dump_all(documents))
        return str(tmp_path / name)

    return write


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["render", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said when nothing can be rendered; nothing is printed then."""
    assert main(["render", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def names(objects: list[dict[str, Any]]) -> list[str]:
    return [f"{obj['kind']}/{obj['metadata']['name']}" for obj in objects]


def test_everything_that_the_operator_creates_is_printed(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(capsys, "-f", written(POOL))
    found = names(objects)
    assert {"Deployment/h20-0", "Deployment/h20-1", "Deployment/h20-2", "Deployment/h20-router"} <= set(found)
    assert f"ConfigMap/{labels.policy_config_map('h20')}" in found
    assert found[-1] == "ConfigMap/pdcluster.serving.h20", "and what peers may read"
    roles = {obj["metadata"]["labels"].get(labels.ROLE) for obj in objects}
    assert {labels.ROLE_PREFILL, labels.ROLE_DECODE, labels.ROLE_ROUTER} <= roles
    owners = {owner["uid"] for obj in objects for owner in obj["metadata"].get("ownerReferences", ())}
    assert owners == {UNKNOWN_UID}


def test_the_policy_is_the_first_one(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    remote = [{"linkRef": "east", "initialThreshold": 19_400}]
    objects = rendered(capsys, "-f", written(pool(remotePrefill=remote)))
    (data,) = (obj["data"] for obj in objects if obj["metadata"]["name"] == labels.policy_config_map("h20"))
    policy = RoutingPolicy.model_validate_json(data[labels.POLICY_KEY])
    assert policy.order == (1, 1)
    assert [(each.link, each.tokens) for each in policy.thresholds] == [("east", 19_400)]


def test_command_lines_are_one_a_line_and_of_the_role_asked_for(
    written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(POOL)
    assert main(["render", "-f", file, "-o", "args"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2, "one of each role, however many instances there are"
    assert all(shlex.split(line)[:3] == ["vllm", "serve", "example/model"] for line in lines)
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        assert main(["render", "-f", file, "-o", "args", "--role", role]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert f'"kv_role":"{kv_role}"' in line
        assert line in lines


def test_each_kind_of_node_of_a_group_has_a_line_that_a_shell_takes(
    written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    east = pool(gpusPerInstance=16, nodesPerInstance=2, instances=2) | {"kind": "PrfaaSCluster"}
    del east["spec"]["pool"]
    assert main(["render", "-f", written(east), "-o", "args"]) == 0
    leader, worker = capsys.readouterr().out.splitlines()
    assert "--node-rank 0 " in leader
    assert '--node-rank "${LWS_WORKER_INDEX}"' in worker
    shell = f"vllm() {{ printf '%s\\n' \"$@\"; }}; LWS_LEADER_ADDRESS=lead LWS_WORKER_INDEX=1; {worker}"
    words = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == "lead"


def test_a_line_is_the_engines_own_whatever_runs_before_it(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    network = {"exposure": "Secondary", "attachment": "line", "interface": "net1"}
    assert main(["render", "-f", written(pool(network=network)), "-o", "args"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("vllm serve example/model ") for line in lines)


def test_yaml_of_one_role_only(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(capsys, "-f", written(POOL), "--role", "prefill")
    assert objects
    assert {obj["metadata"]["labels"][labels.ROLE] for obj in objects} == {"prefill"}


def test_the_samples_render_and_what_is_not_ours_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(SAMPLES / side) for side in ("east", "west")]
    assert main(["render", "-f", *folders]) == 0
    printed = capsys.readouterr()
    assert "# of " in printed.out
    assert "(Kustomization): not an object of the operator's, left out" in printed.err
    assert "(InterClusterLink east): nothing is created before its peer was read" in printed.err


def test_documents_lists_and_standard_input(
    written: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pool() | {"metadata": {"name": "other"}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [POOL, other]}
    two_files = [written(POOL, name="one.yaml"), written(other, name="other.yaml")]
    for files in ([written(POOL, other)], [written(listed, name="list.yaml")], two_files):
        found = names(rendered(capsys, "-f", *files))
        assert {"Deployment/h20-0", "Deployment/other-0"} <= set(found)
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(other)))
    objects = rendered(capsys, "-n", "elsewhere", "-f", "-")
    assert {obj["metadata"]["namespace"] for obj in objects} == {"elsewhere", "prfaas-exchange"}


def test_an_object_from_the_api_server_gives_its_uid(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    live = POOL | {"metadata": {"name": "h20", "namespace": "serving", "uid": "abc", "generation": 3}}
    objects = rendered(capsys, "-f", written(live))
    assert {owner["uid"] for obj in objects for owner in obj["metadata"].get("ownerReferences", ())} == {"abc"}


def test_the_installation_shows_in_the_routers_pods(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--image", "registry.example/own:1", "--envoy-image", "registry.example/envoy:2", "--cluster-id", "west"]
    objects = rendered(capsys, "-f", written(POOL), *words)
    (router,) = (obj for obj in objects if names([obj]) == ["Deployment/h20-router"])
    containers = {each["name"]: each["image"] for each in router["spec"]["template"]["spec"]["containers"]}
    assert containers == {"envoy": "registry.example/envoy:2", "picker": "registry.example/own:1"}
    assert '"clusterID":"west"' in objects[-1]["data"][labels.EXCHANGE_KEY]


def test_the_default_image_is_that_of_the_chart(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chart = ROOT / "charts" / "prfaas-operator"
    image = yaml.safe_load((chart / "values.yaml").read_text())["image"]["repository"]
    assert yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"] == version("prfaas-operator")
    assert f"image: {image}:{version('prfaas-operator')}\n" in yaml.safe_dump_all(rendered(capsys, "-f", written(POOL)))


def test_warnings_go_to_standard_error(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(POOL)
    assert main(["render", "-f", file]) == 0
    warned = capsys.readouterr().err
    assert f"prfaas render: {file} (PDCluster h20): warning: spec.engine.attentionBackend: " in warned


def test_a_paused_pool_is_rendered_and_told(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", written(pool(paused=True))]) == 0
    printed = capsys.readouterr()
    assert "kind: Deployment" in printed.out
    assert "spec.paused is true: the operator writes nothing of this until it is false" in printed.err


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (pool(gpusPerInstance=0), "spec.gpusPerInstance: Input should be greater than or equal to 1"),
        (pool(gpus=8), "spec.gpus: there is no such field"),
        (pool(pool={"instances": 1}), "spec.pool: instances must be 0 (the pool is off) or at least"),
        (POOL | {"apiVersion": "prfaas.io/v9"}, "apiVersion: Input should be 'prfaas.io/v1alpha1'"),
        (POOL | {"metadata": {}}, "metadata.name: is missing"),
        (POOL | {"kind": "PdCluster"}, "kind: there is no PdCluster; write PrfaaSCluster, PDCluster or"),
        (
            pool(podTemplate={"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}),
            "spec.podTemplate.spec.containers: the container 'engine' was removed; keep it: it is the instance",
        ),
    ],
)
def test_what_is_wrong_is_said_with_file_document_and_field(
    document: dict[str, Any], said: str, written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(POOL, document)
    err = refused(capsys, "-f", file)
    name = document["metadata"].get("name")
    assert f"prfaas render: {file}, document 2 ({document['kind']}{f' {name}' if name else ''}): {said}" in err


def test_everything_that_is_wrong_is_said_at_once(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "-f", written(pool(gpusPerInstance=0, gpus=8), pool(nodesPerInstance=3)))
    for said in ("gpusPerInstance: Input", "gpus: there is no such field", "multiple of nodesPerInstance"):
        assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "pools.yaml: is no YAML: "),
        ("- a\n", "pools.yaml: is no object: a mapping"),
        ("---\n# nothing\n", "no objects in "),
        ("kind: List\nitems: [1]\n", "pools.yaml, items[0]: is no object"),
    ],
)
def test_a_file_without_objects_is_told(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pools.yaml").write_text(text)
    assert said in refused(capsys, "-f", str(tmp_path / "pools.yaml"))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/absent: No such file or directory" in refused(capsys, "-f", "/absent")
    assert "no *.yaml in this folder" in refused(capsys, "-f", str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    assert "binary.yaml: is not text" in refused(capsys, "-f", str(tmp_path))


def test_a_reader_that_has_enough_is_no_error(written: Any) -> None:
    many = written(*(pool() | {"metadata": {"name": f"pool{number}"}} for number in range(8)))
    command = f"{sys.executable} -m prfaas.cli.main render -f {many} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "---\n"
    assert "Error" not in done.stderr


@pytest.mark.parametrize(
    ("word", "in_a_shell"),
    [
        ("plain", "plain"),
        ("", "''"),
        ("two words", "'two words'"),
        ("$(A)", '"${A}"'),
        ("a b$(A):1", "'a b'\"${A}\":1"),
        ("$$(A)", "'$''(A)'"),
        ("$HOME", "'$HOME'"),
    ],
)
def test_words_for_a_shell(word: str, in_a_shell: str) -> None:
    assert shell_word(word) == in_a_shell
