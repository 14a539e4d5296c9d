"""The picture of a simulation: who waited how long, and how line and queue went over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.plots import figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from prfaas.planner.simulator.results import Result

POINTS = 400


def simulation_plot(out: Path, result: Result) -> None:
    """Distribution of the time to first token; egress, queue and cut over time. Raises PlanError, OSError."""
    samples = result.series
    moved = len({each.threshold for each in samples if not math.isnan(each.threshold)}) > 1
    drawn, axes = figure(rows=4 if moved else 3, height=2.4)
    every = [value for values in result.ttft_values.values() for value in values]
    rows: list[tuple[str, Sequence[float], str]] = [("all", every, "-")]
    for (name, values), style in zip(result.ttft_values.items(), ("--", ":"), strict=True):
        if len(values) not in (0, len(every)):
            rows.append((f"prefill {name}", values, style))
    distribution(axes[0], rows)
    times = [each.at for each in samples]
    axes[1].plot(times, [each.egress_gbps for each in samples], color="black", linewidth=1.0)
    axes[1].set_ylabel("egress, Gbit/s")
    axes[2].plot(times, [each.waiting for each in samples], color="black", linewidth=1.0, label="waiting for prefill")
    axes[2].plot(
        times,
        [each.decoding for each in samples],
        color="0.5",
        linestyle="--",
        linewidth=1.0,
        label="decode slots held",
    )
    axes[2].set_ylabel("requests")
    axes[2].legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    if moved:
        axes[3].plot(times, [each.threshold / 1000 for each in samples], color="black", linewidth=1.0)
        axes[3].set_ylabel("cut in force,\nthousand tokens")
    for each in axes[1:]:
        each.set_ylim(bottom=0)
        each.set_xlabel("simulated seconds")
    save(drawn, out)


def distribution(axes: Axes, rows: Sequence[tuple[str, Sequence[float], str]]) -> None:
    """For each (name, seconds, line style): the share that waited longer; the logarithmic scale shows the tail."""
    for index, (name, values, style) in enumerate(rows):
        row = sorted(values)
        if not row:
            continue
        least = 1 / len(row)
        shares = [least ** (i / POINTS) for i in range(POINTS + 1)]
        at = [row[min(len(row) - 1, int((1 - share) * len(row)))] for share in shares]
        axes.plot(at, shares, linestyle=style, color="0.35" if index else "black", label=name)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    for share, text in ((0.1, "P90"), (0.01, "P99")):
        axes.axhline(share, color="0.7", linewidth=0.6)
        axes.annotate(text, (1.0, share), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    axes.set_xlabel("time to first token, s")
    axes.set_ylabel("share of requests\nthat waited longer")
    axes.legend(fontsize=8, frameon=False)
