"""The router's metrics. Their names and labels are API (docs/router.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from prfaas.api.policy import RoutingPolicy
from prfaas.router.ledger import Entry, Ledger
from prfaas.routing.decision import Decision
from prfaas.routing.world import Endpoint, Pools

TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 49152, 65536, 98304, 131072, 262144)
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300)


class Metrics:
    """One registry per router process."""

    def __init__(self, ledger: Ledger, pools: Callable[[], Pools]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "prfaas_router_requests",
            "Streams that ended, one per attempt. decision: local, remote, refused or none (not routed); code: HTTP "
            "status as sent, 0 when the client left before there was one.",
            ["decision", "link", "reason", "code"],
            registry=self.registry,
        )
        self.pairs = Counter(
            "prfaas_router_pairs",
            "Attempts sent to a decode instance, by the compatibility keys of both instances as their slices say; "
            "prefill_key: empty without a prefill leg.",
            ["decode_key", "prefill_key", "link"],
            registry=self.registry,
        )
        self.retries = Counter(
            "prfaas_router_retries", "Second attempts, each with a new decision.", registry=self.registry
        )
        self.legs = Histogram(
            "prfaas_router_prefill_seconds",
            "Seconds from sending a prefill leg to its end. link: empty when local; result: ok, client (4xx), "
            "cancelled, or the trouble.",
            ["link", "result"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.length = Histogram(
            "prfaas_router_uncached_tokens",
            "Prompt tokens to prefill, as the router estimates them.",
            ["decision"],
            buckets=TOKENS,
            registry=self.registry,
        )
        self.policy_epoch = Gauge(
            "prfaas_router_policy_epoch", "Epoch of the policy in force; 0: none.", registry=self.registry
        )
        self.policy_version = Gauge(
            "prfaas_router_policy_version", "Version of the policy in force; 0: none.", registry=self.registry
        )
        self.policy_info = Gauge(
            "prfaas_router_policy_info",
            "1 for the policy in force.",
            ["pd_cluster_uid", "hash", "model", "fallback"],
            registry=self.registry,
        )
        self.threshold = Gauge(
            "prfaas_router_threshold_tokens", "Threshold of a link in force.", ["link"], registry=self.registry
        )
        self.policies = Counter(
            "prfaas_router_policies",
            "Policy documents received. source: configmap or put; result: Accepted, Unchanged, Stale or Invalid.",
            ["source", "result"],
            registry=self.registry,
        )
        self.registry.register(_Live(ledger, pools))

    def ended(self, entry: Entry | None, code: int) -> None:
        """A stream ended with this status."""
        if entry is not None and entry.repeated:
            return
        outcome = entry.outcome if entry else None
        reason = (entry.reason if entry else "") or (outcome.reason.value if outcome else "")
        link = (outcome.link or "") if isinstance(outcome, Decision) else ""
        self.requests.labels(decision_label(entry), link, reason, str(code)).inc()

    def forwarded(self, decision: Decision) -> None:
        """An attempt goes to this decode instance now, after a leg on this prefill instance."""
        decode, prefill = decision.decode.compatibility_key, decision.prefill and decision.prefill.compatibility_key
        self.pairs.labels(decode or "", prefill or "", decision.link or "").inc()

    def policy(self, policy: RoutingPolicy) -> None:
        """This policy is in force from now on."""
        self.policy_epoch.set(policy.epoch)
        self.policy_version.set(policy.version)
        self.policy_info.clear()
        self.policy_info.labels(policy.pd_cluster_uid, policy.hash, policy.model, policy.fallback.value).set(1)
        self.threshold.clear()
        for cut in policy.thresholds:
            self.threshold.labels(cut.link).set(cut.tokens)


def decision_label(entry: Entry | None) -> str:
    """`local`, `remote`, `refused`, or `none`."""
    if entry is None or entry.outcome is None:
        return "none"
    if not isinstance(entry.outcome, Decision):
        return "refused"
    return "local" if entry.outcome.link is None else "remote"


class _Live(Collector):
    """What is true at the moment of the scrape."""

    def __init__(self, ledger: Ledger, pools: Callable[[], Pools]) -> None:
        self._ledger, self._pools = ledger, pools

    def collect(self) -> Iterable[GaugeMetricFamily]:
        flight = GaugeMetricFamily(
            "prfaas_router_in_flight",
            "Prefill legs and decode streams that run now, per instance.",
            labels=["role", "link", "instance"],
        )
        ready = GaugeMetricFamily(
            "prfaas_router_endpoints",
            "Ready endpoints; skipped: left alone for now, since they took no connection.",
            labels=["role", "link", "state"],
        )
        load = self._ledger.load()
        for role, link, endpoints in _groups(self._pools()):
            skipped = sum(endpoint.address in load.skipped for endpoint in endpoints)
            ready.add_metric([role, link, "ready"], len(endpoints) - skipped)
            ready.add_metric([role, link, "skipped"], skipped)
            for endpoint in endpoints:
                count = load.in_flight.get(endpoint.address, 0)
                flight.add_metric([role, link, endpoint.name or endpoint.address], count)
        return [flight, ready]


def _groups(pools: Pools) -> Iterator[tuple[str, str, tuple[Endpoint, ...]]]:
    yield "prefill", "", pools.prefill
    yield "decode", "", pools.decode
    for link, endpoints in pools.remote.items():
        yield "prefill", link, endpoints
