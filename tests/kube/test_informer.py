"""The informer against a server that misbehaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from prfaas.kube.backoff import Backoff
from prfaas.kube.client import KubeClient
from prfaas.kube.errors import Forbidden, KubeError, Unreachable
from prfaas.kube.informer import Change, Informer, WatchTimes, log_transitions
from prfaas.kube.kubeconfig import Credentials
from prfaas.kube.resources import CONFIG_MAP
from tests.kube.fake_server import FakeServer, config_map, hang, plain_client, serving, status, stream

pytestmark = pytest.mark.slow

TIMES = WatchTimes(server=30, inactivity=0.2, first_retry=0.01, longest_retry=0.05)
GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


@asynccontextmanager
async def informing(server: FakeServer, *, times: WatchTimes = TIMES) -> AsyncIterator[tuple[Informer, list[Change]]]:
    async with serving(server), plain_client(server.url) as client:
        informer = Informer(client, CONFIG_MAP, namespace="ns", times=times)
        changes: list[Change] = []
        informer.on_change(changes.append)
        task = asyncio.create_task(informer.run())
        try:
            yield informer, changes
        finally:
            assert not task.done(), task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the conditions are of many kinds, outside of this loop's events
            await asyncio.sleep(0.005)


def names(informer: Informer) -> set[str]:
    return {name for _, name in informer.items}


async def test_list_then_watch() -> None:
    events = (
        ("ADDED", config_map("b", "101")),
        ("MODIFIED", config_map("a", "102")),
        ("DELETED", config_map("b", "103")),
    )
    server = FakeServer(items=[config_map("a", "90")], watches=[stream(*events, then="silence")])
    async with informing(server) as (informer, changes):
        await asyncio.wait_for(informer.synced.wait(), 20)
        await until(lambda: len(changes) == 4)
        seen = [(change.name[1], change.old is not None, change.new is not None) for change in changes]
        assert seen == [("a", False, True), ("b", False, True), ("a", True, True), ("b", True, False)]
        assert names(informer) == {"a"}
        assert informer.get("a", "ns") is not None
        assert informer.last_contact is not None


async def test_a_silent_watch_is_opened_again_from_where_it_was() -> None:
    bookmark = ("BOOKMARK", {"metadata": {"resourceVersion": "150"}})
    server = FakeServer(
        watches=[stream(bookmark, then="silence"), stream(("ADDED", config_map("late", "151")), then="silence")]
    )
    async with informing(server) as (informer, _):
        await until(lambda: "late" in names(informer))
        assert server.requests[:3] == ["list", "watch 100", "watch 150"]


async def test_a_stream_that_ends_is_continued_without_a_new_list() -> None:
    server = FakeServer(
        watches=[stream(("ADDED", config_map("a", "101"))), stream(("ADDED", config_map("b", "102")), then="silence")]
    )
    async with informing(server) as (informer, _):
        await until(lambda: names(informer) == {"a", "b"})
        assert server.requests[:3] == ["list", "watch 100", "watch 101"]
        assert informer.error is None


@pytest.mark.parametrize("expired", [stream(("ERROR", GONE)), status(410, "Expired")], ids=["in stream", "as answer"])
async def test_an_expired_version_heals_by_a_new_list_which_also_finds_what_went(expired: object) -> None:
    server = FakeServer(items=[config_map("old", "90")])
    server.watches = [expired, stream(then="silence")]  # type: ignore[list-item]  # the parameter is one of both kinds
    async with informing(server) as (informer, changes):
        await informer.synced.wait()
        server.items = [config_map("new", "190")]
        await until(lambda: names(informer) == {"new"})
        assert [(c.name[1], c.new is None) for c in changes[1:]] == [("old", True), ("new", False)]
        assert informer.error is None


async def test_what_a_new_list_finds_unchanged_is_not_announced() -> None:
    server = FakeServer(items=[config_map("a", "90")], watches=[status(410, "Expired"), stream(then="silence")])
    async with informing(server) as (_, changes):
        await until(lambda: server.lists == 2 and len(server.requests) >= 4)
        assert len(changes) == 1


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (status(500, "InternalError"), Unreachable),
        (status(403, "Forbidden"), Forbidden),
        (hang, Unreachable),
        (stream(("ERROR", {"code": 500, "message": "storage is re-initializing"})), Unreachable),
        (stream(("NONSENSE", {})), Unreachable),
    ],
    ids=["500", "403", "hang", "error event", "nonsense"],
)
async def test_any_other_trouble_is_told_kept_through_and_overcome(trouble: object, kind: type[KubeError]) -> None:
    event = ("ADDED", config_map("b", "101"))
    server = FakeServer(items=[config_map("a", "90")])
    server.watches = [trouble, stream(event, then="silence")]  # type: ignore[list-item]  # one of both kinds
    async with informing(server) as (informer, _):
        states: list[type[KubeError] | None] = []
        informer.on_state(lambda: states.append(type(informer.error) if informer.error else None))
        await until(lambda: "b" in names(informer))
        assert states == [None, kind, None]  # synced, in trouble, well again
        assert server.lists == 1


async def test_losing_and_finding_the_server_is_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = FakeServer(list_answer=status(403, "Forbidden"), watches=[stream(then="silence")])
    async with informing(server) as (informer, _):
        log_transitions(informer, logging.getLogger("test"), "Secrets in here")
        await until(lambda: server.lists > 3)
        server.list_answer = status(500, "InternalError")
        await until(lambda: isinstance(informer.error, Unreachable))
        server.list_answer = None
        await until(informer.synced.is_set)
    first, second = (record.getMessage() for record in caplog.records if record.name == "test")
    assert first.startswith("Secrets in here cannot be watched now, what is known of them stays: ")
    assert second == "Secrets in here are watched again"


async def test_the_copy_stays_while_the_server_is_away() -> None:
    server = FakeServer(items=[config_map("a", "90")], watches=[status(503)])
    async with informing(server) as (informer, changes):
        await until(lambda: len(server.requests) > 5)
        assert isinstance(informer.error, Unreachable)
        assert names(informer) == {"a"}
        assert len(changes) == 1


async def test_not_synced_before_the_first_list_is_in() -> None:
    server = FakeServer(list_answer=status(403, "Forbidden"), watches=[stream(then="silence")])
    async with informing(server) as (informer, _):
        await until(lambda: isinstance(informer.error, Forbidden))
        assert not informer.synced.is_set()
        server.list_answer = None
        await until(lambda: informer.synced.is_set() and informer.error is None)


async def test_retry_after_is_obeyed() -> None:
    moments: list[float] = []

    async def shedding(request: web.Request) -> web.StreamResponse:
        moments.append(asyncio.get_running_loop().time())
        return await status(429, "TooManyRequests", Retry_After="1")(request)

    async with informing(FakeServer(list_answer=shedding)):
        await until(lambda: len(moments) == 2)
        assert moments[1] - moments[0] >= 1.0


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_hot_loop() -> None:
    server = FakeServer(watches=[stream()])
    times = WatchTimes(server=30, inactivity=5, first_retry=0.2, longest_retry=60)
    async with informing(server, times=times) as (informer, _):
        await informer.synced.wait()
        await asyncio.sleep(1.0)
        assert len(server.requests) < 12


async def test_what_a_callback_raises_ends_the_run() -> None:
    server = FakeServer(items=[config_map("a", "1")], watches=[stream(then="silence")])

    def broken(_: Change) -> None:
        raise ValueError("a bug")

    async with serving(server), plain_client(server.url) as client:
        informer = Informer(client, CONFIG_MAP, namespace="ns", times=TIMES)
        informer.on_change(broken)
        with pytest.raises(ValueError, match="a bug"):
            await asyncio.wait_for(informer.run(), 20)


async def test_objects_are_reduced_before_they_are_kept() -> None:
    big = config_map("a", "1")
    big["data"] = {"k": "x" * 1000}
    big["metadata"]["managedFields"] = [{}]
    server = FakeServer(items=[big], watches=[stream(then="silence")])
    async with serving(server), plain_client(server.url) as client:
        informer = Informer(client, CONFIG_MAP, times=TIMES, keep=lambda obj: {"metadata": obj["metadata"]})
        task = asyncio.create_task(informer.run())
        await asyncio.wait_for(informer.synced.wait(), 20)
        assert informer.get("a", "ns") == {"metadata": config_map("a", "1")["metadata"]}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_answer_without_bound_is_cut_off() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async with serving(FakeServer(list_answer=endless)) as server, plain_client(server.url, call=20) as client:
        client.max_bytes = 1_000_000
        with pytest.raises(KubeError, match="larger than 1000000 bytes"):
            await client.list(CONFIG_MAP)


async def test_a_redirect_is_not_followed() -> None:
    target = FakeServer()

    async def elsewhere(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(target.url + "/stolen")

    async with serving(target), serving(FakeServer(list_answer=elsewhere)) as server:
        client = KubeClient.from_credentials(Credentials(server.url, token="secret"))
        async with client:
            with pytest.raises(Unreachable, match="redirect"):
                await client.list(CONFIG_MAP)
    assert target.requests == []


def test_waits_grow_to_the_cap_with_jitter_and_start_again() -> None:
    backoff = Backoff(1, 8, jitter=lambda: 0.0)
    assert [backoff.next() for _ in range(5)] == [1, 2, 4, 8, 8]
    assert backoff.next(at_least=20) == 20
    backoff.reset()
    assert backoff.next() == 1
    assert Backoff(1, 8, jitter=lambda: 1.0).next() == 0.5
    with pytest.raises(ValueError, match="0 < base <= cap"):
        Backoff(2, 1)
