"""The API server that tests run on: audit, tokens, rights, outages."""

from __future__ import annotations

import pytest

from e2e.apiserver import ApiServer

pytestmark = pytest.mark.apiserver


def config_map(name: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "b"}}


def test_the_audit_log_has_writes_as_soon_as_they_are_answered(apiserver: ApiServer, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    mark = apiserver.audit.mark()

    apiserver.request("POST", path, config_map("one"))
    apiserver.request("GET", f"{path}/one")
    apiserver.request("DELETE", f"{path}/one")

    writes = apiserver.audit.writes(mark, namespace)
    assert [(each.verb, each.resource, each.user) for each in writes] == [
        ("create", "configmaps", "admin"),
        ("delete", "configmaps", "admin"),
    ]


def test_service_accounts_have_tokens_and_only_their_rights(apiserver: ApiServer, namespace: str) -> None:
    core = f"/api/v1/namespaces/{namespace}"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}}
    apiserver.request("POST", f"{core}/serviceaccounts", account)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": ["prfaas-router"]}}
    routers = apiserver.request("POST", f"{core}/serviceaccounts/reader/token", asked).body["status"]["token"]
    own = apiserver.request("POST", f"{core}/serviceaccounts/reader/token", {**asked, "spec": {"audiences": []}})

    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": routers, "audiences": ["prfaas-router"]},
    }
    reviewed = apiserver.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", review).body["status"]
    refused = apiserver.request("GET", f"{core}/configmaps", token=own.body["status"]["token"])

    assert reviewed["authenticated"] is True
    assert reviewed["user"]["username"] == f"system:serviceaccount:{namespace}:reader"
    assert refused.status == 403


def test_outages(apiserver: ApiServer, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    apiserver.request("POST", path, config_map("kept"))

    with apiserver.hung(), pytest.raises(TimeoutError):
        apiserver.request("GET", path, timeout=0.5)
    apiserver.stop()
    with pytest.raises(ConnectionRefusedError):
        apiserver.request("GET", path)
    apiserver.start()

    assert apiserver.request("GET", f"{path}/kept").body["data"] == {"a": "b"}
