"""What a run has shown: quantiles by class, throughput, utilisation, and how it went over time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOCAL_CLASS = "local"
REMOTE_CLASS = "remote"
MOST_SAMPLES = 512


@dataclass(frozen=True)
class Quantiles:
    """Of some seconds; all NaN where there was none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """By linear interpolation between neighbours."""
        if not values:
            return cls(0, math.nan, math.nan, math.nan, math.nan, math.nan)
        row = sorted(values)
        p50, p90, p99 = (_quantile(row, q) for q in (0.5, 0.9, 0.99))
        return cls(len(row), math.fsum(row) / len(row), p50, p90, p99, row[-1])


@dataclass(frozen=True)
class Sample:
    """How it stood at a moment; flows are means since the sample before."""

    at: float
    waiting: int
    egress_gbps: float
    throughput: float
    """Requests/s that got their last token."""
    decoding: int
    """Decode slots held."""
    threshold: float
    """Tokens; the cut in force where the discipline moves it; NaN: no link is used."""
    promise: float
    """D1 of triage, seconds; NaN for other disciplines."""


class Series:
    """Samples at even distances; when there are too many, every other one goes, and the distance doubles."""

    def __init__(self, every: float = 1.0) -> None:
        """`every`: seconds, to begin with."""
        self.every = every
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """The next."""
        self.samples.append(sample)
        if len(self.samples) >= MOST_SAMPLES:
            self.every *= 2
            self.samples = [_merged(a, b) for a, b in zip(self.samples[::2], self.samples[1::2], strict=True)]


@dataclass(frozen=True)
class Result:
    """See the module. Latencies are of requests that came after the warm-up, rates of the time of arrivals after it."""

    requests: int
    """That came after the warm-up and have their first token."""
    failed: int
    """That lost their decode instance after their first token."""
    unfinished: int
    """Still under way when the run was stopped."""
    seconds: float
    """Simulated time in all."""
    window: tuple[float, float]
    """Over which rates and utilisation are taken: from the warm-up's end to the last arrival."""
    throughput: float
    """Requests/s that got their last token."""
    ttft: Quantiles
    tpot: Quantiles
    """Seconds per output token."""
    ttft_by_class: Mapping[str, Quantiles]
    tpot_by_class: Mapping[str, Quantiles]
    waiting: Quantiles
    """Seconds from arrival to the prefill's start."""
    offload_share: float
    egress_gbps: float
    utilisation: Mapping[str, float]
    """By resource, as the planner names them."""
    prefill_tokens: float
    """Tokens that were computed, of `prompt_tokens`."""
    prompt_tokens: float
    series: Sequence[Sample]
    ttft_values: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    """Every single one by class, if the run was asked to keep them."""

    def to_json(self) -> dict[str, Any]:
        """The keys of `prfaas simulate -o json`, without those that say what was simulated."""

        def row(found: Quantiles) -> dict[str, Any]:
            names = ("mean", "p50", "p90", "p99")
            return {"count": found.count, **{n: _json(getattr(found, n)) for n in names}, "max": _json(found.longest)}

        return {
            "requests": self.requests,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "seconds": _json(self.seconds),
            "throughput": _json(self.throughput),
            "ttft": row(self.ttft),
            "tpot": row(self.tpot),
            "waiting": row(self.waiting),
            "classes": {
                name: {"ttft": row(found), "tpot": row(self.tpot_by_class[name])}
                for name, found in self.ttft_by_class.items()
            },
            "utilisation": {name: _json(value) for name, value in self.utilisation.items()},
            "egressGbps": _json(self.egress_gbps),
            "offloadShare": _json(self.offload_share),
            "cachedShare": _json(1 - self.prefill_tokens / self.prompt_tokens if self.prompt_tokens else math.nan),
            "series": [
                {
                    "seconds": _json(each.at),
                    "waiting": each.waiting,
                    "egressGbps": _json(each.egress_gbps),
                    "throughput": _json(each.throughput),
                    "decoding": each.decoding,
                    "threshold": _json(each.threshold),
                    "promise": _json(each.promise),
                }
                for each in self.series
            ],
        }


class Log:
    """What a run writes down of its requests."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.ttft = {LOCAL_CLASS: array("d"), REMOTE_CLASS: array("d")}
        self.tpot = {LOCAL_CLASS: array("d"), REMOTE_CLASS: array("d")}
        self.waiting = array("d")
        self.prompt_tokens = 0.0
        self.prefill_tokens = 0.0
        self.completed = 0
        self.failed = 0
        self.ended = 0.0
        """When the last of them was completed."""


def _quantile(row: Sequence[float], q: float) -> float:
    at = q * (len(row) - 1)
    low = math.floor(at)
    high = min(low + 1, len(row) - 1)
    return row[low] + (row[high] - row[low]) * (at - low)


def _merged(a: Sample, b: Sample) -> Sample:
    return Sample(
        at=b.at,
        waiting=b.waiting,
        egress_gbps=(a.egress_gbps + b.egress_gbps) / 2,
        throughput=(a.throughput + b.throughput) / 2,
        decoding=b.decoding,
        threshold=b.threshold,
        promise=b.promise,
    )


def _json(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) or math.isinf(value) else float(f"{value:.6g}")
