"""Which nodes may get instances of a pool."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.kube.resources import Object
from prfaas.operator.nodes import matching
from tests.operator import bench as here

SPEC = PrfaaSClusterSpec.model_validate(
    here.PRFAAS_CLUSTER
    | {"nodePool": {"nodeSelector": {"gpu": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}
)


def node(name: str, **changes: Any) -> Object:
    whole: Object = {
        "metadata": {"name": name, "labels": {"gpu": "h200"}},
        "spec": {"taints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}]},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    return whole | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"name": "n", "labels": {}}},
        {"spec": {"unschedulable": True}},
        {"spec": {"taints": [{"key": "other", "effect": "NoExecute"}]}},
        {"status": {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]}},
        {"status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "Unknown"}]}},
    ],
)
def test_nodes_that_no_instance_could_get_are_left_out(changes: Object) -> None:
    assert matching(SPEC, [node("n", **changes), node("good")]) == ["good"]


def test_gpus_that_are_claimed_are_not_counted_on_nodes() -> None:
    claims = ({"name": "gpus", "resourceClaimTemplateName": "eight"},)
    spec = PrfaaSClusterSpec.model_validate({**SPEC.to_wire(), "nodePool": {"resourceClaims": claims}})
    free = {"spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert matching(spec, [node("claimed", **free)]) == ["claimed"]


def test_a_taint_that_only_asks_to_stay_away_does_not_count() -> None:
    asks = {"spec": {"taints": [{"key": "other", "effect": "PreferNoSchedule"}]}}
    assert matching(SPEC, [node("n", **asks)]) == ["n"]
