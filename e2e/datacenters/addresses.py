"""Address plan. Everything is in 198.18.0.0/15, set aside for tests of networks (RFC 2544) and so rarely in use.

Each datacenter has one block: nodes, Services and pods; each line a small network of its own. One route per side
covers all of it, and a pod's address says in which datacenter it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

EVERYTHING = IPv4Network("198.18.0.0/15")
DATACENTERS = IPv4Network("198.18.0.0/16")
LINES = IPv4Network("198.19.0.0/17")
TRANSIT = IPv4Network("198.19.255.252/30")
"""Between the machine and the private Docker daemon's network."""
MOST_DATACENTERS = 16
MOST_NODES = 8
"""Per datacenter: each node has 256 pod addresses out of the block's 2048."""


@dataclass(frozen=True)
class Block:
    """The ranges of one datacenter."""

    nodes: IPv4Network
    services: IPv4Network
    pods: IPv4Network
    whole: IPv4Network

    @property
    def bridge(self) -> IPv4Address:
        """Docker's own address in the nodes' network."""
        return self.nodes[1]

    @property
    def border(self) -> IPv4Address:
        """Address of the border router in the nodes' network; Docker gives nodes theirs from the low end."""
        return self.nodes[254]


def block(index: int) -> Block:
    """Ranges of the datacenter at a position in the topology."""
    whole = list(DATACENTERS.subnets(new_prefix=20))[index]
    quarters = list(whole.subnets(new_prefix=22))
    nodes = next(quarters[0].subnets(new_prefix=24))
    pods = list(whole.subnets(new_prefix=21))[1]
    return Block(nodes=nodes, services=quarters[1], pods=pods, whole=whole)


@dataclass(frozen=True)
class LineNetwork:
    """The network of one line: two border routers and Docker's own address."""

    network: IPv4Network
    bridge: IPv4Address
    ends: tuple[IPv4Address, IPv4Address]


def line(index: int) -> LineNetwork:
    """Network of the line at a position in the topology."""
    network = IPv4Network((int(LINES.network_address) + 8 * index, 29))
    return LineNetwork(network, network[1], (network[2], network[3]))


def overlaps(destination: str) -> bool:
    """Whether a route's destination (address or range) lies in our range."""
    return IPv4Network(destination, strict=False).overlaps(EVERYTHING)
