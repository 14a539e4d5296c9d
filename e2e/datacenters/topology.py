"""What is emulated: datacenters with their nodes, and the lines between them.

A topology is a YAML file. Every datacenter has a control-plane node of its own beside the nodes named here. A node may
stand for several machines, so that a large pool fits on a small computer: pools and counts hold, addresses are fewer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from e2e.datacenters import addresses
from e2e.datacenters.errors import DatacentersError

TOPOLOGIES = Path(__file__).parent.parent / "topologies"
DEFAULT_TOPOLOGY = TOPOLOGIES / "two.yaml"
ACCELERATOR_LABEL = "prfaas.io/accelerator"

Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$")]
_RATE = re.compile(r"^(\d+(?:\.\d+)?)([kmg])bit$")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_REMEDIES = {
    "missing": "add it",
    "extra_forbidden": "remove it or correct its spelling",
    "string_pattern_mismatch": "use at most 20 lower-case letters, digits and '-', beginning with a letter",
}


class TopologyError(DatacentersError, ValueError):
    """A topology that cannot be: one line per problem, each with the place in the file and a remedy."""


def bits_per_second(rate: str) -> float:
    """`"400mbit"` -> 4e8. Units as tc takes them: kbit, mbit, gbit, decimal.

    :raises TopologyError: not a rate, or zero.
    """
    found = _RATE.match(rate)
    if not found or float(found[1]) == 0:
        raise TopologyError(f"{rate!r} is no rate: write a number above zero and kbit, mbit or gbit, such as 400mbit")
    return float(found[1]) * _BITS[found[2]]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class NodeGroup(_Model):
    """Nodes that are alike."""

    accelerator: Literal["H200", "H20"] | None = None
    """GPU type of the pool; a node without one runs the operator and the router only."""
    count: Annotated[int, Field(ge=1, le=addresses.MOST_NODES - 1)] = 1
    """Nodes in the group."""
    machines: Annotated[int, Field(ge=1, le=64)] = 1
    """Machines that each node stands for."""
    gpus_per_machine: Annotated[int, Field(ge=1, le=16)] = 8
    labels: dict[str, str] = Field(default_factory=dict)
    """Further node labels."""

    @property
    def gpus(self) -> int:
        """GPUs that each node offers."""
        return self.machines * self.gpus_per_machine if self.accelerator else 0

    def node_labels(self) -> dict[str, str]:
        """All labels of each node."""
        pool = {ACCELERATOR_LABEL: self.accelerator} if self.accelerator else {}
        return {**pool, **self.labels}


class Datacenter(_Model):
    """One Kubernetes cluster."""

    name: Name
    nodes: Annotated[tuple[NodeGroup, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Datacenter:
        workers = sum(group.count for group in self.nodes)
        if workers > addresses.MOST_NODES - 1:
            raise ValueError(
                f"{workers} nodes, of at most {addresses.MOST_NODES - 1}: lower count and raise machines, "
                "several machines may share a node"
            )
        return self

    def groups(self) -> list[NodeGroup]:
        """The group of each worker node, in the order in which kind numbers them."""
        return [group for group in self.nodes for _ in range(group.count)]


class Line(_Model):
    """A line between two datacenters, of one capacity in each direction."""

    between: tuple[Name, Name]
    rate: str
    """Capacity per direction: kbit, mbit or gbit."""

    @field_validator("rate")
    @classmethod
    def _is_rate(cls, value: str) -> str:
        bits_per_second(value)
        return value

    @property
    def key(self) -> frozenset[str]:
        """The pair, whichever way round."""
        return frozenset(self.between)


class Topology(_Model):
    """A whole topology."""

    datacenters: Annotated[tuple[Datacenter, ...], Field(min_length=1, max_length=addresses.MOST_DATACENTERS)]
    lines: tuple[Line, ...] = ()

    @model_validator(mode="after")
    def _joined_up(self) -> Topology:
        names = [datacenter.name for datacenter in self.datacenters]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"datacenters: two are named {name!r}: give each its own name")
        seen: set[frozenset[str]] = set()
        for position, line in enumerate(self.lines):
            where = f"lines[{position}].between"
            for end in line.between:
                if end not in names:
                    raise ValueError(f"{where}: there is no datacenter {end!r}: name one of {', '.join(names)}")
            if len(line.key) == 1:
                raise ValueError(f"{where}: a line joins two datacenters: name another than {line.between[0]!r}")
            if line.key in seen:
                raise ValueError(f"{where}: these two are joined already: remove one of the lines")
            seen.add(line.key)
        return self

    def index(self, name: str) -> int:
        """Position of a datacenter. :raises TopologyError: there is none of that name."""
        names = [datacenter.name for datacenter in self.datacenters]
        if name not in names:
            raise TopologyError(f"there is no datacenter {name!r}: name one of {', '.join(names)}")
        return names.index(name)

    def line_index(self, one: str, other: str) -> int:
        """Position of the line between two datacenters. :raises TopologyError: there is none."""
        for position, line in enumerate(self.lines):
            if line.key == {one, other}:
                return position
        joined = ", ".join(" - ".join(line.between) for line in self.lines) or "none"
        raise TopologyError(f"there is no line between {one!r} and {other!r}: the lines are {joined}")


def load_topology(path: Path = DEFAULT_TOPOLOGY) -> Topology:
    """Read a topology file.

    :raises TopologyError: it cannot be read, or does not describe a topology.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        shipped = ", ".join(sorted(p.name for p in TOPOLOGIES.glob("*.yaml")))
        raise TopologyError(f"{path}: {error.strerror}: name a topology file; {TOPOLOGIES} has {shipped}") from error
    except yaml.YAMLError as error:
        raise TopologyError(f"{path}: not YAML: {error}") from error
    return parse_topology(document, str(path))


def parse_topology(document: Any, source: str = "topology") -> Topology:
    """A topology from a parsed document.

    :raises TopologyError: one line per problem, each with its place.
    """
    try:
        return Topology.model_validate(document)
    except ValidationError as error:
        found = error.errors()
        # A list whose entries are at fault also counts as too short: the entries' faults are what matters.
        below = {problem["loc"][:depth] for problem in found for depth in range(len(problem["loc"]))}
        problems = [
            f"{source}: {describe(problem['type'], problem['loc'], problem['msg'])}"
            for problem in found
            if problem["type"] != "too_short" or problem["loc"] not in below
        ]
        raise TopologyError("\n".join(problems)) from error


def describe(kind: str, location: tuple[int | str, ...], message: str) -> str:
    """One problem as `place: what is wrong: remedy`."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    text = message.removeprefix("Value error, ")
    remedy = f": {_REMEDIES[kind]}" if kind in _REMEDIES else ""
    return f"{place}: {text}{remedy}" if place else f"{text}{remedy}"
