"""No two ranges of the address plan overlap, and all are inside the one range that is routed here."""

from __future__ import annotations

import itertools

import pytest

from e2e.datacenters import addresses


def test_ranges_are_disjoint_and_inside() -> None:
    blocks = [addresses.block(index) for index in range(addresses.MOST_DATACENTERS)]
    lines = [addresses.line(index).network for index in range(120)]
    ranges = [r for block in blocks for r in (block.nodes, block.services, block.pods)]
    ranges += [*lines, addresses.TRANSIT]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(ranges, 2))
    assert all(r.subnet_of(addresses.EVERYTHING) for r in ranges)


def test_a_block_holds_its_ranges_and_pods_for_every_node() -> None:
    block = addresses.block(3)
    assert all(r.subnet_of(block.whole) for r in (block.nodes, block.services, block.pods))
    assert len(list(block.pods.subnets(new_prefix=24))) == addresses.MOST_NODES
    assert block.border in block.nodes
    assert block.bridge in block.nodes


@pytest.mark.parametrize(
    ("destination", "ours"),
    [
        ("198.18.0.0/15", True),
        ("198.19.4.4", True),
        ("0.0.0.0/1", False),
        ("10.0.0.0/8", False),
        ("198.20.0.0/16", False),
    ],
)
def test_overlaps(destination: str, ours: bool) -> None:
    assert addresses.overlaps(destination) is ours
