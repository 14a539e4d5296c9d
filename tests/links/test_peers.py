"""The reading of peers: registry and tasks, against servers that hang, refuse, lie and come back."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from aiohttp import web

from prfaas.api.conditions import Reason
from prfaas.kube.informer import WatchTimes
from prfaas.kube.kubeconfig import Credentials, write_kubeconfig
from prfaas.kube.resources import Key, Object
from prfaas.links.contact import Connected, NotConnected, NotProbed
from prfaas.links.peer import PeerSnapshot
from prfaas.links.registry import PeerRegistry
from tests.kube.fake_server import FakeServer, hang, plain_client, serving, status, stream
from tests.links.build import KEY, published, spec

pytestmark = pytest.mark.slow

TIMES = WatchTimes(server=30, inactivity=0.5, first_retry=0.02, longest_retry=0.1)
LOCAL = spec(local_source=True)
OTHER = Key(KEY.api_version, KEY.kind, "prfaas", "other")


@dataclass
class ExchangeServer(FakeServer):
    """A peer: its exchange holds `items`; `away` says how it fails, if it does."""

    away: Callable[[web.Request], object] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.away is not None:
            return await self.away(request)  # type: ignore[no-any-return, misc]  # an Answer, as in FakeServer
        if request.path == "/version":
            return web.json_response({"gitVersion": "v1.37.2"})
        return await super().handle(request)


def exchange(*items: Object, version: str = "100") -> ExchangeServer:
    stamped = [item | {"metadata": item["metadata"] | {"uid": "u", "resourceVersion": version}} for item in items]
    return ExchangeServer(items=stamped, version=version, watches=[stream(then="silence")])


@dataclass
class Watched:
    """A registry and the keys that it has announced."""

    registry: PeerRegistry
    announced: list[Key] = field(default_factory=list)

    async def until(self, condition: Callable[[PeerSnapshot], object], key: Key = KEY) -> PeerSnapshot:
        async with asyncio.timeout(20):
            while not condition(self.registry.snapshot(key)):  # noqa: ASYNC110  # any of many conditions
                await asyncio.sleep(0.01)
        return self.registry.snapshot(key)


@asynccontextmanager
async def watching(server: FakeServer) -> AsyncIterator[Watched]:
    """A registry whose local API server is `server`, so that a link with a local source reads it over plain http."""
    async with serving(server), plain_client(server.url, connect=0.3, call=0.3) as client:
        announced: list[Key] = []
        async with PeerRegistry(client, announced.append, watch_times=TIMES) as registry:
            yield Watched(registry, announced)


def connected(snapshot: PeerSnapshot) -> bool:
    return isinstance(snapshot.contact, Connected) and snapshot.read


def lost(snapshot: PeerSnapshot) -> bool:
    return isinstance(snapshot.contact, NotConnected)


async def test_a_peer_is_read_and_announced() -> None:
    async with watching(exchange(published())) as watched:
        assert watched.registry.ensure(KEY, LOCAL, None).contact == NotProbed()
        snapshot = await watched.until(connected)
        assert snapshot.contact == Connected("v1.37.2")
        assert snapshot.config_map is not None
        assert snapshot.config_map["data"] == published()["data"]
        assert snapshot.local
        assert set(watched.announced) == {KEY}


async def test_only_the_one_document_is_asked_for() -> None:
    seen: list[str] = []
    server = exchange(published())

    async def noting(request: web.Request) -> web.StreamResponse:
        seen.append(request.query.get("fieldSelector", ""))
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": server.items})

    server.list_answer = noting
    async with watching(server) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        await watched.until(connected)
        assert set(seen) == {"metadata.name=prfaascluster.prfaas.h200"}


async def test_a_pool_that_is_not_published_is_known_not_to_be() -> None:
    async with watching(exchange()) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        snapshot = await watched.until(connected)
        assert snapshot.config_map is None


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (hang, Reason.UNREACHABLE),
        (status(503), Reason.UNREACHABLE),
        (status(401, "Unauthorized"), Reason.UNAUTHORIZED),
        (status(403, "Forbidden"), Reason.FORBIDDEN),
    ],
    ids=["hangs", "503", "401", "403"],
)
async def test_a_lost_peer_keeps_its_document_and_what_it_says_on_its_return_is_taken(
    trouble: Callable[[web.Request], object], reason: Reason
) -> None:
    server = exchange(published())
    async with watching(server) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        before = await watched.until(connected)
        server.away = trouble
        gone = await watched.until(lost)
        assert isinstance(gone.contact, NotConnected)
        assert gone.contact.reason == reason
        assert gone.config_map == before.config_map
        server.items = exchange(published(generation=4), version="200").items
        server.away = None
        after = await watched.until(connected)
        assert after.config_map is not None
        assert '"generation": 4' in after.config_map["data"]["document.json"]


async def test_a_peer_that_never_answered_is_lost_after_its_threshold_and_never_read() -> None:
    server = exchange(published())
    server.away = hang
    async with watching(server) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        snapshot = await watched.until(lost)
        assert not snapshot.read


@pytest.mark.parametrize(
    "nonsense",
    [{"items": [7]}, {"metadata": 3, "items": []}, {"metadata": {"resourceVersion": "1"}, "items": [{"x": 1}]}],
    ids=["an item that is a number", "metadata that is a number", "an item without metadata"],
)
async def test_nonsense_is_contained_and_other_peers_are_read(nonsense: object) -> None:
    server = exchange(published())

    async def lying(request: web.Request) -> web.StreamResponse:
        other = "fieldSelector" in request.query and request.query["fieldSelector"].endswith(".other")
        answer = nonsense if other else {"metadata": {"resourceVersion": "1"}, "items": server.items}
        return web.json_response(answer)

    server.list_answer = lying
    liar = spec(local_source=True, remote={"kind": "PrfaaSCluster", "namespace": "prfaas", "name": "other"})
    async with watching(server) as watched:
        watched.registry.ensure(OTHER, liar, None)
        watched.registry.ensure(KEY, LOCAL, None)
        await watched.until(connected)
        snapshot = await watched.until(lost, OTHER)
        assert not snapshot.read
        assert connected(watched.registry.snapshot(KEY))


async def test_a_hanging_peer_does_not_slow_another() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side has had enough
        writer.close()

    silent = await asyncio.start_server(silence, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        kubeconfig = write_kubeconfig(Credentials(f"https://127.0.0.1:{port}", token="t"), name="x", namespace="y")
        server = exchange(published())
        async with watching(server) as watched:
            for index in range(5):
                key = Key(KEY.api_version, KEY.kind, "prfaas", f"hanging-{index}")
                watched.registry.ensure(key, spec(), kubeconfig.encode())
            watched.registry.ensure(KEY, LOCAL, None)
            snapshot = await watched.until(connected)
            assert snapshot.read
            hanging = watched.registry.snapshot(Key(KEY.api_version, KEY.kind, "prfaas", "hanging-0"))
            assert hanging.contact == NotProbed()


async def test_the_same_again_changes_nothing() -> None:
    server = exchange(published())
    async with watching(server) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        await watched.until(connected)
        lists = server.lists
        watched.announced.clear()
        for _ in range(5):
            assert connected(watched.registry.ensure(KEY, LOCAL, None))
        await asyncio.sleep(0)
        assert server.lists == lists
        assert watched.announced == []


async def test_another_probe_starts_anew_with_what_was_known() -> None:
    async with watching(exchange(published())) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        before = await watched.until(connected)
        probe = {"period": "2s", "timeout": "1s", "failureThreshold": 5, "successThreshold": 1}
        after = watched.registry.ensure(KEY, spec(local_source=True, probe=probe), None)
        assert after == before


async def test_another_pool_starts_with_nothing_known() -> None:
    async with watching(exchange(published())) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        await watched.until(connected)
        other = spec(local_source=True, remote={"kind": "PrfaaSCluster", "namespace": "prfaas", "name": "h100"})
        assert watched.registry.ensure(KEY, other, None) == PeerSnapshot(local=True)


async def test_a_missing_secret_and_a_bad_kubeconfig_are_told_and_overcome() -> None:
    async with watching(exchange()) as watched:
        missing = watched.registry.ensure(KEY, spec(), None)
        assert isinstance(missing.contact, NotConnected)
        assert missing.contact.reason == Reason.SECRET_NOT_FOUND
        assert "peer-east, key kubeconfig" in missing.contact.message
        bad = watched.registry.ensure(KEY, spec(), b"users: [{name: u, user: {exec: {command: sh}}}]")
        assert isinstance(bad.contact, NotConnected)
        assert bad.contact.reason == Reason.KUBE_CONFIG_INVALID
        assert bad.contact.lost_since == missing.contact.lost_since
        assert watched.registry.snapshot(KEY) == bad
        kubeconfig = write_kubeconfig(Credentials("https://127.0.0.1:1", token="t"), name="x", namespace="y")
        assert watched.registry.ensure(KEY, spec(), kubeconfig.encode()).contact == NotProbed()


async def test_the_end_of_credentials_is_known_where_they_say_it() -> None:
    def kubeconfig(token: str) -> bytes:
        return write_kubeconfig(Credentials("https://127.0.0.1:1", token=token), name="x", namespace="y").encode()

    async with watching(exchange()) as watched:
        claims = base64.urlsafe_b64encode(b'{"exp": 1893456000}').decode().rstrip("=")
        watched.registry.ensure(KEY, spec(), kubeconfig(f"e30.{claims}.x"))
        watched.registry.ensure(OTHER, spec(), kubeconfig("t"))
        assert watched.registry.credentials() == {KEY: datetime(2030, 1, 1, tzinfo=UTC)}
        watched.registry.remove(KEY)
        assert watched.registry.credentials() == {}


async def test_a_secret_that_goes_away_keeps_what_was_read() -> None:
    async with watching(exchange(published())) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        before = await watched.until(connected)
        gone = watched.registry.ensure(KEY, spec(), None)
        assert lost(gone)
        assert gone.config_map == before.config_map


async def test_a_removed_link_is_no_longer_read() -> None:
    server = exchange(published())
    async with watching(server) as watched:
        watched.registry.ensure(KEY, LOCAL, None)
        await watched.until(connected)
        watched.registry.remove(KEY)
        watched.registry.remove(KEY)
        assert watched.registry.snapshot(KEY) == PeerSnapshot()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("peer of")]
