"""A simulation's result for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.planner.plan import told
from prfaas.planner.report import aligned


def table(keys: Mapping[str, Any]) -> str:
    """From the keys of `prfaas simulate -o json`."""
    cut = keys["threshold"]
    instances = keys["instances"]
    text = [
        f"{keys['requests']:,} requests in {keys['seconds']:,.0f} s, {keys['rate']:.3g} requests/s offered; policy "
        f"{keys['policy']}, queue {keys['queueing']}, seed {keys['seed']}.",
        f"Np/Nd {instances['prefill']}/{instances['decode']}, {instances['prfaas']} remote prefill instances; "
        + (f"threshold {cut:,} uncached tokens." if cut is not None else "no threshold.")
        + f" The planner says at most {keys['lambdaMax']:.2f} requests/s.",
    ]
    if keys["interrupted"]:
        text.append("Interrupted: this is what there was so far.")
    rows = [["", "requests", "mean", "P50", "P90", "P99", "longest"], ["", "", *["s"] * 5]]
    classes = keys["classes"]
    rows.append(_row("time to first token", keys["ttft"], 1.0))
    rows += [_row(f"  prefill {name}", each["ttft"], 1.0) for name, each in classes.items() if each["ttft"]["count"]]
    rows.append(_row("of it before the prefill", keys["waiting"], 1.0))
    if keys["tpot"]["count"]:
        rows.append(["", "", *["ms"] * 5])
        rows.append(_row("time per output token", keys["tpot"], 1e3))
    text += ["", *aligned(rows), ""]
    text.append(
        f"{_number(keys['throughput'])} requests/s completed; {_percent(keys['offloadShare'])} prefilled remotely; "
        f"{_number(keys['egressGbps'])} Gbit/s over links."
    )
    if keys["cachedShare"]:
        text.append(f"{_percent(keys['cachedShare'])} of all prompt tokens came from prefix caches.")
    used = [f"{told(name)} {value:.0%}" for name, value in keys["utilisation"].items() if value is not None]
    text.append(f"Busy: {', '.join(used)}.")
    if keys["failed"] or keys["unfinished"]:
        text.append(f"{keys['failed']:,} requests failed, {keys['unfinished']:,} did not end.")
    return "\n".join(text) + "\n"


def _row(name: str, found: Mapping[str, Any], scale: float) -> list[str]:
    values: Sequence[float | None] = [found[key] for key in ("mean", "p50", "p90", "p99", "max")]
    return [name, f"{found['count']:,}", *("-" if v is None else f"{v * scale:.2f}" for v in values)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
