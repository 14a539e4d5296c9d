"""Two datacenters that are up: what a line, its cut and its counters do, and what a node comes back with."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.datacenters.border import KV_PORT, Traffic
from e2e.datacenters.datacenters import Datacenters, parallel
from e2e.datacenters.topology import bits_per_second

pytestmark = pytest.mark.datacenters

EAST, WEST, SIBLING = "prfaas-east-worker", "prfaas-west-worker", "prfaas-west-worker2"
OTHER_PORT = 7001
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def line(datacenters: Datacenters) -> Iterator[Datacenters]:
    """The datacenters, with the line put back afterwards."""
    yield datacenters
    datacenters.set_line("east", "west", rate=datacenters.topology.lines[0].rate, up=True)


def transfer(datacenters: Datacenters, source: str, target: str, size: int, port: int = OTHER_PORT) -> float:
    """Send bytes from one node to another over TCP; the seconds it took."""
    address = {**datacenters.node_addresses("east"), **datacenters.node_addresses("west")}[source]

    def serve(_: str) -> str:
        return datacenters.exec_in_node(
            source, "sh", "-c", f"head -c {size} /dev/zero | socat -u - TCP-LISTEN:{port},reuseaddr"
        )

    def fetch(_: str) -> float:
        until_listening = f"for i in $(seq 100); do ss -ltn | grep -q :{port} && exit 0; sleep 0.1; done; exit 1"
        datacenters.exec_in_node(source, "sh", "-c", until_listening)
        started = time.monotonic()
        received = datacenters.exec_in_node(target, "sh", "-c", f"socat -u TCP:{address}:{port} - | wc -c")
        assert int(received) == size
        return time.monotonic() - started

    _, seconds = parallel(lambda do: do(""), [serve, fetch])
    assert isinstance(seconds, float)
    return seconds


def crossed(before: dict[str, Traffic], after: dict[str, Traffic], direction: str) -> tuple[int, int]:
    """KV bytes (payload) and other bytes that a line carried in between."""
    return (
        after[direction].kv_payload - before[direction].kv_payload,
        after[direction].other_bytes - before[direction].other_bytes,
    )


def reaches_api(datacenters: Datacenters, node: str, peer: str) -> bool:
    """Whether a node gets an answer from the API server of a datacenter."""
    check = f"curl --silent --insecure --max-time 3 {datacenters.api_server(peer)}/readyz"
    return datacenters.exec_in_node(node, "sh", "-c", check, check=False) == "ok"


def test_a_line_is_never_faster_than_its_rate_in_either_direction(line: Datacenters) -> None:
    line.set_line("east", "west", rate="40mbit")
    assert line.line("west", "east").bits_per_second == bits_per_second("40mbit")
    size = 5_000_000
    least = size * 8 / 40e6 * 0.95  # the line may start with a burst
    assert transfer(line, EAST, WEST, size) >= least
    assert transfer(line, WEST, EAST, size) >= least


def test_the_rate_is_the_lines_whatever_the_number_of_nodes(line: Datacenters) -> None:
    line.set_line("east", "west", rate="40mbit")
    size = 2_500_000
    started = time.monotonic()
    parallel(lambda pair: transfer(line, EAST, pair[0], size, pair[1]), [(WEST, 7002), (SIBLING, 7003)])
    assert time.monotonic() - started >= 2 * size * 8 / 40e6 * 0.95


def test_traffic_inside_a_datacenter_is_not_shaped(line: Datacenters) -> None:
    line.set_line("east", "west", rate="1mbit")
    size = 10_000_000  # 80 s at the line's rate
    assert transfer(line, WEST, SIBLING, size) < 40


def test_kv_bytes_and_other_bytes_are_counted_apart(line: Datacenters) -> None:
    size = 4_000_000
    before = line.line_counters("east", "west")
    transfer(line, EAST, WEST, size, port=KV_PORT)
    between = line.line_counters("east", "west")
    transfer(line, WEST, EAST, size)
    after = line.line_counters("east", "west")
    assert crossed(before, between, "east->west")[0] == pytest.approx(size, rel=0.01)
    assert crossed(between, after, "east->west")[0] == 0
    assert crossed(between, after, "west->east")[1] >= size


def test_a_cut_line_cuts_the_peers_api_server_too_and_nothing_inside(line: Datacenters) -> None:
    assert reaches_api(line, WEST, "east")
    line.set_line("east", "west", up=False)
    assert not line.line("east", "west").up
    assert not reaches_api(line, WEST, "east")
    assert not reaches_api(line, EAST, "west")
    assert reaches_api(line, WEST, "west")
    line.set_line("east", "west", up=True)
    assert reaches_api(line, WEST, "east")


def test_pods_are_reached_by_address_from_the_peer_and_with_the_private_daemon_from_this_machine(
    datacenters: Datacenters,
) -> None:
    pods = ("-n", "kube-system", "get", "pods", "-l", "k8s-app=kube-dns", "-o", "jsonpath={.items[0].status.podIP}")
    url = f"http://{datacenters.kubectl('east', *pods)}:8080/health"
    assert datacenters.exec_in_node(WEST, "curl", "--silent", "--max-time", "5", url) == "OK"
    if datacenters.status()["docker"]["private"]:
        with NO_PROXY.open(url, timeout=5) as here:
            assert here.read() == b"OK"


def test_up_again_changes_nothing(datacenters: Datacenters) -> None:
    said: list[str] = []
    before = datacenters.status()
    Datacenters(datacenters.topology, said.append).up()
    assert said[-1] == "datacenters east, west: up already"
    assert datacenters.status() == before


def test_a_node_comes_back_with_its_routes_and_gpus(datacenters: Datacenters) -> None:
    def routes() -> set[str]:
        return {route for route in datacenters.exec_in_node(SIBLING, "ip", "route").splitlines() if " via " in route}

    def gpus() -> str:
        return datacenters.kubectl(
            "west", "get", "node", SIBLING, "-o", r"jsonpath={.status.allocatable.nvidia\.com/gpu}"
        )

    had = routes(), gpus()
    datacenters.node(SIBLING, "kill")
    status = {dc["name"]: dc["containers"] for dc in datacenters.status()["datacenters"]}
    assert status["west"][SIBLING] is False
    datacenters.node("west-worker2", "start")
    assert (routes(), gpus()) == had
    assert reaches_api(datacenters, SIBLING, "east")


def test_an_archive_that_is_none_is_refused(datacenters: Datacenters, tmp_path: Path) -> None:
    (tmp_path / "file.tar").write_text("no")
    with pytest.raises(ValueError, match=r"file.tar is no OCI image archive"):
        datacenters.load(tmp_path / "file.tar")
