"""Border routers: the one place where a datacenter's lines end.

Each datacenter has one small container through which all its traffic to other datacenters goes, both ways. The line's
rate (htb on the line's interface, each end its own direction), its cut (an nft set) and its counters are therefore
exact whatever the number of nodes, and hold for nothing else. Everything is done by `docker exec`, so it works with any
Docker. Counters are read where packets arrive: what a queue dropped has not crossed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from e2e.datacenters import addresses
from e2e.datacenters.docker import Docker, DockerError
from e2e.datacenters.kind import PREFIX, network_command, network_name
from e2e.datacenters.topology import Line, Topology, bits_per_second

BORDER_LABEL = "prfaas.io/border"
KV_PORT = 5600
"""Port on which KV bytes cross (the default of VLLM_NIXL_SIDE_CHANNEL_PORT)."""
HEADER = 52
"""Bytes before the payload of a packet on an established connection: IP 20, TCP 20, its timestamps 12."""
BURST_SECONDS = 0.002
"""htb may send so much at once: below it a busy machine's timers would cost rate."""
QUEUE_SECONDS = 0.05
"""Longest a packet waits for the line: beyond it the queue is full and senders slow down, as on a real router."""
SMALLEST_QUEUE = 256_000
"""Bytes; the kernel hands packets on in pieces of up to 64 KiB, and some of them must fit at any rate."""


@dataclass(frozen=True)
class Traffic:
    """What arrived at the far end of a line in one direction since the line was made; bytes of whole IP packets."""

    kv_bytes: int
    kv_packets: int
    other_bytes: int
    other_packets: int

    @property
    def kv_payload(self) -> int:
        """KV bytes without headers of IP and TCP, which the kernel counts once per packet however large."""
        return self.kv_bytes - HEADER * self.kv_packets


@dataclass(frozen=True)
class LineState:
    """A line as it is now."""

    between: tuple[str, str]
    bits_per_second: float
    up: bool


def container(datacenter: str) -> str:
    """Name of a datacenter's border router."""
    return f"{PREFIX}{datacenter}-border"


def line_network(line: Line) -> str:
    """Docker network of a line."""
    return f"{PREFIX}line-{line.between[0]}-{line.between[1]}"


def run_command(datacenter: str, address: IPv4Address, image: str) -> list[str]:
    """Arguments of docker that start a border router."""
    name = container(datacenter)
    return [
        *("run", "--detach", "--name", name, "--hostname", name, "--label", f"{BORDER_LABEL}={datacenter}"),
        *("--network", network_name(datacenter), "--ip", str(address), "--cap-add", "NET_ADMIN"),
        *("--sysctl", "net.ipv4.ip_forward=1", "--sysctl", "net.ipv4.conf.all.send_redirects=0"),
        *("--entrypoint", "sleep", image, "infinity"),
    ]


def runs(docker: Docker, datacenter: str) -> bool:
    """Whether a datacenter's border router runs."""
    return docker.running(f"{BORDER_LABEL}={datacenter}").get(container(datacenter), False)


def create(docker: Docker, topology: Topology, datacenter: str, image: str) -> None:
    """Start the border router of a datacenter, in place of one that does not run."""
    docker.run("rm", "--force", "--volumes", container(datacenter), check=False)
    docker.run(*run_command(datacenter, addresses.block(topology.index(datacenter)).border, image))


def interface(docker: Docker, name: str, address: IPv4Address) -> str | None:
    """Network interface of a container that has an address, None when none has."""
    for link in json.loads(docker.exec(name, "ip", "-json", "-4", "address")):
        if any(entry["local"] == str(address) for entry in link["addr_info"]):
            return str(link["ifname"])
    return None


def connect(docker: Docker, topology: Topology, index: int) -> None:
    """Join both ends of a line, with the topology's rate, where they are not joined yet."""
    line = topology.lines[index]
    plan = addresses.line(index)
    network = line_network(line)
    if docker.run("network", "inspect", network, check=False).returncode != 0:
        docker.run(*network_command(network, plan.network, plan.bridge))
    for position, end in enumerate(line.between):
        name, address = container(end), plan.ends[position]
        if interface(docker, name, address) is None:
            docker.run("network", "connect", "--ip", str(address), network, name)
        device = interface(docker, name, address)
        if device is None:
            raise DockerError(f"{name} has no interface on the line {network}")
        if not docker.exec(name, "tc", "class", "show", "dev", device).strip():
            docker.exec(name, "nft", "-f", "-", text=counters(index, device))
            docker.exec(name, "tc", "-batch", "-", text=shaping("add", device, line.rate))


def counters(index: int, device: str) -> str:
    """nft rules that count what arrives on a line and leave out what is cut."""
    kv = f"tcp sport {KV_PORT}", f"tcp dport {KV_PORT}"
    rules = [f'iifname "{device}" {match} counter name line{index}_kv accept' for match in kv]
    return "\n".join(
        [
            "table ip prfaas {",
            "  set cut { type ifname; }",
            f"  counter line{index}_kv {{ }}",
            f"  counter line{index}_other {{ }}",
            "  chain lines {",
            *(f"    {rule}" for rule in rules),
            f'    iifname "{device}" counter name line{index}_other',
            "  }",
            "  chain forward {",
            "    type filter hook forward priority filter; policy accept;",
            "  }",
            "}",
            "flush chain ip prfaas forward",
            "add rule ip prfaas forward iifname @cut drop",
            "add rule ip prfaas forward oifname @cut drop",
            "add rule ip prfaas forward jump lines",
            "",
        ]
    )


def shaping(verb: str, device: str, rate: str) -> str:
    """tc commands that give (`add`) or alter (`change`) what may leave by a device."""
    bits = bits_per_second(rate)
    burst = max(16_000, round(bits / 8 * BURST_SECONDS))
    limit = f"htb rate {round(bits)}bit ceil {round(bits)}bit burst {burst} cburst {burst} quantum 65536"
    queue = max(SMALLEST_QUEUE, round(bits / 8 * QUEUE_SECONDS))
    return "\n".join(
        [
            *([f"qdisc add dev {device} root handle 1: htb default 10"] if verb == "add" else []),
            f"class {verb} dev {device} parent 1: classid 1:10 {limit}",
            f"qdisc replace dev {device} parent 1:10 handle 10: bfifo limit {queue}",
            "",
        ]
    )


def routes(topology: Topology, datacenter: str, pods: dict[str, tuple[str, str]]) -> str:
    """`ip -batch` lines for a border router. `pods`: address and pod range of each node by name."""
    index = topology.index(datacenter)
    lines = [f"route replace {pod_range} via {address}" for address, pod_range in pods.values()]
    # Where no line leads: refused here, not sent around the lines over Docker's own network.
    lines.append(f"route replace unreachable {addresses.DATACENTERS}")
    lines.append(f"route replace unreachable {addresses.block(index).pods}")
    for number, line in enumerate(topology.lines):
        if datacenter in line.between:
            far = 1 - line.between.index(datacenter)
            peer = addresses.block(topology.index(line.between[far])).whole
            lines.append(f"route replace {peer} via {addresses.line(number).ends[far]}")
    return "\n".join([*lines, ""])


def node_routes(topology: Topology, datacenter: str, node: str, pods: dict[str, tuple[str, str]]) -> str:
    """`ip -batch` lines for a node: its siblings' pods directly, every other datacenter by the border router."""
    block = addresses.block(topology.index(datacenter))
    siblings = [f"route replace {pods[name][1]} via {pods[name][0]}" for name in pods if name != node]
    return "\n".join([*siblings, f"route replace {addresses.DATACENTERS} via {block.border}", ""])


def set_rate(docker: Docker, topology: Topology, index: int, rate: str) -> None:
    """Change a line's capacity, both directions."""
    for name, device in ends(docker, topology, index):
        docker.exec(name, "tc", "-batch", "-", text=shaping("change", device, rate))


def set_up(docker: Docker, topology: Topology, index: int, up: bool) -> None:
    """Join or cut a line: while it is cut, packets vanish, as they would."""
    for name, device in ends(docker, topology, index):
        if up is (device in cut_devices(docker, name)):
            verb = "delete" if up else "add"
            docker.exec(name, "nft", "-f", "-", text=f'{verb} element ip prfaas cut {{ "{device}" }}\n')


def cut_devices(docker: Docker, name: str) -> set[str]:
    """Interfaces of a border router whose line is cut."""
    listed = json.loads(docker.exec(name, "nft", "--json", "list", "set", "ip", "prfaas", "cut"))
    return {device for entry in listed["nftables"] for device in entry.get("set", {}).get("elem", [])}


def ends(docker: Docker, topology: Topology, index: int) -> list[tuple[str, str]]:
    """Border router and interface at both ends of a line."""
    found = []
    for name, address in zip(map(container, topology.lines[index].between), addresses.line(index).ends, strict=True):
        device = interface(docker, name, address)
        if device is None:
            raise DockerError(f"{name} is not joined to its line: run `python -m e2e.datacenters up`")
        found.append((name, device))
    return found


def state(docker: Docker, topology: Topology, index: int) -> LineState:
    """A line's capacity and whether it is cut, as the kernel has it."""
    name, device = ends(docker, topology, index)[0]
    classes = docker.exec(name, "tc", "class", "show", "dev", device)
    found = re.search(r"\brate (\d+(?:\.\d+)?)([KMG]?)bit\b", classes)
    if not found:
        raise DockerError(f"the line at {name} is not shaped: {classes.strip() or 'no class'}")
    rate = float(found[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}[found[2]]
    return LineState(topology.lines[index].between, rate, device not in cut_devices(docker, name))


def traffic(docker: Docker, topology: Topology, index: int) -> dict[str, Traffic]:
    """What crossed a line, by direction (`east->west`)."""
    one, other = topology.lines[index].between
    return {f"{a}->{b}": arrived(docker, container(b), index) for a, b in ((one, other), (other, one))}


def arrived(docker: Docker, name: str, index: int) -> Traffic:
    """Counters of what arrived over a line at a border router."""
    listed: dict[str, Any] = json.loads(docker.exec(name, "nft", "--json", "list", "counters", "table", "ip", "prfaas"))
    found = {entry["counter"]["name"]: entry["counter"] for entry in listed["nftables"] if "counter" in entry}
    kv, rest = found[f"line{index}_kv"], found[f"line{index}_other"]
    return Traffic(kv["bytes"], kv["packets"], rest["bytes"], rest["packets"])
