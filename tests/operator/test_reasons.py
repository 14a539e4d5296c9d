"""Every pair of condition and reason that is documented is given by something, and nothing else is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from prfaas.api.conditions import FETCH_FAILURES, REASONS, SUMMARY_REASONS, Reason, Type, Verdict
from prfaas.api.pd_cluster import PDCluster
from prfaas.api.policy import RoutingPolicy
from prfaas.api.pool import ModelSpec
from prfaas.kube.errors import Forbidden, Invalid, NameTaken
from prfaas.kube.resources import Object
from prfaas.links.assess import assess
from prfaas.links.contact import Connected, NotConnected
from prfaas.links.document import LocalEnd
from prfaas.links.peer import PeerSnapshot
from prfaas.operator.exchange import Published
from prfaas.operator.fetches import State
from prfaas.operator.inter_cluster_link import unless_refused
from prfaas.operator.model_cache import judge
from prfaas.operator.observed import routers
from prfaas.operator.pd_cluster import remote_prefill
from prfaas.operator.prfaas_cluster import exported
from prfaas.operator.verdicts import (
    conditions,
    pods_placed,
    rolling,
    router_ready,
    router_synced,
    serving,
    spec_obstacle,
    summary,
    write_obstacle,
)
from prfaas.workloads.assignment import Cause, Hold, Step
from prfaas.workloads.errors import SpecError
from prfaas.workloads.model import Place
from tests.links.build import LOCAL, endpoint, published, spec
from tests.operator.test_remote_prefill import cluster, link
from tests.operator.test_verdicts import REFUSED, SPEC, crashing, deployment, pod, router, seen

NOW = datetime(2026, 1, 2, tzinfo=UTC)
WELL = PeerSnapshot(contact=Connected("v1.37"), config_map=published(), read=True)


def given() -> Iterator[Verdict]:
    """One of everything that can be said."""
    yield from _pools()
    yield from _models()
    yield from _routers()
    yield from (remote_prefill(*each) for each in _remotes())
    yield from _links()
    yield exported(Published(True, 1))
    yield exported(Published(False, 1, "forbidden"))


def _models() -> Iterator[Verdict]:
    for model in (
        {"name": "m"},
        {"name": "m", "source": "pvc://models"},
        {"name": "m", "source": "hf://org/m", "cache": {"hostPath": {"path": "/models"}}},
    ):
        pool = SPEC.model_copy(update={"model": ModelSpec.model_validate(model)})
        yield judge(pool, {}, [], 0, NOW)
        yield judge(pool, {}, [], 1, NOW)
    for reason in (*FETCH_FAILURES, Reason.CRASHING, Reason.UNSCHEDULABLE, Reason.FETCHING):
        yield judge(pool, {Place("node"): State(False, reason)}, [], 1, NOW)
    yield judge(pool, {Place("node"): State(True)}, [], 1, NOW)


def _pools() -> Iterator[Verdict]:
    here = [deployment(0)]
    yield pods_placed(seen(here, [pod(0)]), SPEC, 1)
    yield pods_placed(seen([], []), SPEC, 0)
    yield pods_placed(seen([], []), SPEC, 1)
    yield pods_placed(seen(here, [pod(0, node=None, conditions=[REFUSED])]), SPEC, 1)
    broken = seen(here, [pod(0, containerStatuses=[crashing()])])
    for unmet in (
        None,
        serving(seen(here, []), Step(held={"east-0": Hold(Cause.BUDGET)})),
        serving(seen([deployment(0, ready=False)], []), Step()),
        serving(broken, Step()),
    ):
        yield from summary([unmet], obstacle=None, paused=False)
    two = seen([deployment(0), deployment(1)], [])
    for step in (
        Step(roll={"east-0": "prefill"}),
        Step(held={"east-0": Hold(Cause.PEER, ("to-west",))}),
    ):
        yield from summary([], obstacle=None, paused=False, rolls=rolling(two, step, ()))
    yield from summary([], obstacle=None, paused=True)
    yield from summary([], obstacle=None, paused=False, draining=True)
    for obstacle in (
        spec_obstacle(SpecError("spec", "wrong", "right")),
        write_obstacle([NameTaken("taken")]),
        write_obstacle([Forbidden("no")]),
        write_obstacle([Invalid("bad")]),
    ):
        yield from summary([], obstacle=obstacle, paused=False)


def _routers() -> Iterator[Verdict]:
    policy = RoutingPolicy.build(pd_cluster_uid="u", epoch=1, version=1, model="m")
    up = routers([router("a", ready=True)])
    yield router_ready(up, None, 1)
    yield router_ready((), None, 0)
    yield router_ready(routers([router("a")]), None, 1)
    yield router_ready(routers([router("a", containerStatuses=[crashing()])]), None, 1)
    yield router_ready(routers([router("a", node=None, conditions=[REFUSED])]), None, 1)
    yield router_synced(policy, up, {"ip-a"})
    yield router_synced(policy, up, ())
    yield router_synced(policy, (), ())


def _remotes() -> Iterator[tuple[PDCluster, list[tuple[str, Object | None]]]]:
    west = cluster("to-east")
    yield cluster(), []
    yield west, [("to-east", None)]
    yield west, [("to-east", {})]
    yield west, [("to-east", link(True, Reason.MIRRORED, 0))]
    yield west, [("to-east", link(True, Reason.MIRRORED, 1))]


def _links() -> Iterator[Verdict]:
    def lost(reason: Reason, *, known: bool = True) -> PeerSnapshot:
        contact = NotConnected(reason, "why", NOW)
        return replace(WELL, contact=contact) if known else PeerSnapshot(contact=contact)

    peers = [
        WELL,
        PeerSnapshot(),
        replace(WELL, local=True),
        replace(WELL, config_map=None),
        replace(WELL, config_map=published(content="{")),
        replace(WELL, config_map=published(clusterID="north")),
        replace(WELL, config_map=published(endpoints=[endpoint("a", "10.0.0.1", ready=False)])),
        lost(Reason.UNREACHABLE),
        lost(Reason.UNREACHABLE, known=False),
        *(lost(each) for each in (Reason.UNAUTHORIZED, Reason.FORBIDDEN, Reason.SECRET_NOT_FOUND)),
        lost(Reason.KUBE_CONFIG_INVALID),
    ]
    for peer in peers:
        yield from assess(spec(), peer, LOCAL).findings
    for local in (None, LocalEnd("x", "main", "key-1"), LocalEnd("m/model", "main", "key-2")):
        yield from assess(spec(), WELL, local).findings
    far = spec(
        local={"kind": "PrfaaSCluster", "name": "h200"},
        remote={"kind": "PDCluster", "namespace": "prfaas", "name": "h20"},
    )
    yield from assess(far, WELL, LOCAL).findings
    yield unless_refused(assess(spec(), WELL, LOCAL).find(Type.ENDPOINTS_MIRRORED), Forbidden("no"))


def test_the_pairs_that_are_given_are_those_that_are_documented() -> None:
    documented: Mapping[Type, tuple[Reason, ...]] = {**REASONS, **SUMMARY_REASONS}
    pairs = {(kind.value, reason.value) for kind, reasons in documented.items() for reason in reasons}
    assert len(conditions(given(), 1, NOW)) == len(list(given()))
    found = {(verdict.type.value, verdict.reason.value) for verdict in given()}
    assert pairs - found == NOT_YET, "documented and never given"
    assert found - pairs == set(), "given and not documented"


NOT_YET = {("Encrypted", "AllEncrypted")}
"""The schema has no value yet that encrypts all: `encryption.requests` and `encryption.kv` can only be `None`."""
