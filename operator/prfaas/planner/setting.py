"""What is decided, what it is decided for, and what a setting is expected to do: the values that planning passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prfaas.planner.errors import PlanError, number

ServiceTime = Literal["mean", "representative"]
"""`mean`: work is E[T(L)], what instances really take. `representative`: T(E[L]), as the paper computes (3.4.1)."""
Goal = Literal["throughput", "latency", "cost"]


@dataclass(frozen=True)
class Objective:
    """What a plan is for.

    throughput: the highest rate that can be served. latency: the lowest P90 of the time to first token at `rate`.
    cost: the fewest GPUs, weighted with their prices, that serve `rate` within `ttft_p90_seconds`.
    """

    goal: Goal = "throughput"
    rate: float | None = None
    """Offered requests/s; needed by latency and cost."""
    ttft_p90_seconds: float | None = None
    """Bound on the P90 of the time to first token under load; None: no bound."""
    service_time: ServiceTime = "mean"

    def __post_init__(self) -> None:
        """Raises PlanError for a rate that is missing or out of range."""
        if self.rate is not None:
            number("rate", self.rate, above=True, most=1e9)
        elif self.goal != "throughput":
            raise PlanError("rate", f"is needed for the objective {self.goal}: requests/s that are offered")
        if self.ttft_p90_seconds is not None:
            number("slo.ttftP90Seconds", self.ttft_p90_seconds, above=True)


@dataclass(frozen=True)
class Split:
    """Instances of a PD pool by role."""

    prefill: int
    decode: int


@dataclass(frozen=True)
class Setting:
    """A decision: how each PD pool is divided, and from which uncached length on a request takes a link.

    A request takes, of its pool's links whose threshold is below its length, the one with the highest threshold;
    with no such link it is prefilled by its own pool. A link without a threshold here is not used.
    """

    splits: Mapping[str, Split]
    """By PD pool."""
    thresholds: Mapping[str, int] = field(default_factory=dict)
    """By link, tokens."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """By PD pool: its part of the traffic; adds up to 1. A pool that is not here gets none, one pool alone gets all."""
    prfaas: Mapping[str, int] = field(default_factory=dict)
    """By PrfaaS pool: instances used; a pool that is not here uses all it has."""


@dataclass(frozen=True)
class Theta:
    """What each stage can complete, requests/s of its own kind; inf where nothing goes to it."""

    prfaas: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Latency:
    """Time to first token, seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Expectation:
    """What a setting is expected to do."""

    lambda_max: float
    """Highest rate it serves, requests/s (Eq. 6)."""
    theta: Theta
    """Over all pools of a kind."""
    bottleneck: str
    """The resource that is full at lambda_max: `prfaas/NAME`, `line/NAME`, `prefill/NAME` or `decode/NAME`."""
    utilisation: Mapping[str, float]
    """At lambda_max, by resource, named as in `bottleneck`."""
    offload_share: float
    mean_long: float
    """E[L | offloaded], tokens; 0 if nothing is."""
    mean_short: float
    egress_gbps: float
    """KV bytes on all links at lambda_max, Gbit/s."""
    ttft: Latency
    """With no load: prefill and transfer only, as the paper's Table 6 (7.3 of its reconstruction)."""
    loaded: Latency | None = None
    """At the offered rate, with queues; None: no rate was given, or it cannot be served."""
