"""A plan as JSON keys, which are API, and as a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.planner.plan import Alternative, Plan, told
from prfaas.planner.setting import Expectation, Latency, Setting
from prfaas.planner.topology import Topology

Keys = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One setting with what it does, under the name that the table gives it."""

    name: str
    setting: Setting
    expected: Expectation
    topology: Topology


def keys_of(row: Row) -> Keys:
    """What every setting has: the plan, a baseline, a point of a sweep."""
    setting, found = row.setting, row.expected
    pools = {pool.name for pool in row.topology.prfaas}
    used = {name: setting.prfaas.get(name, row.topology.pool(name).instances) for name in sorted(pools)}
    return {
        "lambdaMax": _round(found.lambda_max),
        "threshold": min(setting.thresholds.values(), default=None),
        "thresholds": dict(sorted(setting.thresholds.items())),
        "instances": {
            "prefill": sum(split.prefill for split in setting.splits.values()),
            "decode": sum(split.decode for split in setting.splits.values()),
            "prfaas": sum(used.values()),
            "byPool": {
                **{name: {"prefill": s.prefill, "decode": s.decode} for name, s in sorted(setting.splits.items())},
                **{name: {"prefill": count} for name, count in used.items()},
            },
        },
        "shares": {name: _round(share) for name, share in sorted(setting.shares.items())},
        "theta": {
            "prfaas": _round(found.theta.prfaas),
            "prefill": _round(found.theta.prefill),
            "decode": _round(found.theta.decode),
        },
        "offloadShare": _round(found.offload_share),
        "meanLong": _round(found.mean_long),
        "meanShort": _round(found.mean_short),
        "egressGbps": _round(found.egress_gbps),
        "ttft": _latency(found.ttft),
        "loadedTtft": None if found.loaded is None else _latency(found.loaded),
        "bottleneck": found.bottleneck,
        "utilisation": {name: _round(value) for name, value in sorted(found.utilisation.items())},
    }


def plan_keys(row: Row, plan: Plan, baselines: Mapping[str, Row]) -> Keys:
    """The whole plan."""
    homogeneous = baselines.get("homogeneous")
    gain = None
    if homogeneous is not None and homogeneous.expected.lambda_max > 0:
        gain = _round(plan.expected.lambda_max / homogeneous.expected.lambda_max)
    return {
        **keys_of(row),
        "reason": plan.reason,
        "bound": _round(plan.bound),
        "gap": _round(plan.gap),
        "gain": gain,
        "baselines": {name: keys_of(each) for name, each in baselines.items()},
        "sensitivities": {
            "perInstance": {name: _round(value) for name, value in plan.sensitivities.per_instance.items()},
            "perGbps": {name: _round(value) for name, value in plan.sensitivities.per_gbps.items()},
        },
        "second": _alternative(plan.second, row.topology),
        "staying": _alternative(plan.staying, row.topology),
    }


def table(row: Row, plan: Plan, baselines: Mapping[str, Row], rate: float | None) -> str:
    """The plan for people: what to do, what comes of it, what it is compared with."""
    rows = [row, *baselines.values()]
    if plan.second is not None:
        rows.append(Row("second best", plan.second.setting, plan.second.expected, row.topology))
    if plan.staying is not None:
        rows.append(Row("present", plan.staying.setting, plan.staying.expected, row.topology))
    head = ["", "Np/Nd", "PrfaaS", "threshold", "requests/s", "offloaded", "egress", "TTFT mean", "TTFT P90"]
    units = ["", "", "", "tokens", "at most", "", "Gbit/s", "s, no load", "s, no load"]
    lines = [_cells(each) for each in rows]
    if rate is not None:
        head += ["mean", "P90"]
        units += [f"s, {rate:g}/s", f"s, {rate:g}/s"]
        for each, cells in zip(rows, lines, strict=True):
            loaded = each.expected.loaded
            cells += ["-", "-"] if loaded is None else [f"{loaded.mean:.2f}", f"{loaded.p90:.2f}"]
    text = [plan.reason, "", *aligned([head, units, *lines]), ""]
    theta = plan.expected.theta
    text += [
        f"The bottleneck is {told(plan.expected.bottleneck)}.",
        f"Stages complete {_rate(theta.prfaas)} (remote prefill), {_rate(theta.prefill)} (local prefill), "
        f"{_rate(theta.decode)} (decode) requests/s.",
    ]
    if plan.expected.offload_share > 0:
        text.append(
            f"Offloaded prompts have {plan.expected.mean_long:,.0f} uncached tokens on average, the others "
            f"{plan.expected.mean_short:,.0f}."
        )
    gains = [f"{value:+.3f} by one more instance of {n}" for n, value in plan.sensitivities.per_instance.items()]
    gains += [
        f"{value:+.3f} by one more Gbit/s on {n.removeprefix('link:')}"
        for n, value in plan.sensitivities.per_gbps.items()
    ]
    text.append(f"Requests/s: {', '.join(gains)}.")
    if plan.gap > 1e-4:
        text.append(f"No setting serves more than {plan.bound:.3f} requests/s: {plan.gap:.2%} above this plan.")
    if plan.staying is not None and plan.staying.loss > 0:
        text.append(f"Staying with the present setting costs {plan.staying.loss:.1%} of that rate.")
    return "\n".join(text) + "\n"


def sweep_table(name: str, values: Sequence[float], rows: Sequence[Row], kept: Sequence[float | None]) -> str:
    """One line for each point; `kept`: requests/s if the first plan's setting is kept."""
    head = [name, "Np/Nd", "threshold", "requests/s", "kept", "egress", "bottleneck"]
    units = ["", "", "tokens", "at most", "requests/s", "Gbit/s", ""]
    lines = []
    for value, row, stays in zip(values, rows, kept, strict=True):
        cells = _cells(row)
        stayed = "-" if stays is None else f"{stays:.2f}"
        lines.append([f"{value:g}", cells[1], cells[3], cells[4], stayed, cells[6], row.expected.bottleneck])
    return "\n".join(aligned([head, units, *lines])) + "\n"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(row: Row) -> list[str]:
    keys = keys_of(row)
    splits = [f"{split.prefill}/{split.decode}" for _, split in sorted(row.setting.splits.items())]
    cuts = [f"{tokens:,}" for tokens in row.setting.thresholds.values()]
    found = row.expected
    return [
        row.name,
        " ".join(splits),
        str(keys["instances"]["prfaas"]) if row.topology.prfaas else "-",
        "-" if not cuts else cuts[0] if len(cuts) == 1 else f"{len(cuts)} links",
        f"{found.lambda_max:.2f}",
        f"{found.offload_share:.1%}",
        f"{found.egress_gbps:.2f}",
        f"{found.ttft.mean:.2f}",
        f"{found.ttft.p90:.2f}",
    ]


def _alternative(found: Alternative | None, topology: Topology) -> Keys | None:
    if found is None:
        return None
    return {**keys_of(Row("", found.setting, found.expected, topology)), "loss": _round(found.loss)}


def _latency(found: Latency) -> Keys:
    return {name: _round(getattr(found, name)) for name in ("mean", "p50", "p90", "p99")}


def _rate(value: float) -> str:
    return "-" if math.isinf(value) else f"{value:.2f}"


def _round(value: float) -> float | None:
    """Six significant digits; None for what is not finite, which JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
