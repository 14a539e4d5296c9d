"""The demo's closing table: pure, from what was measured to text a person understands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from e2e.client import Outcome
from prfaas.api.profile import kv_byte_scale


@dataclass(frozen=True)
class LineUse:
    """Bytes over the line between two readings, both directions unless said. `kv_sent` is the workers' own count."""

    kv: int
    kv_sent: int
    other: int

    @property
    def apart_percent(self) -> float:
        """How far the kernel's count is from the workers', in percent of the workers' count."""
        return math.inf if self.kv_sent == 0 else 100 * abs(self.kv - self.kv_sent) / self.kv_sent


@dataclass(frozen=True)
class Scales:
    """Scales in force: modelled seconds per real second, KV bytes sent per modelled byte, and what they came from."""

    time: float
    kv_bytes: float
    line_gbps: float
    capacity_gbps: float

    def check(self) -> None:
        """Raises ValueError where the line, so scaled, does not stand for the capacity: no figure would be true."""
        wanted = kv_byte_scale(self.line_gbps, self.capacity_gbps, self.time)
        if not math.isclose(self.kv_bytes, wanted, rel_tol=0.01):
            raise ValueError(
                f"the engines run with --kv-byte-scale {self.kv_bytes:g}, but a line of {self.line_gbps:g} Gbit/s "
                f"stands for {self.capacity_gbps:g} Gbit/s at time 1:{self.time:g} only with {wanted:g}: change one"
            )


def quantile(values: Sequence[float], q: float) -> float:
    """The nearest-rank quantile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def size(count: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _latency_row(name: str, outcomes: Sequence[Outcome]) -> str:
    times = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    if not times:
        return f"  {name:<26}{len(outcomes):>6}"
    lengths = [outcome.ask.prompt_tokens for outcome in outcomes]
    return (
        f"  {name:<26}{len(outcomes):>6}{quantile(lengths, 0.5):>14,.0f}"
        f"{quantile(times, 0.5):>11.2f} s{quantile(times, 0.9):>9.2f} s"
    )


def table(
    outcomes: Sequence[Outcome],
    seconds: float,
    threshold: int,
    line: LineUse,
    scales: Scales,
    pods: Mapping[str, Mapping[str, int]],
) -> str:
    """The whole table, without a trailing newline.

    `threshold`: tokens above which a prompt is long. `pods`: datacenter -> role and pool as text -> count.
    """
    ways = {
        "short, prefilled in west": (False, False),
        "long, prefilled in east": (True, True),
        "short, prefilled in east": (False, True),
        "long, prefilled in west": (True, False),
    }
    answered = {
        name: [o for o in outcomes if o.status == 200 and (o.ask.prompt_tokens > threshold, o.remote) == way]
        for name, way in ways.items()
    }
    errors = [outcome for outcome in outcomes if outcome.error is not None]
    verified = sum(outcome.verified for outcome in outcomes)
    rows = [
        f"{len(outcomes)} requests in {seconds:.1f} s",
        "",
        f"  {f'threshold {threshold:,} tokens':<26}{'count':>6}{'median tokens':>14}{'TTFT p50':>13}{'TTFT p90':>11}",
        *(_latency_row(name, found) for name, found in answered.items() if found),
        "",
        f"  {'errors':<26}{len(errors):>6}",
        f"  {'output verified':<26}{verified:>6} of {len(outcomes)}",
        "",
        f"  {'KV bytes on the line':<26}{size(line.kv):>9} by the kernel, {size(line.kv_sent)} by the workers "
        f"({line.apart_percent:.1f} % apart)",
        f"  {'other bytes on the line':<26}{size(line.other):>9}",
        "",
    ]
    for datacenter, pools in pods.items():
        counts = ", ".join(f"{count} {pool}" for pool, count in pools.items())
        rows.append(f"  {'pods in ' + datacenter:<26}{counts}")
    rows += [
        "",
        f"  {'scales':<26}time 1:{scales.time:g}, KV bytes 1:{1 / scales.kv_bytes:,.0f} "
        f"(a line of {scales.line_gbps:g} Gbit/s stands for {scales.capacity_gbps:g} Gbit/s)",
    ]
    kinds = Counter(outcome.error for outcome in errors)
    rows += [f"  error x{count}: {text}" for text, count in kinds.most_common(5)]
    return "\n".join(rows)
