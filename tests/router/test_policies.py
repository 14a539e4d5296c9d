"""The policy in force changes only forward."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prfaas.api.policy import RoutingPolicy
from prfaas.kube.errors import Forbidden
from prfaas.router.kubernetes_source import PolicyWatch, offer_config_map
from prfaas.router.ledger import Ledger
from prfaas.router.metrics import Metrics
from prfaas.router.policies import Offer, PolicyStore
from prfaas.routing.world import Pools
from tests.router.rig import policy


def config_map(text: str | None) -> dict[str, Any]:
    return {"metadata": {"name": "west-routing-policy"}, "data": {} if text is None else {"policy.json": text}}


class Refusing:
    """A client that may read nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def list(self, *_: Any, **__: Any) -> Any:
        self.asked.set()
        raise Forbidden("may not list")


async def test_a_policy_that_may_not_be_watched_is_said(caplog: pytest.LogCaptureFixture) -> None:
    client: Any = Refusing()
    metrics = Metrics(Ledger(now=lambda: 0.0), Pools)
    running = asyncio.create_task(PolicyWatch(client, "llm", "west", PolicyStore(), metrics).run())
    async with asyncio.timeout(20):
        await client.asked.wait()
        while not caplog.text:  # noqa: ASYNC110  # the log has no event
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("ConfigMaps named west-routing-policy cannot be watched now")
    assert said.endswith("Forbidden: may not list")


def test_newer_documents_replace_older_ones_and_say_so() -> None:
    taken: list[RoutingPolicy] = []
    store = PolicyStore(on_change=taken.append)
    first, second = policy(version=1), policy(version=2, threshold=7)
    assert store.offer(first) is Offer.ACCEPTED
    assert store.offer(first) is Offer.UNCHANGED
    assert store.offer(second) is Offer.ACCEPTED
    assert store.offer(first) is Offer.STALE
    assert store.current == second
    assert taken == [first, second]


def test_the_same_version_with_another_content_is_stale() -> None:
    store = PolicyStore(current=policy(version=2, threshold=1))
    assert store.offer(policy(version=2, threshold=2)) is Offer.STALE


def test_a_new_leader_wins_whatever_its_version() -> None:
    store = PolicyStore(current=policy(epoch=1, version=9))
    assert store.offer(policy(epoch=2, version=1)) is Offer.ACCEPTED


def test_a_recreated_cluster_takes_over_by_the_api_only() -> None:
    old, new = policy(epoch=5), policy(pd_cluster_uid="uid-2")
    store = PolicyStore()
    assert store.from_api(old) is Offer.ACCEPTED
    assert store.offer(new) is Offer.STALE
    assert store.from_api(new) is Offer.ACCEPTED
    assert store.offer(policy(epoch=6)) is Offer.STALE, "a late document of the old one"


def test_a_config_map_is_read_and_a_bad_one_changes_nothing() -> None:
    store = PolicyStore()
    good = policy()
    assert offer_config_map(store, config_map(json.dumps(good.to_wire()))) == "Accepted"
    for text in (None, "", "{", "[]", json.dumps(policy(version=2).to_wire() | {"model": "other"})):
        assert offer_config_map(store, config_map(text)) == "Invalid"
        assert store.current == good
