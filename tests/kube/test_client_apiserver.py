"""The client against a real API server: ownership of fields, conflicts, preconditions, tokens, rights, watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from e2e.apiserver import ADMIN_TOKEN, ApiServer
from prfaas.kube.client import KubeClient, Timeouts
from prfaas.kube.election import LeadershipLost
from prfaas.kube.errors import (
    AlreadyExists,
    BadCredentials,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Unauthorized,
    Unreachable,
)
from prfaas.kube.kubeconfig import Credentials, write_kubeconfig
from prfaas.kube.resources import CONFIG_MAP, POD, ROLE, ROLE_BINDING, SECRET, SERVICE_ACCOUNT, Object
from tests.hand import Hand

pytestmark = pytest.mark.apiserver


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[Hand]:
    async with await Hand.from_kubeconfig_file(apiserver.kubeconfig) as client:
        yield client


def strict_kubeconfig(apiserver: ApiServer, token: str, *, ca: bool = True) -> str:
    """A kubeconfig as a Secret holds one: nothing in it points to a file."""
    credentials = Credentials(apiserver.url, apiserver.ca_file.read_text() if ca else None, token=token)
    return write_kubeconfig(credentials, name="test", namespace="default")


def config_map(namespace: str, name: str = "a", **data: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    }


async def test_a_strict_kubeconfig_reaches_the_server(apiserver: ApiServer) -> None:
    async with Hand.from_kubeconfig(strict_kubeconfig(apiserver, ADMIN_TOKEN)) as client:
        assert (await client.version()).startswith("v1.")


async def test_a_wrong_token_is_unauthorized(apiserver: ApiServer) -> None:
    async with Hand.from_kubeconfig(strict_kubeconfig(apiserver, "wrong")) as client:
        with pytest.raises(Unauthorized):
            await client.list(CONFIG_MAP, "default")


async def test_a_server_whose_certificate_is_not_trusted_is_unreachable(apiserver: ApiServer) -> None:
    async with Hand.from_kubeconfig(strict_kubeconfig(apiserver, ADMIN_TOKEN, ca=False)) as client:
        with pytest.raises(Unreachable, match="certificate not trusted"):
            await client.version()


async def test_a_missing_kubeconfig_file_is_bad_credentials(apiserver: ApiServer) -> None:
    with pytest.raises(BadCredentials):
        await KubeClient.from_kubeconfig_file(apiserver.home / "absent")


async def test_apply_owns_its_fields_and_leaves_those_of_others(client: Hand, namespace: str) -> None:
    await client.apply(config_map(namespace, ours="1", dropped="1"), field_manager="us")
    await client.patch_merge(CONFIG_MAP, "a", namespace, {"data": {"theirs": "1"}}, field_manager="them")
    applied = await client.apply(config_map(namespace, ours="2"), field_manager="us")
    assert applied["data"] == {"ours": "2", "theirs": "1"}
    owners = {entry["manager"]: entry["operation"] for entry in applied["metadata"]["managedFields"]}
    assert owners == {"us": "Apply", "them": "Update"}


async def test_applying_the_same_again_changes_nothing(client: Hand, namespace: str) -> None:
    first = await client.apply(config_map(namespace, k="1"), field_manager="us")
    again = await client.apply(config_map(namespace, k="1"), field_manager="us")
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_without_force_a_field_of_another_is_a_conflict(client: Hand, namespace: str) -> None:
    await client.apply(config_map(namespace, k="1"), field_manager="them")
    with pytest.raises(Conflict):
        await client.apply(config_map(namespace, k="2"), field_manager="us", force=False)
    assert (await client.apply(config_map(namespace, k="2"), field_manager="us"))["data"] == {"k": "2"}


async def test_an_apply_with_a_uid_does_not_bring_a_deleted_object_back(client: Hand, namespace: str) -> None:
    first = await client.create(config_map(namespace, k="1"))
    await client.delete(CONFIG_MAP, "a", namespace)
    obj = config_map(namespace, k="2")
    obj["metadata"]["uid"] = first["metadata"]["uid"]
    with pytest.raises(Conflict):
        await client.apply(obj, field_manager="us")
    with pytest.raises(NotFound):
        await client.get(CONFIG_MAP, "a", namespace)


async def test_creating_twice_and_replacing_a_stale_version_are_conflicts(client: Hand, namespace: str) -> None:
    first = await client.create(config_map(namespace, k="1"))
    with pytest.raises(AlreadyExists):
        await client.create(config_map(namespace, k="1"))
    second = await client.replace({**first, "data": {"k": "2"}})
    assert second["data"] == {"k": "2"}
    with pytest.raises(Conflict):
        await client.replace({**first, "data": {"k": "3"}})


async def test_deleting_by_uid_spares_a_namesake(client: Hand, namespace: str) -> None:
    first = await client.create(config_map(namespace, k="1"))
    await client.delete(CONFIG_MAP, "a", namespace, uid=first["metadata"]["uid"])
    second = await client.create(config_map(namespace, k="2"))
    with pytest.raises(Conflict):
        await client.delete(CONFIG_MAP, "a", namespace, uid=first["metadata"]["uid"])
    assert (await client.get(CONFIG_MAP, "a", namespace))["metadata"]["uid"] == second["metadata"]["uid"]
    with pytest.raises(NotFound):
        await client.delete(CONFIG_MAP, "b", namespace)


@pytest.mark.parametrize("data", [{"bad key!": "x"}, {"k": {"not": "text"}}])
async def test_a_bad_object_is_invalid_with_the_servers_words(
    client: Hand, namespace: str, data: dict[str, Any]
) -> None:
    with pytest.raises(Invalid) as caught:
        await client.apply({**config_map(namespace), "data": data}, field_manager="us")
    assert "data" in caught.value.message


async def test_a_list_is_read_over_several_pages(client: Hand, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prfaas.kube.client.PAGE", 2)
    for index in range(5):
        await client.create(config_map(namespace, f"m{index}", k=str(index)))
    answer = await client.list(CONFIG_MAP, namespace)
    assert [item["metadata"]["name"] for item in answer.items] == [f"m{index}" for index in range(5)]
    assert {(item["apiVersion"], item["kind"]) for item in answer.items} == {("v1", "ConfigMap")}


async def test_a_watch_goes_on_from_the_list(client: Hand, namespace: str) -> None:
    await client.create(config_map(namespace, "before"))
    start = (await client.list(CONFIG_MAP, namespace)).resource_version
    await client.create(config_map(namespace, "a", k="1"))
    await client.patch_merge(CONFIG_MAP, "a", namespace, {"data": {"k": "2"}})
    await client.delete(CONFIG_MAP, "a", namespace)
    seen: list[tuple[str, str]] = []
    async with aclosing(client.watch(CONFIG_MAP, namespace, resource_version=start)) as events:
        async for event in events:
            seen.append((event.type, event.object["metadata"]["name"]))
            if event.type == "DELETED":
                break
    assert seen == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


async def test_a_watch_ends_when_the_server_ends_it(client: Hand, namespace: str) -> None:
    start = (await client.list(CONFIG_MAP, namespace)).resource_version
    events = client.watch(CONFIG_MAP, namespace, resource_version=start, server_timeout=1)
    assert [event async for event in events if event.type != "BOOKMARK"] == []


async def test_a_service_account_may_do_what_it_was_given_and_tokens_are_reviewed(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    place = {"namespace": namespace, "name": "reader"}
    await client.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": place})
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]
    await client.create({"apiVersion": ROLE.api_version, "kind": "Role", "metadata": place, "rules": rules})
    await client.create(
        {
            "apiVersion": ROLE_BINDING.api_version,
            "kind": "RoleBinding",
            "metadata": place,
            "roleRef": {"apiGroup": ROLE.group, "kind": "Role", "name": "reader"},
            "subjects": [{"kind": SERVICE_ACCOUNT.kind, "name": "reader", "namespace": namespace}],
        }
    )
    await client.create(config_map(namespace, k="1"))
    token, ends = await client.create_token("reader", namespace, seconds=600)
    assert ends.endswith("Z")
    async with Hand.from_kubeconfig(strict_kubeconfig(apiserver, token)) as reader:
        assert (await reader.get(CONFIG_MAP, "a", namespace))["data"] == {"k": "1"}
        with pytest.raises(Forbidden):
            await reader.list(SECRET, namespace)
        assert await reader.may_i("get", CONFIG_MAP, namespace)
        assert not await reader.may_i("get", CONFIG_MAP, "default")
        assert not await reader.may_i("create", POD, namespace, subresource="exec")
    ours, _ = await client.create_token("reader", namespace, seconds=600, audiences=("prfaas-router",))
    assert await client.token_review(ours, "prfaas-router") == f"system:serviceaccount:{namespace}:reader"
    assert await client.token_review(token, "prfaas-router") is None
    assert await client.token_review("nonsense", "prfaas-router") is None


async def test_a_closed_gate_stops_writes_before_they_are_sent(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    def closed() -> None:
        raise LeadershipLost("not leading")

    client.write_gate = closed
    mark = apiserver.audit.mark()
    with pytest.raises(LeadershipLost):
        await client.apply(config_map(namespace), field_manager="us")
    assert (await client.list(CONFIG_MAP, namespace)).items == []
    assert not [event for event in apiserver.audit.writes(mark, namespace) if event.resource == "configmaps"]


async def test_a_hanging_server_is_unreachable_and_works_again_afterwards(apiserver: ApiServer) -> None:
    timeouts = Timeouts(connect=0.5, call=0.5)
    async with await KubeClient.from_kubeconfig_file(apiserver.kubeconfig, timeouts=timeouts) as client:
        with apiserver.hung(), pytest.raises(Unreachable, match="no answer in time"):
            await client.version()
    async with await Hand.from_kubeconfig_file(apiserver.kubeconfig) as client:
        assert await asyncio.wait_for(client.version(), 30)
