"""What a person sees: explain, columns, short names, scale, wait. By real kubectl against a real API server."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.api.crd import object_schema
from prfaas.api.kinds import KINDS
from prfaas.api.schema import Schema
from tests.api.documents import EXAMPLES, collection, example

pytestmark = pytest.mark.apiserver


def test_explain_shows_every_field_of_the_router(apiserver: ApiServer) -> None:
    schema = object_schema(KINDS["PDCluster"])["properties"]["spec"]["properties"]["router"]

    shown = apiserver.kubectl("explain", "pdcluster.spec.router", "--recursive")

    assert shown.returncode == 0, shown.stderr
    assert explained(shown.stdout) == set(paths(schema))


@pytest.mark.parametrize("kind", KINDS)
def test_explain_shows_every_field_of_a_kind(kind: str, apiserver: ApiServer) -> None:
    parts = object_schema(KINDS[kind])["properties"]

    for part in ("spec", "status"):
        shown = apiserver.kubectl("explain", f"{kind}.{part}".lower(), "--recursive")
        assert shown.returncode == 0, shown.stderr
        assert explained(shown.stdout) == set(paths(parts[part]))


def test_explain_has_units_and_meaning(apiserver: ApiServer) -> None:
    shown = apiserver.kubectl("explain", "pdc.spec.router.maxBodyBytes")

    assert "Largest request body, in bytes" in shown.stdout


def test_columns(apiserver: ApiServer, namespace: str) -> None:
    for kind in KINDS:
        place(apiserver, kind, namespace)

    shown = {short: table(apiserver.kubectl("get", short, "-n", namespace).stdout) for short in ("pfc", "pdc", "icl")}

    assert {key: value for key, value in shown["pfc"].items() if key != "AGE"} == {
        "NAME": "full",
        "READY": "False",
        "REASON": "Progressing",
        "INSTANCES": "4",
        "UP": "3",
        "PUBLISHED": "3",
    }
    assert {key: value for key, value in shown["pdc"].items() if key != "AGE"} == {
        "NAME": "full",
        "READY": "False",
        "REASON": "Progressing",
        "NP": "2",
        "ND": "4",
        "T": "19400",
        "POLICY": "17",
        "ACKS": "2",
        "ROUTERS": "3",
    }
    assert {key: value for key, value in shown["icl"].items() if key != "AGE"} == {
        "NAME": "full",
        "READY": "False",
        "REASON": "Unreachable",
        "PEER": "east",
        "REACHABLE": "True",
        "ENDPOINTS": "4",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_has_a_value_when_everything_is_set(kind: str, apiserver: ApiServer, namespace: str) -> None:
    place(apiserver, kind, namespace)

    answer = apiserver.request(
        "GET", collection(kind, namespace), accept="application/json;as=Table;v=v1;g=meta.k8s.io"
    )

    names = [column["name"] for column in answer.body["columnDefinitions"]]
    cells = dict(zip(names, answer.body["rows"][0]["cells"], strict=True))
    assert set(names) == {"Name", *(column.name for column in KINDS[kind].resource.columns)}
    assert [name for name, cell in cells.items() if cell in (None, "")] == []


def test_the_category_lists_all_three(apiserver: ApiServer, namespace: str) -> None:
    for kind in KINDS:
        place(apiserver, kind, namespace)

    listed = apiserver.kubectl("get", "prfaas", "-n", namespace, "-o", "name").stdout.split()

    assert sorted(listed) == [
        "interclusterlink.prfaas.io/full",
        "pdcluster.prfaas.io/full",
        "prfaascluster.prfaas.io/full",
    ]


@pytest.mark.parametrize(
    ("kind", "path", "selector"),
    [
        ("PrfaaSCluster", ("spec", "instances"), "prfaas.io/cluster=full"),
        ("PDCluster", ("spec", "pool", "instances"), "prfaas.io/cluster=full"),
    ],
)
def test_scale(kind: str, path: tuple[str, ...], selector: str, apiserver: ApiServer, namespace: str) -> None:
    place(apiserver, kind, namespace)
    plural = KINDS[kind].resource.plural

    scaled = apiserver.kubectl("scale", "-n", namespace, f"{plural}/full", "--replicas=6")
    assert scaled.returncode == 0, scaled.stderr

    stored: Any = apiserver.request("GET", collection(kind, namespace, "full")).body
    observed = stored["status"]["instances"]
    for name in path:
        stored = stored[name]
    scale = apiserver.request("GET", collection(kind, namespace, "full") + "/scale").body
    assert stored == 6
    assert scale["spec"]["replicas"] == 6
    assert scale["status"] == {"replicas": observed, "selector": selector}


def test_scale_is_held_to_the_rules(apiserver: ApiServer, namespace: str) -> None:
    place(apiserver, "PDCluster", namespace)

    refused = apiserver.kubectl("scale", "-n", namespace, "pdc/full", "--replicas=3")

    assert refused.returncode != 0
    assert "instances must be 0 (the pool is off) or at least prefill.min + decode.min" in refused.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_wait_for_ready(kind: str, apiserver: ApiServer, namespace: str) -> None:
    stored = place(apiserver, kind, namespace)
    wait = ("wait", "-n", namespace, "--for=condition=Ready", f"{KINDS[kind].resource.plural}/full")

    before = apiserver.kubectl(*wait, "--timeout=0s")
    stored["status"]["conditions"][0].update(status="True", reason="AsSpecified")
    answer = apiserver.request("PUT", collection(kind, namespace, "full") + "/status", stored)
    after = apiserver.kubectl(*wait, "--timeout=10s")

    assert before.returncode != 0
    assert answer.status == 200, answer.message
    assert after.returncode == 0, after.stderr


def test_status_is_not_written_with_the_spec_nor_the_spec_with_the_status(apiserver: ApiServer, namespace: str) -> None:
    stored = place(apiserver, "PrfaaSCluster", namespace)
    path = collection("PrfaaSCluster", namespace, "full")
    both = {**stored, "spec": {**stored["spec"], "instances": 9}, "status": {"instances": 9}}

    by_spec = apiserver.request("PUT", path, both).body
    by_status = apiserver.request("PUT", f"{path}/status", {**stored, "metadata": by_spec["metadata"]}).body

    assert (by_spec["spec"]["instances"], by_spec["status"]["instances"]) == (9, 4)
    assert (by_status["spec"]["instances"], by_status["status"]["instances"]) == (9, 4)


def test_conditions_are_merged_by_type_for_two_owners(apiserver: ApiServer, namespace: str) -> None:
    place(apiserver, "InterClusterLink", namespace)
    path = collection("InterClusterLink", namespace, "full") + "/status"
    theirs = {
        **EXAMPLES["InterClusterLink"][0]["status"]["conditions"][0],
        "type": "example.com/Reviewed",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }
    body = {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "InterClusterLink",
        "metadata": {"name": "full"},
        "status": {"conditions": [theirs]},
    }

    answer = apiserver.apply(path, body, owner="someone-else")

    assert answer.status == 200, answer.message
    assert [each["type"] for each in answer.body["status"]["conditions"]] == [
        "Ready",
        "PeerAPIReachable",
        "example.com/Reviewed",
    ]


def place(server: ApiServer, kind: str, namespace: str) -> dict[str, Any]:
    """The full example with its status, as stored."""
    made = server.request("POST", collection(kind, namespace), example(kind))
    assert made.status == 201, made.message
    path = collection(kind, namespace, made.body["metadata"]["name"])
    answer = server.request("PUT", f"{path}/status", {**made.body, "status": EXAMPLES[kind][0]["status"]})
    assert answer.status == 200, answer.message
    return answer.body


def table(text: str) -> dict[str, str]:
    """The one row of a kubectl table, by header."""
    header, row = text.splitlines()
    return dict(zip(header.split(), row.split(), strict=True))


def paths(schema: Schema, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field below a schema, as `kubectl explain --recursive` nests them: lists and maps add no level."""
    inner = schema.get("items") or schema.get("additionalProperties") or schema
    found = []
    for name, child in inner.get("properties", {}).items():
        found += [(*path, name), *paths(child, (*path, name))]
    return found


def explained(text: str) -> set[tuple[str, ...]]:
    """The fields that `kubectl explain --recursive` printed."""
    found = set()
    path: list[str] = []
    for line in text.split("FIELDS:\n", 1)[1].splitlines():
        name, _, kind = line.strip().partition("\t")
        if kind.startswith("<"):
            depth = (len(line) - len(line.lstrip())) // 2 - 1
            path[depth:] = [name]
            found.add(tuple(path))
    return found
