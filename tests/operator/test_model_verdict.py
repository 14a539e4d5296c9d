"""What ModelCached says of several places and several pods, where no API server is needed to see it."""

from __future__ import annotations

from datetime import UTC, datetime

from prfaas.api.pool import ModelSpec
from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.kube.resources import Object
from prfaas.operator.fetches import State
from prfaas.operator.model_cache import judge
from prfaas.workloads.model import Place
from tests.operator import bench as here

MODEL = {"name": "org/model", "source": "hf://org/model", "cache": {"hostPath": {"path": "/var/lib/models"}}}
SPEC = PrfaaSClusterSpec.model_validate(here.PRFAAS_CLUSTER | {"model": MODEL})


def test_a_branch_that_moved_between_two_nodes_is_said() -> None:
    states = {Place("a"): State(True, commit="1"), Place("b"): State(True, commit="2")}
    found = judge(SPEC, states, [], 3, datetime.now(UTC))
    assert found.status is True
    assert "put a commit into spec.model.revision" in found.message


def test_a_group_that_fetches_for_itself_is_done_when_all_its_nodes_are() -> None:
    spec = SPEC.model_copy(update={"model": ModelSpec.model_validate(MODEL | {"cache": {"ephemeral": {}}})})

    def pod(code: int | None) -> Object:
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        return {
            "metadata": {"labels": {"prfaas.io/instance": "east-0"}},
            "status": {"initContainerStatuses": [{"name": "model", "state": state}]},
        }

    for pods in ([pod(0), pod(None)], [pod(None), pod(0)]):
        assert judge(spec, {}, pods, 1, datetime.now(UTC)).status is False
    assert judge(spec, {}, [pod(0), pod(0)], 1, datetime.now(UTC)).status is True


def test_many_places_are_not_all_named() -> None:
    states = {Place(f"node-{number}"): State(False) for number in range(9)}
    message = judge(SPEC, states, [], 9, datetime.now(UTC)).message
    assert "node node-4, and others" in message
    assert "node-5" not in message
