"""What we write into containers is what our own programs understand: worker and router."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.api.pd_cluster import PDCluster
from prfaas.cli.main import build_parser
from prfaas.workloads import engine, router
from prfaas.workloads.meta import Owner
from prfaas.workloads.router import RouterSettings

WEST = PDCluster.model_validate(
    {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "west", "namespace": "llm", "uid": "u"},
        "spec": {
            "model": {"name": "example/model", "servedName": "model", "maxModelLength": 131072},
            "gpusPerInstance": 8,
            "engine": {"image": "i", "command": ["prfaas", "worker", "serve"], "args": ["--profile", "H20x8"]},
            "pool": {"instances": 2},
        },
    }
)
SETTINGS = RouterSettings(operator_image="o", envoy_image="e", cluster_role="r", policy_writers=("a", "b"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_worker_understands_the_engines_command_line(role: str) -> None:
    words = engine.command_line(WEST.spec, role)
    assert words[:3] == ["prfaas", "worker", "serve"]
    args = build_parser().parse_args(words[1:])
    assert args.command == "worker"


def test_the_routers_commands_are_understood() -> None:
    deployment = router.objects(Owner.of(WEST), WEST.spec, SETTINGS)[-1]
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    containers = {item["name"]: item for item in [*pod["initContainers"], *pod["containers"]]}
    for name in ("bootstrap", "picker"):
        assert build_parser().parse_args(containers[name]["command"][1:]).command == "router"
