"""The operator's chart, rendered by the real Helm: rights, hardening, values."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.datacenters.build import tool
from prfaas.api import router_pod
from prfaas.cli.main import build_parser

CHART = Path(__file__).parents[2] / "charts" / "prfaas-operator"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(tool("helm")), *arguments], capture_output=True, text=True, check=False, timeout=60)


def render(*settings: str) -> list[dict[str, Any]]:
    flags = [word for setting in settings for word in ("--set", setting)]
    done = helm("template", "prfaas", str(CHART), "--namespace", "system", *flags)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


NAMESPACED = ("clusterID=east", "namespaces[0]=llm", "namespaces[1]=more")
CLUSTER_WIDE = ("clusterID=east",)


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] in kinds]


def rules(documents: list[dict[str, Any]], *kinds: str) -> Iterator[dict[str, Any]]:
    for role in of_kind(documents, *kinds):
        yield from role["rules"]


def test_lint_is_clean() -> None:
    done = helm("lint", "--strict", str(CHART), "--set", "clusterID=east")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("settings", [NAMESPACED, CLUSTER_WIDE], ids=["namespaced", "cluster-wide"])
def test_rights_are_named_one_by_one(settings: tuple[str, ...]) -> None:
    for rule in rules(render(*settings), "Role", "ClusterRole"):
        words = {*rule["verbs"], *rule["resources"], *rule["apiGroups"]}
        assert not words & {"*", "escalate", "bind", "impersonate", "deletecollection"}


@pytest.mark.parametrize("settings", [NAMESPACED, CLUSTER_WIDE], ids=["namespaced", "cluster-wide"])
def test_secrets_can_be_read_in_its_own_namespace_only(settings: tuple[str, ...]) -> None:
    documents = render(*settings)
    assert not [rule for rule in rules(documents, "ClusterRole") if "secrets" in rule["resources"]]
    holders = [
        role["metadata"]["namespace"]
        for role in of_kind(documents, "Role")
        if any("secrets" in rule["resources"] for rule in role["rules"])
    ]
    assert holders == ["system"]


def test_with_namespaces_nothing_of_the_operator_reaches_beyond_them() -> None:
    documents = render(*NAMESPACED)
    bindings = of_kind(documents, "ClusterRoleBinding")
    assert {subject["kind"] for binding in bindings for subject in binding["subjects"]} == {"Group"}
    groups = {subject["name"] for binding in bindings for subject in binding["subjects"]}
    assert groups == {"system:serviceaccounts:llm", "system:serviceaccounts:more"}
    where = {role["metadata"]["namespace"] for role in of_kind(documents, "Role")}
    assert where == {"llm", "more", "system", "prfaas-exchange"}


def test_nodes_are_listed_only_where_that_is_asked_for() -> None:
    assert not [rule for rule in rules(render(*NAMESPACED), "Role", "ClusterRole") if "nodes" in rule["resources"]]
    documents = render(*NAMESPACED, "readNodes=true")
    found = [rule for rule in rules(documents, "Role", "ClusterRole") if "nodes" in rule["resources"]]
    assert found == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
    bound = {role["metadata"]["name"] for role in of_kind(documents, "ClusterRoleBinding")}
    assert "prfaas-operator-nodes" in bound
    container = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
    assert build_parser().parse_args([*container["command"][1:], *container["args"]]).read_nodes is True


def test_the_routers_role_is_what_the_router_asks_for() -> None:
    roles = {role["metadata"]["name"]: role["rules"] for role in of_kind(render(*NAMESPACED), "ClusterRole")}
    assert roles == {"prfaas-router": router_pod.role_rules(), "prfaas-router-tokens": router_pod.cluster_role_rules()}


def test_the_pod_is_restricted() -> None:
    pod = of_kind(render(*NAMESPACED), "Deployment")[0]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"startupProbe", "livenessProbe", "readinessProbe", "resources"} <= container.keys()


@pytest.mark.parametrize("settings", [NAMESPACED, CLUSTER_WIDE], ids=["namespaced", "cluster-wide"])
def test_the_program_understands_the_flags_that_the_chart_gives(settings: tuple[str, ...]) -> None:
    container = of_kind(render(*settings), "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
    args = build_parser().parse_args([*container["command"][1:], *container["args"]])
    assert args.cluster_id == "east"
    assert args.watch_namespace == (["llm", "more"] if settings is NAMESPACED else [])
    assert args.image == container["image"]


def test_a_digest_wins_over_the_tag() -> None:
    digest = "sha256:" + "0" * 64
    pod = of_kind(render(*CLUSTER_WIDE, f"image.digest={digest}", "image.tag=x"), "Deployment")[0]
    assert pod["spec"]["template"]["spec"]["containers"][0]["image"].endswith(f"@{digest}")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replicas=1", "clusterID"),
        ("clusterID=East", "clusterID"),
        ("clusterID=east,replicas=0", "replicas"),
        ("clusterID=east,namespace=llm", "namespace"),
        ("clusterID=east,image.pullPolicy=Sometimes", "pullPolicy"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, words: str) -> None:
    done = helm("template", "prfaas", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr
