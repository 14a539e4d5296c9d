"""Kopf's glue: whose key an event puts into the queue, and with what credentials Kopf watches."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.apiserver import ApiServer
from prfaas.kube.client import KubeClient
from prfaas.kube.resources import Key
from prfaas.operator.handlers import CHILD_KINDS, connection, owners_of, register
from prfaas.operator.settings import EndlessBackoff, kopf_settings
from prfaas.operator.world import key_for


def child(**labels: str) -> dict[str, Any]:
    named = {f"prfaas.io/{name}": value for name, value in labels.items()}
    return {"metadata": {"name": "x", "namespace": "llm", "labels": named}}


@pytest.mark.parametrize(
    ("labels", "owners"),
    [
        ({"cluster": "west", "kind": "pdcluster"}, [key_for("PDCluster", "llm", "west")]),
        ({"cluster": "east", "kind": "prfaascluster"}, [key_for("PrfaaSCluster", "llm", "east")]),
        ({"link": "to-east", "kind": "interclusterlink"}, [key_for("InterClusterLink", "llm", "to-east")]),
        ({"cluster": "west", "kind": "other"}, []),
        ({"cluster": "west"}, []),
        ({}, []),
    ],
)
def test_a_childs_labels_name_its_owner(labels: dict[str, str], owners: list[Key]) -> None:
    assert list(owners_of(child(**labels))) == owners


def test_an_object_without_labels_concerns_nobody() -> None:
    assert list(owners_of({"metadata": {"name": "x"}})) == []


@pytest.mark.apiserver
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_kopf_gets_the_token_whatever_its_scheme_is_written(
    apiserver: ApiServer, client: KubeClient, scheme: str
) -> None:
    client.api.configuration.api_key["BearerToken"] = f"{scheme} secret\n"
    info = connection(client)
    assert (info.token, info.server) == ("secret", apiserver.url)


@pytest.mark.apiserver
async def test_a_renewed_token_is_read(client: KubeClient) -> None:
    def renew(configuration: Any) -> None:
        configuration.api_key["BearerToken"] = "bearer newer"

    client.api.configuration.refresh_api_key_hook = renew
    assert connection(client).token == "newer"


@pytest.mark.apiserver
async def test_only_events_are_handled_so_that_kopf_never_writes(client: KubeClient) -> None:
    registry = register(lambda _: None, client, groups=True)
    assert len(list(registry._watching.get_all_handlers())) == len(CHILD_KINDS) + 1 + 3
    for other in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert list(other.get_all_handlers()) == []


def test_kopf_tries_for_ever_and_each_time_anew() -> None:
    backoff = EndlessBackoff()
    for _ in range(2):
        waits = [wait for wait, _ in zip(backoff, range(20), strict=False)]
        assert waits[0] <= 0.5
        assert all(0 < wait <= 30 for wait in waits)


def test_kopf_watches_our_children_only_and_looks_for_nothing_else() -> None:
    settings = kopf_settings("me")
    assert settings.scanning.disabled
    assert settings.peering.standalone
    assert not settings.posting.enabled
    assert len(settings.watching.label_selectors) == len(CHILD_KINDS) + 1
