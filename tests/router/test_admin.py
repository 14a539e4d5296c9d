"""The admin port: who may use the policy, what is refused, and when the router is ready."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e.local_router import EnvoyProcess
from prfaas.router.admin import ReviewFailedError
from prfaas.router.policies import PolicyStore
from prfaas.router.serve import RouterProcess, Settings
from tests.router.rig import (
    WRITER,
    MemorySource,
    policy,
)

USERS = {"operator-token": WRITER, "other-token": "system:serviceaccount:x:y"}


async def review(token: str) -> str | None:
    if token == "unreachable":
        raise ReviewFailedError("the API server is away")
    return USERS.get(token)


class AdminClient:
    """A client of the admin port of one router process."""

    def __init__(self, process: RouterProcess, store: PolicyStore, session: aiohttp.ClientSession) -> None:
        self.process, self.store, self._session = process, store, session

    async def call(
        self, method: str, path: str = "/v1/policy", body: Any = None, token: str | None = "operator-token"
    ) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.process.admin_port}{path}"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self._session.request(method, url, data=raw, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminClient]:
    store = PolicyStore()
    settings = Settings(
        run_dir=tmp_path, admin_host="127.0.0.1", admin_port=0, policy_writers=frozenset({WRITER}), grace_s=0
    )
    async with (
        RouterProcess(settings, MemorySource(), store, review) as process,
        aiohttp.ClientSession() as session,
    ):
        yield AdminClient(process, store, session)


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(("token", "code"), [(None, 401), ("unknown", 401), ("other-token", 403), ("unreachable", 503)])
async def test_only_writers_get_in(admin: AdminClient, method: str, token: str | None, code: int) -> None:
    status, answer = await admin.call(method, body=policy().to_wire() if method == "PUT" else None, token=token)
    assert status == answer["error"]["code"] == code
    assert admin.store.current is None


async def test_put_and_get(admin: AdminClient) -> None:
    assert (await admin.call("GET"))[0] == 404
    document = policy(epoch=2, version=5)
    force = {"pdClusterUID": "uid-1", "epoch": 2, "version": 5, "hash": document.hash}
    assert await admin.call("PUT", body=document.to_wire()) == (200, force)
    assert await admin.call("PUT", body=document.to_wire()) == (200, force), "putting it again is no conflict"
    assert await admin.call("GET") == (200, force)
    assert admin.store.current == document


async def test_an_older_document_is_a_conflict(admin: AdminClient) -> None:
    current = policy(epoch=2, version=5)
    await admin.call("PUT", body=current.to_wire())
    for older in (policy(epoch=2, version=4), policy(epoch=1, version=9), policy(pd_cluster_uid="uid-2", epoch=3)):
        status, answer = await admin.call("PUT", body=older.to_wire())
        assert status == 409
        assert '"version": 5' in answer["error"]["message"]
        assert admin.store.current == current


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        ({}, 422, "pdClusterUID: Field required"),
        ([], 422, "policy: "),
        (policy().to_wire() | {"epoch": -1}, 422, "epoch: "),
        (policy().to_wire() | {"model": "altered"}, 422, "the document was altered"),
        (b" " * (300 * 1024), 413, "Too Large"),
    ],
)
async def test_a_bad_document_changes_nothing(admin: AdminClient, body: Any, code: int, message: str) -> None:
    current = policy()
    await admin.call("PUT", body=current.to_wire())
    status, answer = await admin.call("PUT", body=body)
    assert status == code
    assert message in answer["error"]["message"]
    assert admin.store.current == current


async def test_the_metrics_show_the_policy_in_force(admin: AdminClient) -> None:
    await admin.call("PUT", body=policy(epoch=2, version=5).to_wire())
    await admin.call("PUT", body=policy(epoch=2, version=4).to_wire())
    await admin.call("PUT", body={})
    status, text = await admin.call("GET", "/metrics", token=None)
    assert status == 200
    for line in (
        "prfaas_router_policy_epoch 2.0",
        "prfaas_router_policy_version 5.0",
        'prfaas_router_threshold_tokens{link="to-east"} 100.0',
        'prfaas_router_policies_total{result="Accepted",source="put"} 1.0',
        'prfaas_router_policies_total{result="Stale",source="put"} 1.0',
        'prfaas_router_policies_total{result="Invalid",source="put"} 1.0',
    ):
        assert line in text.splitlines()


async def test_other_paths_are_json_errors(admin: AdminClient) -> None:
    status, answer = await admin.call("GET", "/nothing")
    assert status == answer["error"]["code"] == 404
    assert (await admin.call("DELETE"))[0] == 405


async def test_alive_but_not_ready_without_envoy(admin: AdminClient) -> None:
    assert await admin.call("GET", "/livez", token=None) == (200, {"live": True})
    await admin.call("PUT", body=policy().to_wire())
    expected = {"synced": True, "policy": True, "envoy": False, "serving": True}
    assert await admin.call("GET", "/readyz", token=None) == (503, expected)


@pytest.mark.envoy
async def test_ready_when_everything_is_there(running_envoy: EnvoyProcess) -> None:
    store, source = PolicyStore(), MemorySource(synced=False)
    settings = Settings(run_dir=running_envoy.run_dir, admin_host="127.0.0.1", admin_port=0, grace_s=0)
    async with RouterProcess(settings, source, store, review) as process, aiohttp.ClientSession() as session:
        admin = AdminClient(process, store, session)
        state = {"synced": False, "policy": False, "envoy": True, "serving": True}
        assert await admin.call("GET", "/readyz") == (503, state)
        store.offer(policy())
        source.synced = True
        state |= {"synced": True, "policy": True}
        assert await admin.call("GET", "/readyz") == (200, state)
        process.admin.stopping = True
        assert await admin.call("GET", "/readyz") == (503, state | {"serving": False})
