"""Whether long prompts can go out, from what the links say."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from prfaas.api.conditions import Reason, Type, condition
from prfaas.api.pd_cluster import PDCluster
from prfaas.kube.resources import Object
from prfaas.operator.pd_cluster import missing_link, remote_prefill

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def cluster(*links: str) -> PDCluster:
    spec: dict[str, Any] = {
        "model": {"name": "m"},
        "gpusPerInstance": 1,
        "engine": {"image": "i"},
        "pool": {"instances": 2},
        "remotePrefill": [{"linkRef": link, "initialThreshold": 1} for link in links],
    }
    metadata = {"name": "west", "namespace": "llm"}
    return PDCluster.model_validate(
        {"apiVersion": "prfaas.io/v1alpha1", "kind": "PDCluster", "metadata": metadata, "spec": spec}
    )


def link(status: bool | None, reason: Reason, endpoints: int) -> Object:
    """A link as far as a pool looks at it."""
    said = condition(Type.ENDPOINTS_MIRRORED, status, reason, generation=1, now=NOW).to_wire()
    return {"status": {"endpoints": endpoints, "conditions": [said]}}


@pytest.mark.parametrize(
    ("status", "reason", "endpoints", "available"),
    [
        (True, Reason.MIRRORED, 2, True),
        (None, Reason.LAST_KNOWN, 2, True),
        (False, Reason.API_ERROR, 2, True),
        (False, Reason.API_ERROR, 0, False),
        (False, Reason.KEY_MISMATCH, 2, False),
        (True, Reason.MIRRORED, 0, False),
    ],
    ids=["well", "no contact", "not all written", "nothing written", "another form", "no endpoint"],
)
def test_a_link_is_usable_as_long_as_endpoints_of_it_may_be_used(
    status: bool | None, reason: Reason, endpoints: int, available: bool
) -> None:
    assert remote_prefill(cluster("a"), [("a", link(status, reason, endpoints))]).status is available


def test_one_usable_link_is_enough_and_a_missing_one_is_still_missing() -> None:
    links = [("gone", None), ("a", link(True, Reason.MIRRORED, 1))]
    assert remote_prefill(cluster("gone", "a"), links).status is True
    missing = missing_link(links)
    assert missing is not None
    assert (missing.reason, missing.message) == (
        Reason.LINK_NOT_FOUND,
        "there is no InterClusterLink gone in this namespace",
    )
    assert missing_link(links[1:]) is None
