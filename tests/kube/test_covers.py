"""What counts as "already so", and what as drift."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.kube.covers import content_hash, covers, parse_quantity, same_status

CONTAINER = {"name": "engine", "image": "e:1", "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": "1500m"}}}


def pod(*containers: Any, **spec: Any) -> dict[str, Any]:
    return {"kind": "Deployment", "spec": {"template": {"spec": {"containers": list(containers), **spec}}}}


ALIKE = {
    "defaults of the server": (
        pod({**CONTAINER, "terminationMessagePath": "/dev/termination-log"}, dnsPolicy="ClusterFirst"),
        pod(CONTAINER),
    ),
    "a container that somebody injected": (pod({"name": "mesh"}, CONTAINER), pod(CONTAINER)),
    "quantities in canonical form": (
        pod({"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "8"}}}),
        pod({"name": "a", "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi", "nvidia.com/gpu": 8}}}),
    ),
    "an empty value that is left out": (
        pod({"name": "a", "env": [{"name": "X"}]}),
        pod({"name": "a", "env": [{"name": "X", "value": ""}], "args": []}),
    ),
    "a false that is left out": (pod(CONTAINER), pod(CONTAINER, hostNetwork=False)),
    "a port whose protocol is the default": (
        pod({"name": "a", "ports": [{"containerPort": 8000, "protocol": "TCP"}]}),
        pod({"name": "a", "ports": [{"containerPort": 8000}]}),
    ),
}
DRIFT = {
    "a port of another protocol": (
        pod({"name": "a", "ports": [{"containerPort": 8000, "protocol": "UDP"}]}),
        pod({"name": "a", "ports": [{"containerPort": 8000}]}),
    ),
    "an image": (pod({**CONTAINER, "image": "e:2"}), pod(CONTAINER)),
    "a container removed": (pod({"name": "mesh"}), pod(CONTAINER)),
    "an argument added": (pod({"name": "a", "args": ["x", "y"]}), pod({"name": "a", "args": ["x"]})),
    "an argument that looks like an equal quantity": (
        pod({"name": "a", "args": ["1000m"]}),
        pod({"name": "a", "args": ["1"]}),
    ),
    "a quantity": (
        pod({"name": "a", "resources": {"limits": {"cpu": "2"}}}),
        pod({"name": "a", "resources": {"limits": {"cpu": "1"}}}),
    ),
    "a pointer to false that is gone, so that the default true holds": (
        pod(CONTAINER),
        pod(CONTAINER, automountServiceAccountToken=False),
    ),
    "a true where false is wanted": (pod(CONTAINER, hostNetwork=True), pod(CONTAINER, hostNetwork=False)),
    "a volume's source": (
        pod(volumes=[{"name": "v", "hostPath": {"path": "/"}}]),
        pod(volumes=[{"name": "v", "emptyDir": {}}]),
    ),
    "a toleration added, since that list has no keys": (
        pod(tolerations=[{"key": "a"}, {"key": "b"}]),
        pod(tolerations=[{"key": "a"}]),
    ),
    "an endpoint added to a slice": (
        {"kind": "EndpointSlice", "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}]},
        {"kind": "EndpointSlice", "endpoints": [{"addresses": ["10.0.0.1"]}]},
    ),
    "a port added to a slice": (
        {"kind": "EndpointSlice", "ports": [{"port": 1}, {"port": 2}]},
        {"kind": "EndpointSlice", "ports": [{"port": 1}]},
    ),
    "a number where a boolean is wanted": ({"spec": {"paused": 1}}, {"spec": {"paused": True}}),
    "a member gone": ({"spec": {}}, {"spec": {"replicas": 1}}),
}


@pytest.mark.parametrize(("live", "wanted"), ALIKE.values(), ids=ALIKE)
def test_alike(live: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert covers(live, wanted)


@pytest.mark.parametrize(("live", "wanted"), DRIFT.values(), ids=DRIFT)
def test_drift(live: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert not covers(live, wanted)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
_objects = st.dictionaries(st.text(max_size=5), _json, max_size=4)


@given(_objects)
def test_every_object_covers_itself(obj: dict[str, Any]) -> None:
    assert covers(obj, obj)
    assert same_status(obj, obj)


@given(_objects, st.text(max_size=5), st.integers(min_value=1))
def test_a_changed_number_is_always_seen(obj: dict[str, Any], member: str, number: int) -> None:
    assert not covers({**obj, member: number + 1}, {**obj, member: number})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1500m", "1.5"),
        ("1e3", "1000"),
        ("2E2", "200"),
        (8, "8"),
        ("0.5", "0.5"),
        *((f"3{unit}", str(3 * 1000**power)) for power, unit in enumerate("kMGTPE", start=1)),
        *((f"2{unit}i", str(2 * 1024**power)) for power, unit in enumerate("KMGTPE", start=1)),
    ],
)
def test_quantities(text: object, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "x", "1.2.3", "1Zi", True, None, "1 Gi"])
def test_what_is_no_quantity(text: object) -> None:
    assert parse_quantity(text) is None


def test_a_status_differs_when_a_member_is_to_go() -> None:
    assert not same_status({"a": 1, "b": 2}, {"a": 1})
    assert same_status({"a": 1, "c": {}}, {"a": 1, "b": None, "d": []})
    assert not same_status(None, {"a": 1})


def test_the_hash_does_not_depend_on_the_order_of_members() -> None:
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1}) != content_hash({"a": 1, "b": 3})
