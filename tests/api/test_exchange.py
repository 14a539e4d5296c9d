"""Exchange documents: strict about what we know, silent about what a newer release adds."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prfaas.api.exchange import PoolDocument

DOCUMENT: dict[str, Any] = {
    "apiVersion": "prfaas.io/v1alpha1",
    "clusterID": "east",
    "kind": "PrfaaSCluster",
    "namespace": "serving",
    "name": "east",
    "generation": 3,
    "model": {"name": "org/model", "revision": "main"},
    "compatibilityKey": "0123",
    "endpoints": [
        {"name": "east-0", "address": "10.1.0.7", "port": 8000, "ready": True},
        {"name": "east-1", "address": "fd00::7", "port": 8000, "ready": False},
    ],
}


def test_round_trip() -> None:
    assert PoolDocument.model_validate(DOCUMENT).to_wire() == DOCUMENT


def test_fields_of_a_newer_release_are_ignored() -> None:
    newer = {**DOCUMENT, "novel": 1, "model": {**DOCUMENT["model"], "novel": 1}}

    assert PoolDocument.model_validate(newer).to_wire() == DOCUMENT


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"apiVersion": "prfaas.io/v2"}, "apiVersion"),
        ({"clusterID": ""}, "clusterID"),
        ({"kind": "Pod"}, "kind"),
        ({"endpoints": [{**DOCUMENT["endpoints"][0], "address": "not-an-address"}]}, "endpoints.0.address"),
        ({"endpoints": [DOCUMENT["endpoints"][0]] * 2}, "endpoints"),
    ],
)
def test_a_bad_document_is_refused_with_its_path(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PoolDocument.model_validate({**DOCUMENT, **change})

    # The address may be of either family, so its error has one line for each.
    assert ".".join(map(str, caught.value.errors()[0]["loc"])).startswith(path)


def test_a_pool_that_shows_no_groups_is_one() -> None:
    older = PoolDocument.model_validate(DOCUMENT)
    assert [group.to_wire() for group in older.by_key] == [
        {"compatibilityKey": "0123", "prefill": 2, "prefillReady": 1, "decode": 0, "decodeReady": 0}
    ]
    assert {older.key_of(endpoint) for endpoint in older.endpoints} == {"0123"}
    decoding = PoolDocument.model_validate(DOCUMENT | {"kind": "PDCluster", "endpoints": []})
    assert [(group.decode, group.decode_ready) for group in decoding.by_key] == [(1, 1)]


def test_groups_and_keys_of_endpoints_are_as_published() -> None:
    group = {"compatibilityKey": "k", "prefill": 1, "prefillReady": 1, "decode": 0, "decodeReady": 0}
    endpoint = {**DOCUMENT["endpoints"][0], "compatibilityKey": "k"}
    newer = PoolDocument.model_validate(DOCUMENT | {"groups": [group], "endpoints": [endpoint]})
    assert [each.to_wire() for each in newer.by_key] == [group]
    assert newer.key_of(newer.endpoints[0]) == "k"
    assert PoolDocument.model_validate(DOCUMENT | {"groups": []}).by_key == ()
