"""Seconds of warming up: the median of recent starts, quiet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.prfaas_cluster import PrfaaSClusterSpec
from prfaas.operator.warm_up import RECENT, warm_up_seconds

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
SPEC = PrfaaSClusterSpec.model_validate(
    {"model": {"name": "m"}, "gpusPerInstance": 8, "engine": {"image": "x", "startupDeadline": "30m"}}
)


def pod(seconds: float, began: datetime = NOON, ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"labels": {"prfaas.io/instance": "east-0"}},
        "status": {
            "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": began.isoformat()}}}],
            "conditions": [
                {
                    "type": "Ready",
                    "status": ready,
                    "lastTransitionTime": (began + timedelta(seconds=seconds)).isoformat(),
                }
            ],
        },
    }


def test_the_median_of_those_that_are_ready() -> None:
    pods = [pod(100), pod(110), pod(400), pod(5, ready="False")]
    assert warm_up_seconds(pods, SPEC, None) == 110


def test_a_pod_that_was_away_for_a_while_does_not_count_as_slow() -> None:
    assert warm_up_seconds([pod(100), pod(3 * 86_400)], SPEC, None) == 100


def test_what_was_known_stays_while_nothing_runs() -> None:
    assert warm_up_seconds([pod(100, ready="False")], SPEC, 240) == 240
    assert warm_up_seconds([], SPEC, None) is None


@pytest.mark.parametrize(("seconds", "shown"), [(110, 100), (90, 100), (111, 111), (89, 89)])
def test_it_moves_by_more_than_a_tenth_or_not_at_all(seconds: float, shown: int) -> None:
    assert warm_up_seconds([pod(seconds)], SPEC, 100) == shown


def test_only_recent_starts_count() -> None:
    old = [pod(1000, NOON - timedelta(days=1))] * 40
    assert warm_up_seconds([*old, *[pod(60)] * RECENT], SPEC, None) == 60


@given(st.lists(st.integers(0, 1800), max_size=30), st.none() | st.integers(0, 2000))
def test_a_second_look_changes_nothing(found: list[int], before: int | None) -> None:
    pods = [pod(seconds) for seconds in found]
    shown = warm_up_seconds(pods, SPEC, before)
    assert warm_up_seconds(pods, SPEC, shown) == shown
