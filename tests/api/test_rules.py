"""Every rule, with an example that it accepts and one that it rejects, before our models and before the API server."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from e2e.apiserver import ApiServer
from prfaas.api.crd import object_schema
from prfaas.api.kinds import KINDS
from prfaas.api.schema import Schema
from tests.api.documents import REMOVE, collection, example
from tests.api.rules_of_pools import (
    BAD_BANDWIDTH,
    BAD_NAME,
    PD,
    POOL_OF_PD,
    Case,
    of_both_pools,
)

LONG_NAME = "metadata.name may have at most 40 characters: names of children add to it"
LINK = "InterClusterLink"
SECRET_REF = {"name": "east-peer", "key": "config"}
OF_LINK = [
    Case(
        LINK,
        "exactly one of kubeConfigSecretRef and local is required",
        {"spec.peer.source": {"local": {}}},
        {"spec.peer.source": {"local": {}, "kubeConfigSecretRef": SECRET_REF}},
    ),
    Case(
        LINK,
        "exactly one of kubeConfigSecretRef and local is required",
        {"spec.peer.source": {"kubeConfigSecretRef": SECRET_REF}},
        {"spec.peer.source": {}},
    ),
    Case(
        LINK,
        "a link joins a PrfaaSCluster and a PDCluster: local.kind and remote.kind must differ",
        {"spec.local.kind": "PrfaaSCluster", "spec.remote.kind": "PDCluster"},
        {"spec.local.kind": "PrfaaSCluster"},
    ),
    Case(
        LINK,
        "encryption.control may be None only with peer.source.local: another API server is read over TLS alone",
        {"spec.peer.source": {"local": {}}, "spec.encryption.control": "None"},
        {"spec.encryption.control": "None"},
    ),
    Case(
        LINK,
        "period must be at least 1s",
        {"spec.probe.period": "1s", "spec.probe.timeout": "1s"},
        {"spec.probe.period": "0s"},
    ),
    Case(
        LINK,
        "timeout must be at least 1s and not above period",
        {"spec.probe.timeout": "20s"},
        {"spec.probe.timeout": "21s"},
    ),
    Case(
        LINK,
        "timeout must be at least 1s and not above period",
        {"spec.probe.timeout": "1s"},
        {"spec.probe.timeout": "0s"},
    ),
    Case(LINK, BAD_NAME, {"spec.network.line": "metro-2"}, {"spec.network.line": "Metro 2"}),
    Case(LINK, BAD_BANDWIDTH, {"spec.network.capacity": "1.5G"}, {"spec.network.capacity": "100Gi"}),
]

OF_EVERY_KIND = [Case(kind, LONG_NAME, {"metadata.name": "n" * 40}, {"metadata.name": "n" * 41}) for kind in KINDS]

CASES = [*OF_EVERY_KIND, *of_both_pools("PrfaaSCluster"), *of_both_pools(PD), *POOL_OF_PD, *OF_LINK]

UPDATES = [
    Case(
        "PrfaaSCluster",
        "nodesPerInstance cannot be changed",
        {"spec.gpusPerInstance": 32},
        {"spec.nodesPerInstance": 4},
    ),
    Case(PD, "nodesPerInstance cannot be changed", {"spec.gpusPerInstance": 32}, {"spec.nodesPerInstance": 1}),
    Case(
        LINK,
        "local cannot be changed: make another link",
        {"spec.network.capacity": "1G"},
        {"spec.local.name": "other"},
    ),
    Case(
        LINK, "remote cannot be changed: make another link", {"spec.paused": False}, {"spec.remote.namespace": "other"}
    ),
]
"""Rules about a change: both sides are updates of the full example."""

ENCRYPTION = ("control", "requests", "kv")


def rules_of(schema: Schema) -> set[str]:
    """Messages of every CEL rule of a schema."""
    found = {each["message"] for each in schema.get("x-kubernetes-validations", [])}
    children = [*schema.get("properties", {}).values()]
    children += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return found.union(*map(rules_of, children))


def test_every_rule_has_its_examples() -> None:
    written = {(kind, message) for kind, model in KINDS.items() for message in rules_of(object_schema(model))}
    tabled = {(case.kind, case.message) for case in (*CASES, *UPDATES)}

    assert written - tabled == set()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_follow_the_rule(case: Case) -> None:
    model = KINDS[case.kind]
    accepted, rejected = example(case.kind, case.accepted), example(case.kind, case.rejected)
    for document in (accepted, rejected):
        document["metadata"]["namespace"] = "default"

    model.model_validate(accepted)
    with pytest.raises(ValidationError) as caught:
        model.model_validate(rejected)

    # A pattern is pydantic's to report, in its own words.
    expected = "should match pattern" if case.message.startswith("should match") else case.message
    assert expected in str(caught.value)


@pytest.mark.apiserver
@pytest.mark.parametrize("case", CASES, ids=str)
def test_api_server_follows_the_rule(case: Case, apiserver: ApiServer) -> None:
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    path = collection(case.kind, "default")

    accepted = apiserver.request("POST", path, example(case.kind, case.accepted), query=query)
    rejected = apiserver.request("POST", path, example(case.kind, case.rejected), query=query)

    assert accepted.status == 201, accepted.message
    assert rejected.status == 422
    assert case.message in rejected.message


@pytest.mark.apiserver
@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_api_server_follows_the_rule_about_changes(case: Case, apiserver: ApiServer, namespace: str) -> None:
    before = example(case.kind)
    made = apiserver.request("POST", collection(case.kind, namespace), before)
    assert made.status == 201, made.message
    path = collection(case.kind, namespace, before["metadata"]["name"])
    version = {"metadata.resourceVersion": made.body["metadata"]["resourceVersion"]}

    rejected = apiserver.request("PUT", path, example(case.kind, {**case.rejected, **version}))
    accepted = apiserver.request("PUT", path, example(case.kind, {**case.accepted, **version}))

    assert rejected.status == 422
    assert case.message in rejected.message
    assert accepted.status == 200, accepted.message


@pytest.mark.apiserver
@pytest.mark.parametrize("part", ENCRYPTION)
def test_what_is_not_encrypted_must_be_written_out(part: str, apiserver: ApiServer) -> None:
    document = example(LINK, {f"spec.encryption.{part}": REMOVE})

    answer = apiserver.request("POST", collection(LINK, "default"), document, query={"dryRun": "All"})

    assert answer.status == 422
    assert f"spec.encryption.{part}: Required value" in answer.message
