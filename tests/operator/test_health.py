"""What the probes and metrics say."""

from __future__ import annotations

from datetime import UTC, datetime

from prfaas.kube.resources import Key
from prfaas.operator.health import RECONCILE_LIMIT_SECONDS, Health, Metrics

LINK = Key("prfaas.io/v1alpha1", "InterClusterLink", "llm", "to-east")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_a_reconcile_that_hangs_needs_a_restart() -> None:
    clock = Clock()
    health = Health(clock, working={"x": 0.0})
    clock.now = RECONCILE_LIMIT_SECONDS
    assert health.alive() is None
    clock.now += 1
    assert health.alive() == "the reconcile of x hangs"


def test_a_leader_is_ready_once_it_has_looked_and_a_candidate_while_the_server_answers() -> None:
    clock = Clock()
    health = Health(clock)
    assert health.ready() is not None
    health.contact = clock.now
    assert health.ready() is None
    clock.now = 61.0
    assert health.ready() is not None
    health.leading = True
    assert health.ready() is not None
    health.synced = True
    assert health.ready() is None


def test_the_end_of_a_links_credentials_is_a_gauge_that_goes_with_the_link() -> None:
    metrics = Metrics()
    metrics.set_credentials({LINK: datetime(2030, 1, 1, tzinfo=UTC)})
    line = b'prfaas_link_credentials_expiry_timestamp_seconds{link="to-east",namespace="llm"} 1.893456e+09'
    assert line in metrics.render().splitlines()
    metrics.set_credentials({})
    assert b"to-east" not in metrics.render()
