"""Which policy a PDCluster gets: kept when right, newer when not, never older than anything that was seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.pd_cluster import PDCluster
from prfaas.api.policy import RoutingPolicy, supersedes
from prfaas.operator.policy import policy_in, wanted_policy
from prfaas.operator.routers import Routers


def cluster(threshold: int = 100, *, uid: str = "u", **policy: Any) -> PDCluster:
    return PDCluster.model_validate(
        {
            "apiVersion": "prfaas.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "west", "namespace": "llm", "uid": uid},
            "spec": {
                "model": {"name": "m"},
                "gpusPerInstance": 1,
                "engine": {"image": "i"},
                "pool": {"instances": 2},
                "remotePrefill": [{"linkRef": "to-east", "initialThreshold": threshold}],
            },
            "status": {"policy": policy} if policy else {},
        }
    )


def test_the_first_policy_carries_our_epoch_and_the_thresholds_of_the_spec() -> None:
    policy = wanted_policy(cluster(), None, 3)
    assert (policy.epoch, policy.version, policy.threshold("to-east")) == (3, 1, 100)


def test_a_right_policy_is_kept_whoever_committed_it() -> None:
    first = wanted_policy(cluster(), None, 3)
    assert wanted_policy(cluster(), first, 9) == first


def test_a_changed_spec_gets_the_next_version_under_our_epoch() -> None:
    first = wanted_policy(cluster(), None, 3)
    second = wanted_policy(cluster(200), first, 9)
    assert (second.epoch, second.version) == (9, 2)
    assert supersedes(second, first, "u")


def test_the_policy_of_an_earlier_object_of_the_name_is_not_continued() -> None:
    old = wanted_policy(cluster(uid="old"), None, 3)
    new = wanted_policy(cluster(uid="new"), old, 3)
    assert (new.pd_cluster_uid, new.version) == ("new", 1)


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.integers(1, 9),
    st.booleans(),
)
def test_what_is_wanted_is_never_older_than_what_was_ever_seen(
    status: tuple[int, int], acknowledged: tuple[int, int], epoch: int, committed: bool
) -> None:
    west = cluster(epoch=status[0], version=status[1])
    current = wanted_policy(cluster(), None, 2) if committed else None
    policy = wanted_policy(west, current, epoch, acknowledged)
    if policy != current:
        assert policy.order > max(status, acknowledged)
    else:
        assert policy.order >= max(status, acknowledged)
    assert wanted_policy(west, policy, epoch, acknowledged) == policy, "it settles at once"


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"kind": "RoutingPolicy"}'])
def test_a_policy_that_cannot_be_read_counts_as_none(text: str) -> None:
    assert policy_in({"data": {"policy.json": text}}) is None
    assert policy_in(None) is None


def test_a_policy_comes_back_from_its_config_map() -> None:
    policy = wanted_policy(cluster(), None, 1)
    assert policy_in({"data": {"policy.json": policy.model_dump_json(by_alias=True)}}) == policy


async def test_without_a_token_no_router_is_asked() -> None:
    policy: RoutingPolicy = wanted_policy(cluster(), None, 1)
    assert await Routers(None).synchronise(policy, ["10.0.0.1"]) == frozenset()
