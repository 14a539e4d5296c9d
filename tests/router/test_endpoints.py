"""EndpointSlices read into pools."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.router.endpoints import read_pools
from prfaas.routing.world import Endpoint, Pools


def endpoint(address: str, name: str = "", **conditions: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"addresses": [address], "conditions": conditions}
    return made | ({"targetRef": {"kind": "Pod", "name": name}} if name else {})


def piece(
    role: str, *endpoints: dict[str, Any], cluster: str = "west", link: str = "", key: str = "", **fields: Any
) -> dict[str, Any]:
    """A slice as Kubernetes makes it of a Service of ours; with `link` one that a link mirrors."""
    kind = "interclusterlink" if link else "pdcluster"
    marks = {"prfaas.io/kind": kind, "prfaas.io/role": role}
    marks |= {"prfaas.io/link": link} if link else {"prfaas.io/cluster": cluster}
    marks |= {"prfaas.io/compatibility-key": key} if key else {}
    made = {
        "metadata": {"name": f"{role}-x", "labels": marks},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": list(endpoints),
    }
    return made | fields


def test_roles_links_and_keys_by_their_labels() -> None:
    of_a_prefill_pool = piece("prefill", endpoint("10.0.2.2"))
    of_a_prefill_pool["metadata"]["labels"]["prfaas.io/kind"] = "prfaascluster"
    pools = read_pools(
        [
            piece("prefill", endpoint("10.0.0.2", "west-1", ready=True), endpoint("10.0.0.1", "west-0"), key="a"),
            piece("prefill", endpoint("10.0.0.3", "west-4"), key="b"),
            piece("decode", endpoint("10.0.1.1", ready=True), key="a"),
            piece("decode", endpoint("10.0.1.2", ready=True), ports=[{"name": "http", "port": 9000}], key="b"),
            piece("prefill", endpoint("10.8.0.1"), link="to-east", key="a"),
            piece("prefill", endpoint("10.8.0.2"), link="to-east", key="b"),
            piece("prefill", endpoint("10.0.2.1"), cluster="other"),
            piece("router", endpoint("10.0.2.3")),
            piece("decode", endpoint("10.8.0.9"), link="to-east"),
            of_a_prefill_pool,
            {"metadata": {"name": "foreign"}, "addressType": "IPv4", "endpoints": [endpoint("10.0.2.4")]},
        ],
        "west",
    )
    assert pools == Pools(
        prefill=(Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000), Endpoint("10.0.0.3", 8000)),
        decode=(Endpoint("10.0.1.1", 8000), Endpoint("10.0.1.2", 9000)),
        remote={"to-east": (Endpoint("10.8.0.1", 8000), Endpoint("10.8.0.2", 8000))},
    )
    assert [found.name for found in pools.prefill] == ["west-0", "west-1", "west-4"]
    assert [found.compatibility_key for found in pools.prefill] == ["a", "a", "b"]
    assert [found.compatibility_key for found in pools.decode] == ["a", "b"]
    assert [found.compatibility_key for found in pools.remote["to-east"]] == ["a", "b"]


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
    pools = read_pools([piece("decode", endpoint("10.0.1.1", **conditions))], "west")
    assert len(pools.decode) == counts


def test_the_port_is_the_one_named_http_or_the_only_one() -> None:
    two = [{"name": "kv", "port": 5600}, {"name": "http", "port": 8000}]
    unnamed = [{"port": 8001}]
    unclear = [{"name": "kv", "port": 5600}, {"name": "metrics", "port": 9090}]
    found = [
        read_pools([piece("decode", endpoint("10.0.0.1"), ports=ports)], "west").decode
        for ports in (two, unnamed, unclear, [])
    ]
    assert found == [(Endpoint("10.0.0.1", 8000),), (Endpoint("10.0.0.1", 8001),), (), ()]


def test_one_endpoint_in_two_slices_counts_once() -> None:
    # The API allows it while an endpoint moves from one slice to another.
    assert len(read_pools([piece("decode", endpoint("10.0.0.1"))] * 2, "west").decode) == 1


def test_ipv6_and_what_is_no_address() -> None:
    six = read_pools([piece("decode", endpoint("fd00::1"), addressType="IPv6")], "west").decode
    assert [found.address for found in six] == ["[fd00::1]:8000"]
    assert not read_pools([piece("decode", endpoint("host.example"), addressType="FQDN")], "west").decode
