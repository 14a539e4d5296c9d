"""One folder per case: `input.yaml` is an object of ours, `expected.yaml` every object that it wants in the cluster.

To accept a change on purpose, run `python tests/workloads/test_golden.py` and read the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.api.pd_cluster import PDCluster
from prfaas.api.policy import LinkThreshold, RoutingPolicy
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.workloads import wanted
from prfaas.workloads.assignment import Wanted, plan
from prfaas.workloads.meta import Owner
from prfaas.workloads.router import RouterSettings

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = RouterSettings(
    operator_image="registry.example/prfaas:0.1.0",
    envoy_image="registry.example/envoy:v1.40.0",
    cluster_role="prfaas-router",
    policy_writers=("system:serviceaccount:prfaas-system:prfaas-operator",),
)


def objects_of(case: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load((case / "input.yaml").read_text())
    if document["kind"] == "PrfaaSCluster":
        east = PrfaaSCluster.model_validate(document)
        owner = Owner.of(east)
        counts = {"prefill": east.spec.instances}
        step = plan(owner.name, [], Wanted(counts, wanted.revisions(owner, east.spec)), 1)
        return wanted.prfaas_cluster(owner, east.spec, step.apply)
    west = PDCluster.model_validate(document)
    owner = Owner.of(west)
    prefill = west.spec.pool.prefill_instances()
    counts = {"prefill": prefill, "decode": west.spec.pool.instances - prefill}
    step = plan(owner.name, [], Wanted(counts, wanted.revisions(owner, west.spec)), 1)
    policy = RoutingPolicy.build(
        pd_cluster_uid=owner.uid,
        epoch=3,
        version=7,
        model=west.spec.model.client_name,
        thresholds=tuple(
            LinkThreshold(link=remote.link_ref, tokens=remote.initial_threshold) for remote in west.spec.remote_prefill
        ),
    )
    return wanted.pd_cluster(owner, west.spec, step.apply, SETTINGS, policy)


@pytest.mark.parametrize("case", sorted(GOLDEN.iterdir()), ids=lambda case: case.name)
def test_objects_wanted(case: Path) -> None:
    assert objects_of(case) == list(yaml.safe_load_all((case / "expected.yaml").read_text()))


class _Plain(yaml.SafeDumper):
    """Writes a value that occurs twice twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


if __name__ == "__main__":
    for folder in sorted(GOLDEN.iterdir()):
        text = yaml.dump_all(objects_of(folder), Dumper=_Plain, sort_keys=False, width=119)
        (folder / "expected.yaml").write_text(text)
