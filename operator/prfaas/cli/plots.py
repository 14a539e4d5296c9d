"""Pictures of plans, for `--plot`: told apart by line style, so that black and white is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.planner.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from prfaas.planner.input import Planning
    from prfaas.planner.plan import Plan

STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
POINTS = 160


def figure(rows: int = 1, width: float = 7.0, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` axes below each other. Raises PlanError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("--plot", "needs matplotlib: pip install 'prfaas-operator[plot]'") from error
    drawn = Figure(figsize=(width, height * rows), layout="constrained")
    axes = [drawn.add_subplot(rows, 1, index + 1) for index in range(rows)]
    for each in axes:
        each.grid(visible=True, linewidth=0.4, alpha=0.6)
        each.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def plan_plot(out: Path, planning: Planning, plan: Plan) -> None:
    """Throughput over the threshold, with what each stage allows and the optimum (Fig. 5 b of the paper)."""
    from prfaas.planner.throughput import Model

    model = Model(planning.workload, planning.topology, planning.objective.service_time)
    if not plan.setting.thresholds:
        raise PlanError("--plot", "the plan uses no link, so there is no threshold to draw over")
    single = len(plan.setting.thresholds) == 1
    chosen = next(iter(plan.setting.thresholds.values())) if single else 1.0
    xs = [chosen * (0.15 + 2.35 * i / POINTS) for i in range(POINTS + 1)]
    names = {"prfaas": "remote prefill", "line": "line", "prefill": "local prefill", "decode": "decode"}
    curves: dict[str, list[float]] = {name: [] for name in names}
    best = []
    for x in xs:
        cuts = {n: round(x if single else t * x) for n, t in plan.setting.thresholds.items()}
        loads = model.loads(replace(plan.setting, thresholds=cuts))
        for kind, values in curves.items():
            rates = [
                loads.capacity[n] / need for n, need in loads.need.items() if n.startswith(kind + "/") and need > 0
            ]
            values.append(min(rates, default=math.inf))
        best.append(loads.lambda_max)
    drawn, (axes,) = figure()
    scale = 1000.0 if single else 1.0
    top = 2.2 * max(best)
    shown = [x / scale for x in xs]
    for (kind, values), style in zip(curves.items(), STYLES[1:], strict=True):
        if min(values) < top:
            clipped = [v if v <= top else math.nan for v in values]
            axes.plot(shown, clipped, linestyle=style, color="0.35", linewidth=1.3, label=f"{names[kind]} allows")
    axes.plot(shown, best, color="black", linewidth=2.2, label="served (the lowest of them)")
    at = chosen / scale
    axes.plot([at], [plan.expected.lambda_max], "o", color="black", markersize=7, fillstyle="none")
    label = f"{plan.expected.lambda_max:.2f} requests/s at t = {chosen:,.0f}" if single else "the plan"
    axes.annotate(label, (at, plan.expected.lambda_max), (30, -4), textcoords="offset points", fontsize=9, ha="left")
    axes.set_ylim(0, top)
    axes.set_xlabel("threshold t, thousand uncached tokens" if single else "factor on all thresholds of the plan")
    axes.set_ylabel("requests/s")
    splits = ", ".join(f"{n} {s.prefill}/{s.decode}" for n, s in plan.setting.splits.items())
    axes.set_title(f"Throughput over threshold, Np/Nd: {splits}", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=2)
    save(drawn, out)


def sweep_plot(out: Path, points: Sequence[dict[str, Any]]) -> None:
    """The plan over a link's rate or a pool's size: throughput planned anew and kept, threshold, Np."""
    points = sorted(points, key=lambda point: point["value"])
    xs = [point["value"] for point in points]
    name = points[0]["name"]
    drawn, (upper, middle, lower) = figure(rows=3, height=2.3)
    upper.plot(xs, [p["lambdaMax"] for p in points], "o-", color="black", label="planned anew", markersize=4)
    kept = [math.nan if p["kept"] is None else p["kept"] for p in points]
    upper.plot(xs, kept, "s--", color="0.45", label="first plan kept", markersize=4)
    upper.set_ylabel("requests/s")
    upper.set_ylim(bottom=0)
    upper.legend(fontsize=8, frameon=False)
    cuts = [math.nan if p["threshold"] is None else p["threshold"] / 1000 for p in points]
    middle.plot(xs, cuts, "o-", color="black", markersize=4)
    middle.set_ylabel("threshold,\nthousand tokens")
    middle.set_ylim(bottom=0)
    lower.step(xs, [p["instances"]["prefill"] for p in points], "-", where="mid", color="black", label="Np, prefill")
    lower.step(xs, [p["instances"]["decode"] for p in points], "--", where="mid", color="0.45", label="Nd, decode")
    lower.set_ylabel("instances")
    lower.set_ylim(bottom=0)
    lower.legend(fontsize=8, frameon=False)
    for axes in (upper, middle, lower):
        if min(xs) > 0 and max(xs) / min(xs) >= 8:
            axes.set_xscale("log")
            axes.set_xticks(xs, [f"{x:g}" for x in xs], fontsize=8)
            axes.minorticks_off()
    lower.set_xlabel(f"{name}, Gbit/s" if name.startswith("link") else f"{name}")
    save(drawn, out)


def save(drawn: Figure, out: Path) -> None:
    """Write the picture. Raises OSError."""
    metadata: dict[str, Any] = {"Date": None} if out.suffix == ".svg" else {}
    drawn.savefig(out, dpi=150, metadata=metadata)
