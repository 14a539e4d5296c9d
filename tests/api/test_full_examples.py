"""Explicit values survive: every field, set to a value that is not its default, comes back as it was written."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.api.crd import object_schema
from prfaas.api.kinds import KINDS
from prfaas.api.schema import leaves
from tests.api.documents import EXAMPLES, Document, collection, values

ALL = [document for documents in EXAMPLES.values() for document in documents]
IDS = [document["metadata"]["name"] + "-" + document["kind"] for document in ALL]


@pytest.mark.parametrize("kind", KINDS)
def test_examples_set_every_field_to_something_else_than_its_default(kind: str) -> None:
    schema = object_schema(KINDS[kind])
    missing = []
    for part in ("spec", "status"):
        for path, leaf in leaves(schema["properties"][part]):
            found = [value for document in EXAMPLES[kind] for value in values(document.get(part, {}), path)]
            if len(leaf.get("enum", ())) != 1:
                found = [value for value in found if value != leaf.get("default")]
            if not found:
                missing.append(f"{part}.{'.'.join(path)}")

    assert missing == []


@pytest.mark.parametrize("document", ALL, ids=IDS)
def test_models_lose_nothing(document: Document) -> None:
    placed = {**document, "metadata": {**document["metadata"], "namespace": "default"}}

    parsed = KINDS[document["kind"]].model_validate(placed)

    assert parsed.model_dump(mode="json", by_alias=True, exclude_unset=True) == placed
    assert lost(document["spec"], parsed.to_wire()["spec"]) == []


@pytest.mark.apiserver
@pytest.mark.parametrize("document", ALL, ids=IDS)
def test_api_server_loses_nothing(document: Document, apiserver: ApiServer, namespace: str) -> None:
    kind, name = document["kind"], document["metadata"]["name"]
    path = collection(kind, namespace, name)
    strict = {"fieldValidation": "Strict"}

    made = apiserver.request("POST", collection(kind, namespace), document, query=strict)
    assert made.status == 201, made.message
    if "status" in document:
        assert "status" not in made.body, "status is written through its own subresource only"
        answer = apiserver.request("PUT", f"{path}/status", {**made.body, "status": document["status"]}, query=strict)
        assert answer.status == 200, answer.message
    stored = apiserver.request("GET", path).body

    assert lost(document["spec"], stored["spec"]) == []
    assert stored.get("status") == document.get("status")
    KINDS[kind].model_validate(stored)


@pytest.mark.apiserver
@pytest.mark.parametrize("kind", KINDS)
def test_api_server_fills_in_the_models_defaults(kind: str, apiserver: ApiServer, namespace: str) -> None:
    required_only = without_optional(EXAMPLES[kind][0], object_schema(KINDS[kind]))
    made = apiserver.request("POST", collection(kind, namespace), required_only)
    assert made.status == 201, made.message

    ours = KINDS[kind].model_validate({**required_only, "metadata": {"name": "full", "namespace": namespace}})

    assert KINDS[kind].model_validate(made.body).to_wire()["spec"] == ours.to_wire()["spec"]
    assert lost(made.body["spec"], ours.to_wire()["spec"]) == []


@pytest.mark.apiserver
def test_a_misspelt_field_is_refused(apiserver: ApiServer) -> None:
    document = {**EXAMPLES["PDCluster"][0], "spec": {**EXAMPLES["PDCluster"][0]["spec"], "instancez": 1}}
    query = {"dryRun": "All", "fieldValidation": "Strict"}

    answer = apiserver.request("POST", collection("PDCluster", "default"), document, query=query)

    assert answer.status == 400
    assert 'unknown field "spec.instancez"' in answer.message


def lost(wanted: Any, got: Any, path: str = "") -> list[str]:
    """Paths whose value in `wanted` is not in `got`."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [each for key, value in wanted.items() for each in lost(value, got.get(key), f"{path}.{key}")]
    return [] if wanted == got else [f"{path}: {wanted!r} became {got!r}"]


def without_optional(value: Any, schema: dict[str, Any]) -> Any:
    """Only the members that a schema requires; of a union's alternatives, the one that is there."""
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    required = {"apiVersion", "kind", "metadata", "kubeConfigSecretRef", *schema.get("required", [])}
    return {
        name: without_optional(member, schema["properties"].get(name, {}))
        for name, member in value.items()
        if name in required
    }
