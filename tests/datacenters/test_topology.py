"""A topology file says what is emulated; what cannot be is refused with its place and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.datacenters.topology import TOPOLOGIES, TopologyError, bits_per_second, load_topology, parse_topology


def gpus(name: str, datacenter: str) -> int:
    topology = load_topology(TOPOLOGIES / name)
    return sum(group.gpus for group in topology.datacenters[topology.index(datacenter)].groups())


def test_two_is_an_h200_pool_in_the_east_and_an_h20_pool_in_the_west() -> None:
    topology = load_topology()
    pools = {dc.name: {group.accelerator for group in dc.groups()} for dc in topology.datacenters}
    assert pools == {"east": {"H200"}, "west": {"H20"}}
    assert [line.between for line in topology.lines] == [("east", "west")]


def test_a_node_of_the_west_can_die_and_leave_another() -> None:
    topology = load_topology()
    assert len(topology.datacenters[topology.index("west")].groups()) >= 2


def test_paper_has_the_papers_counts() -> None:
    assert gpus("paper.yaml", "east") == 4 * 8
    assert gpus("paper.yaml", "west") == 8 * 8


def test_pool_and_labels_become_node_labels() -> None:
    topology = parse_topology(
        {"datacenters": [{"name": "a", "nodes": [{"accelerator": "H20", "labels": {"zone": "z1"}}, {}]}]}
    )
    first, second = topology.datacenters[0].groups()
    assert first.node_labels() == {"prfaas.io/accelerator": "H20", "zone": "z1"}
    assert (second.node_labels(), second.gpus) == ({}, 0)


@pytest.mark.parametrize(("rate", "bits"), [("400mbit", 4e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3)])
def test_rates(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["400", "400Mbit", "0mbit", "-1mbit", "mbit", "400mbps"])
def test_no_rates(rate: str) -> None:
    with pytest.raises(ValueError, match="write a number above zero and kbit, mbit or gbit, such as 400mbit"):
        bits_per_second(rate)


def datacenter(name: str, **group: Any) -> dict[str, Any]:
    return {"name": name, "nodes": [group]}


TWO = [datacenter("a"), datacenter("b")]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "t.yaml: datacenters: Field required: add it"),
        (
            {"datacenters": TWO, "line": []},
            "t.yaml: line: Extra inputs are not permitted: remove it or correct its spelling",
        ),
        (
            {"datacenters": [datacenter("A")]},
            "t.yaml: datacenters[0].name: String should match pattern '^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$': "
            "use at most 20 lower-case letters, digits and '-', beginning with a letter",
        ),
        (
            {"datacenters": [datacenter("a", count=0)]},
            "t.yaml: datacenters[0].nodes[0].count: Input should be greater than or equal to 1",
        ),
        (
            {"datacenters": [datacenter("a", accelerator="H100")]},
            "t.yaml: datacenters[0].nodes[0].accelerator: Input should be 'H200' or 'H20'",
        ),
        (
            {"datacenters": [{"name": "a", "nodes": [{"count": 4}, {"count": 4}]}]},
            "t.yaml: datacenters[0]: 8 nodes, of at most 7: "
            "lower count and raise machines, several machines may share a node",
        ),
        (
            {"datacenters": [datacenter("a"), datacenter("a")]},
            "t.yaml: datacenters: two are named 'a': give each its own name",
        ),
        (
            {"datacenters": TWO, "lines": [{"between": ["a", "c"], "rate": "1mbit"}]},
            "t.yaml: lines[0].between: there is no datacenter 'c': name one of a, b",
        ),
        (
            {"datacenters": TWO, "lines": [{"between": ["a", "a"], "rate": "1mbit"}]},
            "t.yaml: lines[0].between: a line joins two datacenters: name another than 'a'",
        ),
        (
            {"datacenters": TWO, "lines": [{"between": list(x), "rate": "1mbit"} for x in ("ab", "ba")]},
            "t.yaml: lines[1].between: these two are joined already: remove one of the lines",
        ),
        (
            {"datacenters": TWO, "lines": [{"between": ["a", "b"], "rate": "fast"}]},
            "t.yaml: lines[0].rate: 'fast' is no rate: "
            "write a number above zero and kbit, mbit or gbit, such as 400mbit",
        ),
        ("east", "t.yaml: Input should be a valid dictionary or instance of Topology"),
    ],
)
def test_a_problem_has_a_place_and_a_remedy(document: Any, problem: str) -> None:
    with pytest.raises(TopologyError) as raised:
        parse_topology(document, "t.yaml")
    assert str(raised.value) == problem


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(TopologyError) as raised:
        parse_topology({"datacenters": [datacenter("A", count=0)], "lines": [{"between": ["a", "b"], "rate": "5"}]})
    assert len(str(raised.value).splitlines()) == 3


def test_a_missing_file_names_those_that_are_shipped(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"no.yaml: No such file .* has paper.yaml, two.yaml"):
        load_topology(tmp_path / "no.yaml")


def test_a_file_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("datacenters: [")
    with pytest.raises(TopologyError, match=r"t.yaml: not YAML"):
        load_topology(tmp_path / "t.yaml")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    topology = load_topology()
    with pytest.raises(TopologyError, match="there is no datacenter 'north': name one of east, west"):
        topology.index("north")
    with pytest.raises(TopologyError, match="no line between 'east' and 'north': the lines are east - west"):
        topology.line_index("east", "north")
    assert topology.line_index("west", "east") == topology.line_index("east", "west")
