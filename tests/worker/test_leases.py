"""Leases on prefilled KV: they end, are renewed, and are good for one transfer."""

from __future__ import annotations

import pytest

from prfaas.worker.kv.leases import Lease, LeaseError, LeaseTable, extension_seconds, heartbeat_seconds
from tests.facts import facts


class Freed(list[str]):
    """What was given back, in order."""


def granted(table: LeaseTable, freed: Freed, name: str = "r", at: float = 0) -> Lease:
    """A lease granted at a time."""
    lease = Lease(name, b"state", 9, "blocks", at + table.duration, lambda: freed.append(name))
    table.grant(lease)
    return lease


def test_a_lease_ends_and_frees_once() -> None:
    table, freed = LeaseTable(30), Freed()
    granted(table, freed)
    assert (table.next_deadline(), table.expire(29.9)) == (30, [])
    assert (table.expire(30), freed, len(table), table.next_deadline()) == (["r"], ["r"], 0, None)
    assert (table.expire(99), table.end("r", "used"), freed) == ([], False, ["r"])
    assert table.ending("r") == "expired"


def test_a_heartbeat_extends_as_vllm_does() -> None:
    lease = facts("nixl_pull")["lease"]
    table, freed = LeaseTable(lease["lease_s"]), Freed()
    granted(table, freed)
    assert table.renew("r", 5)
    assert table.next_deadline() == 30, "never shortened"
    assert table.renew("r", 25)
    assert table.next_deadline() == 25 + lease["heartbeat_extension_s"]
    assert not table.renew("other", 25)


def test_a_lease_is_taken_once() -> None:
    table, freed = LeaseTable(30), Freed()
    lease = granted(table, freed)
    assert table.take("r", "blocks", 9, 29) is lease
    assert table.next_deadline() == 49, "taking renews"
    with pytest.raises(LeaseError, match="being transferred") as refused:
        table.take("r", "blocks", 9, 29)
    assert refused.value.reason == "used"
    assert (table.end("r", "used"), freed, lease.ended) == (True, ["r"], True)


@pytest.mark.parametrize("how", ["used", "released", "expired"])
def test_a_lease_that_ended_says_how(how: str) -> None:
    table = LeaseTable(30)
    granted(table, Freed())
    if how == "expired":
        table.expire(30)
    else:
        table.end("r", how)
    with pytest.raises(LeaseError, match=f"no KV for request r: {how}") as refused:
        table.take("r", "blocks", 9, 31)
    assert refused.value.reason == how


def test_an_unknown_lease_is_refused() -> None:
    with pytest.raises(LeaseError, match="unknown"):
        LeaseTable(30).take("r", "blocks", 9, 0)


@pytest.mark.parametrize(("blocks", "tokens"), [("others", 9), ("blocks", 8), (None, None)])
def test_a_reader_must_mean_the_blocks_that_are_held(blocks: object, tokens: object) -> None:
    table = LeaseTable(30)
    granted(table, Freed())
    with pytest.raises(LeaseError, match="other blocks"):
        table.take("r", blocks, tokens, 0)
    assert table.take("r", "blocks", 9, 0), "and the lease is still good for its own reader"


def test_endings_are_remembered_within_bounds() -> None:
    table = LeaseTable(30)
    for number in range(5_000):
        granted(table, Freed(), str(number))
        table.end(str(number), "used")
    assert (table.ending("0"), table.ending("4999")) == (None, "used")


@pytest.mark.parametrize(("lease", "beat", "gives"), [(30, 5, 20), (45, 7, 30), (50, 8, 33), (3, 0.5, 2)])
def test_heartbeats_are_divided_as_vllm_divides(lease: float, beat: float, gives: float) -> None:
    assert (heartbeat_seconds(lease), extension_seconds(lease)) == (beat, gives)
