"""EndpointSlices read into pools."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.router.endpoints import read_pools
from prfaas.routing.world import Endpoint, Pools


def endpoint(address: str, name: str = "", **conditions: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"addresses": [address], "conditions": conditions}
    return made | ({"targetRef": {"kind": "Pod", "name": name}} if name else {})


def piece(service: str, *endpoints: dict[str, Any], link: str = "", **fields: Any) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": service} | ({"prfaas.io/link": link} if link else {})
    made = {
        "metadata": {"name": f"{service}-x", "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": list(endpoints),
    }
    return made | fields


def test_roles_and_links_by_their_services() -> None:
    pools = read_pools(
        [
            piece("west-prefill", endpoint("10.0.0.2", "west-1", ready=True), endpoint("10.0.0.1", "west-0")),
            piece("west-decode", endpoint("10.0.1.1", ready=True)),
            piece("west-decode", endpoint("10.0.1.2", ready=True), ports=[{"name": "http", "port": 9000}]),
            piece("to-east-remote-prefill", endpoint("10.8.0.1"), link="to-east"),
            piece("other-prefill", endpoint("10.0.2.1")),
            piece("west-prefill-lookalike", endpoint("10.0.2.2")),
            piece("to-east-remote-prefill", endpoint("10.8.0.9"), link="another"),
        ],
        "west",
    )
    assert pools == Pools(
        prefill=(Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)),
        decode=(Endpoint("10.0.1.1", 8000), Endpoint("10.0.1.2", 9000)),
        remote={"to-east": (Endpoint("10.8.0.1", 8000),)},
    )
    assert [found.name for found in pools.prefill] == ["west-0", "west-1"]


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        # publishNotReadyAddresses makes terminating endpoints ready: they leave all the same.
        ({"ready": True, "serving": True, "terminating": True}, False),
    ],
)
def test_only_ready_endpoints_count(conditions: dict[str, Any], counts: bool) -> None:
    pools = read_pools([piece("west-decode", endpoint("10.0.1.1", **conditions))], "west")
    assert len(pools.decode) == counts


def test_the_port_is_the_one_named_http_or_the_only_one() -> None:
    two = [{"name": "kv", "port": 5600}, {"name": "http", "port": 8000}]
    unnamed = [{"port": 8001}]
    unclear = [{"name": "kv", "port": 5600}, {"name": "metrics", "port": 9090}]
    found = [
        read_pools([piece("w-decode", endpoint("10.0.0.1"), ports=ports)], "w").decode
        for ports in (two, unnamed, unclear, [])
    ]
    assert found == [(Endpoint("10.0.0.1", 8000),), (Endpoint("10.0.0.1", 8001),), (), ()]


def test_one_endpoint_in_two_slices_counts_once() -> None:
    # The API allows it while an endpoint moves from one slice to another.
    assert len(read_pools([piece("w-decode", endpoint("10.0.0.1"))] * 2, "w").decode) == 1


def test_ipv6_and_what_is_no_address() -> None:
    six = read_pools([piece("w-decode", endpoint("fd00::1"), addressType="IPv6")], "w").decode
    assert [found.address for found in six] == ["[fd00::1]:8000"]
    assert not read_pools([piece("w-decode", endpoint("host.example"), addressType="FQDN")], "w").decode


def test_the_compatibility_key_comes_with_the_slice() -> None:
    made = piece("l-remote-prefill", endpoint("10.0.0.1"), link="l")
    made["metadata"]["annotations"] = {"prfaas.io/compatibility-key": "k"}
    assert read_pools([made], "w").remote["l"][0].compatibility_key == "k"
