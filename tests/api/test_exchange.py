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
