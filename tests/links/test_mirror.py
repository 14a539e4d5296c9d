"""Published endpoints as EndpointSlices here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.exchange import PublishedEndpoint
from prfaas.kube.resources import Object
from prfaas.links.mirror import ENDPOINTS_PER_SLICE, mirrored_objects, usable
from tests.links.build import endpoint


def endpoints(*items: dict[str, Any]) -> list[PublishedEndpoint]:
    return [PublishedEndpoint.model_validate(item) for item in items]


def objects(*items: dict[str, Any]) -> list[Object]:
    named = endpoints(*({"compatibilityKey": "key-1"} | item for item in items))
    return mirrored_objects(
        "east",
        "prfaas",
        usable(named).endpoints,
        owner_labels={"prfaas.io/cluster": "east"},
        owner_reference={"kind": "InterClusterLink", "name": "east", "uid": "u"},
    )


def test_a_service_without_selector_and_a_slice_tied_to_it() -> None:
    service, piece = objects(endpoint("h200-1", "10.1.0.5", ready=False), endpoint("h200-0", "10.1.0.4"))
    assert service["metadata"]["name"] == "east-remote-prefill"
    assert service["spec"] == {"clusterIP": "None", "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}]}
    assert piece["metadata"]["labels"] == {
        "prfaas.io/cluster": "east",
        "prfaas.io/link": "east",
        "prfaas.io/role": "prefill",
        "prfaas.io/compatibility-key": "key-1",
        "app.kubernetes.io/part-of": "prfaas",
        "kubernetes.io/service-name": "east-remote-prefill",
        "endpointslice.kubernetes.io/managed-by": "prfaas-operator",
    }
    assert piece["ports"] == [{"name": "http", "port": 8000, "protocol": "TCP"}]
    assert [(each["hostname"], each["addresses"], each["conditions"]["ready"]) for each in piece["endpoints"]] == [
        ("h200-0", ["10.1.0.4"], True),
        ("h200-1", ["10.1.0.5"], False),
    ]
    for obj in (service, piece):
        assert obj["metadata"]["ownerReferences"] == [{"kind": "InterClusterLink", "name": "east", "uid": "u"}]


def test_no_endpoints_leave_the_service_alone() -> None:
    assert [obj["kind"] for obj in objects()] == ["Service"]


def test_families_ports_and_keys_do_not_share_a_slice() -> None:
    made = objects(
        endpoint("a", "10.0.0.1"),
        endpoint("b", "fd00::1"),
        endpoint("c", "10.0.0.2", port=9000),
        endpoint("d", "10.0.0.3", key="key-of-many-letters"),
    )
    assert [obj["metadata"]["name"] for obj in made[1:]] == [
        "east-remote-prefill-key-1-ipv4-8000-0",
        "east-remote-prefill-key-1-ipv4-9000-0",
        "east-remote-prefill-key-1-ipv6-8000-0",
        "east-remote-prefill-key-of-man-ipv4-8000-0",
    ]
    assert [obj["addressType"] for obj in made[1:]] == ["IPv4", "IPv4", "IPv6", "IPv4"]
    keys = [obj["metadata"]["labels"]["prfaas.io/compatibility-key"] for obj in made[1:]]
    assert keys == ["key-1", "key-1", "key-1", "key-of-many-letters"]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "a loopback address"),
        ("::1", "a loopback address"),
        ("169.254.169.254", "a link-local address"),
        ("fe80::1", "a link-local address"),
        ("224.0.0.1", "a multicast address"),
        ("ff02::1", "a multicast address"),
        ("0.0.0.0", "the unspecified address"),
        ("::", "the unspecified address"),
        ("255.255.255.255", "a broadcast address"),
        ("::ffff:127.0.0.1", "a loopback address"),
        ("::ffff:10.0.0.1", "an IPv4 address written as IPv6"),
    ],
)
def test_addresses_that_cannot_be_the_peers_are_left_out_by_name(address: str, why: str) -> None:
    judged = usable(endpoints(endpoint("bad", address), endpoint("good", "10.0.0.1")))
    assert [each.name for each in judged.endpoints] == ["good"]
    assert len(judged.refused) == 1
    assert judged.refused[0].startswith("endpoint bad: ")
    assert judged.refused[0].endswith(why)


def test_an_address_published_twice_is_mirrored_once() -> None:
    judged = usable(endpoints(endpoint("b", "10.0.0.1"), endpoint("a", "10.0.0.1"), endpoint("c", "10.0.0.1", port=1)))
    assert [each.name for each in judged.endpoints] == ["a", "c"]
    assert judged.refused == ("endpoint b: 10.0.0.1 port 8000 is published twice",)


@given(st.permutations(range(250)))
def test_slices_are_bounded_complete_and_the_same_whatever_the_order(order: list[int]) -> None:
    items = [endpoint(f"p{index:03}", f"10.0.{index // 250}.{index % 250 + 1}") for index in order]
    made = objects(*items)
    pieces = [obj["endpoints"] for obj in made[1:]]
    assert [len(piece) for piece in pieces] == [ENDPOINTS_PER_SLICE, ENDPOINTS_PER_SLICE, 50]
    assert [each["hostname"] for piece in pieces for each in piece] == [f"p{index:03}" for index in range(250)]


def test_a_name_that_is_no_host_name_is_not_made_one() -> None:
    long = "a" * 64
    piece = objects(endpoint(long, "10.0.0.1"), endpoint("a.b", "10.0.0.2"))[1]
    assert [each.get("hostname") for each in piece["endpoints"]] == [None, None]
    assert objects(endpoint("a" * 63, "10.0.0.1"))[1]["endpoints"][0]["hostname"] == "a" * 63
