"""Conditions: transition times move on a flip only, reasons come from the documented list."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from prfaas.api.conditions import CONDITIONS, REASONS, Reason, Type, condition, find, merge, timestamp
from prfaas.api.kinds import KINDS

NOON = datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=UTC)
LATER = NOON + timedelta(minutes=5)


def test_a_condition_that_did_not_flip_keeps_its_time_and_takes_what_is_new() -> None:
    before = [condition(Type.READY, False, Reason.STARTING, "a", generation=1, now=NOON)]
    observed = [condition(Type.READY, False, Reason.CRASHING, "b", generation=2, now=LATER)]

    (merged,) = merge(before, observed)

    assert merged.last_transition_time == "2026-01-02T12:00:00Z"
    assert (merged.reason, merged.message, merged.observed_generation) == ("Crashing", "b", 2)


def test_a_flip_takes_the_time_of_the_observation() -> None:
    before = [condition(Type.READY, None, Reason.STARTING, generation=1, now=NOON)]
    observed = [condition(Type.READY, True, Reason.AS_SPECIFIED, generation=1, now=LATER)]

    assert merge(before, observed) == tuple(observed)


def test_the_same_observation_later_changes_nothing() -> None:
    kinds = (Type.READY, Type.PODS_PLACED)
    before = tuple(condition(kind, True, REASONS[kind][0], generation=1, now=NOON) for kind in kinds)
    again = [condition(kind, True, REASONS[kind][0], generation=1, now=LATER) for kind in kinds]

    assert merge(before, again) == before


def test_a_condition_that_is_no_longer_computed_is_dropped() -> None:
    before = [condition(Type.EXPORTED, True, Reason.PUBLISHED, generation=1, now=NOON)]

    assert merge(before, []) == ()


def test_unknown_is_a_status_of_its_own() -> None:
    assert condition(Type.PEER_API_REACHABLE, None, Reason.NOT_PROBED, generation=1, now=NOON).status == "Unknown"


def test_an_undocumented_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="Mirrored is no documented reason of PodsPlaced"):
        condition(Type.PODS_PLACED, True, Reason.MIRRORED, generation=1, now=NOON)


def test_find() -> None:
    placed = condition(Type.PODS_PLACED, True, Reason.PLACED, generation=1, now=NOON)

    assert find([placed], Type.PODS_PLACED) == placed
    assert find([placed.to_wire()], Type.PODS_PLACED) == placed
    assert find([placed], Type.READY) is None


def test_timestamp_is_utc_in_whole_seconds() -> None:
    assert timestamp(NOON.astimezone(timezone(timedelta(hours=8)))) == "2026-01-02T12:00:00Z"
    with pytest.raises(ValueError, match="time zone"):
        timestamp(NOON.replace(tzinfo=None))


def test_every_type_belongs_to_a_kind_and_every_reason_to_a_type() -> None:
    assert set(CONDITIONS) == set(KINDS)
    assert {kind for kinds in CONDITIONS.values() for kind in kinds} == set(Type) == set(REASONS)
    assert {reason for reasons in REASONS.values() for reason in reasons} == set(Reason)
