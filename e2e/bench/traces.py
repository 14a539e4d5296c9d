"""Recorded requests, planned for and simulated: is the plan better than the paper's threshold, and is it worth a line?

`--mooncake` (JSON lines, long prompts that share prefixes), on the paper's pools: what the planner chooses for the
trace's own lengths and rate, against 19,400 tokens with the best split for that, at equal rate.

`--azure` (CSV, short prompts): the cheapest pools for its busiest minute, out of more than enough of both kinds with an
H200 at twice the price of an H20; and what the same money buys if two of the instances have to be H200.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.api.profiles import shipped
from prfaas.planner.input import Planning
from prfaas.planner.plan import plan
from prfaas.planner.setting import Objective
from prfaas.planner.simulator.arrivals import Arrival, scaled
from prfaas.planner.simulator.engine import Options, Simulation
from prfaas.planner.simulator.results import Result
from prfaas.planner.simulator.scenario import Scenario, caches, scenario
from prfaas.planner.simulator.traces import BLOCK_TOKENS, Observed, observe, read
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology

PAPER_POLICY = "threshold=19400"
CACHE_OF = caches("auto", BLOCK_TOKENS, float("inf"))


@dataclass(frozen=True)
class Trace:
    """A file, and how fast it is replayed."""

    path: Path
    faster: float = 1.0

    def arrivals(self) -> Iterator[Arrival]:
        """Its requests."""
        with self.path.open(encoding="utf-8") as lines:
            yield from scaled(read(lines, str(self.path)), self.faster)

    def observed(self, on: Topology) -> Observed:
        """What the planner sees of it."""
        return observe(self.arrivals(), CACHE_OF(on.pd[0]))

    def run(self, chosen: Scenario) -> Result:
        """All of it."""
        options = Options(keep_values=True)
        simulation = Simulation(
            chosen.topology, chosen.setting, self.arrivals(), chosen.queue_of, options=options, cache_of=CACHE_OF
        )
        return simulation.run()


def pools(remote: int, local: int) -> Topology:
    """The paper's kinds of instance, its line, and a price of two H20 for an H200."""
    return Topology(
        (PrfaaSPool("h200", shipped("H200x8"), remote, gpu_price=2.0),),
        (PDPool("h20", shipped("H20x8"), local),),
        (Link("east", "h200", "h20", 100.0),),
    )


def row(name: str, chosen: Scenario, result: Result) -> None:
    """One line of the table."""
    cut = min(chosen.setting.thresholds.values(), default=None)
    split = chosen.setting.splits["h20"]
    remote = chosen.setting.prfaas.get("h200", 0) if cut is not None else 0
    found = result.ttft
    print(
        f"{name:34}{'-' if cut is None else f'{cut:,}':>10}{remote:>7}{split.prefill:>4}/{split.decode}"
        f"{result.offload_share:10.1%}{1 - result.prefill_tokens / result.prompt_tokens:10.1%}"
        f"{found.mean:8.2f}{found.p50:8.2f}{found.p90:8.2f}{found.p99:8.2f}",
        flush=True,
    )


def head(title: str) -> None:
    """Of a table."""
    print(f"\n{title}")
    print(f"{'':34}{'threshold':>10}{'H200x8':>7}{'Np/Nd':>6}{'offloaded':>10}{'cached':>10}", end="")
    print(f"{'mean s':>8}{'P50 s':>8}{'P90 s':>8}{'P99 s':>8}")


def mooncake(path: Path, plots: Path | None) -> bool:
    """Whether the planned threshold has the lower P90 at every speed."""
    on = pools(4, 8)
    better = True
    for faster in (1.0, 1.5):
        trace = Trace(path, faster)
        seen = trace.observed(on)
        head(f"{path.name}, {seen.requests:,} requests, {seen.rate:.2f} requests/s ({faster:g} times its own rate)")
        planning = Planning(seen.histogram.workload(), on, Objective(rate=seen.rate))
        fastest = replace(planning, objective=Objective("latency", seen.rate))
        runs = {}
        for name, policy, given in (
            ("planned for throughput", "planned", planning),
            ("planned for latency", "planned", fastest),
            ("19,400 tokens", PAPER_POLICY, planning),
        ):
            chosen = scenario(policy, given)
            runs[name] = trace.run(chosen)
            row(name, chosen, runs[name])
        better = better and max(runs[n].ttft.p90 for n in list(runs)[:2]) < runs["19,400 tokens"].ttft.p90
        if plots is not None and faster == 1.5:
            draw(plots / "trace-mooncake.png", f"Mooncake conversation trace, {seen.rate:.1f} requests/s", runs)
    return better


def azure(path: Path, plots: Path | None) -> bool:
    """Whether the cheapest plan uses no link."""
    trace, on = Trace(path), pools(8, 24)
    seen = trace.observed(on)
    head(
        f"{path.name}, {seen.requests:,} requests, {seen.rate:.2f} requests/s, {seen.busiest:.2f} in its busiest minute"
    )
    planning = Planning(seen.histogram.workload(), on, Objective("cost", seen.busiest))
    cheapest = scenario("planned", planning)
    runs = {"cheapest plan: no H200": trace.run(cheapest)}
    row("cheapest for the busiest minute", cheapest, runs["cheapest plan: no H200"])
    split = cheapest.setting.splits["h20"]
    same = pools(2, split.prefill + split.decode - 4)
    equal = scenario("planned", Planning(planning.workload, same, Objective()))
    runs["same price, 2 of them H200"] = trace.run(equal)
    row("same price with 2 H200x8", equal, runs["same price, 2 of them H200"])
    print(f"{'':34}{cheapest.lambda_max:.2f} requests/s at most against {equal.lambda_max:.2f}")
    print(plan(planning.workload, on, planning.objective).reason)
    if plots is not None:
        draw(plots / "trace-azure.png", f"Azure code trace, {seen.rate:.1f} requests/s on average", runs)
    return not cheapest.setting.thresholds


def draw(out: Path, title: str, runs: dict[str, Result]) -> None:
    """Distributions of the time to first token over each other."""
    from prfaas.cli.plots import figure, save
    from prfaas.cli.simulate_plot import distribution

    drawn, (axes,) = figure()
    rows: list[tuple[str, Sequence[float], str]] = [
        (f"{name}: P90 {run.ttft.p90:.2f} s", [v for values in run.ttft_values.values() for v in values], style)
        for (name, run), style in zip(runs.items(), ("-", "--", ":"), strict=False)
    ]
    distribution(axes, rows)
    axes.set_title(title, fontsize=10)
    save(drawn, out)


def main() -> int:
    """0 if both say what is expected of them, else 1."""
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.traces", description=__doc__.partition("\n")[0])
    parser.add_argument("--mooncake", type=Path, metavar="FILE")
    parser.add_argument("--azure", type=Path, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw them as well")
    chosen = parser.parse_args()
    fine = True
    if chosen.mooncake is not None:
        fine = mooncake(chosen.mooncake, chosen.plots) and fine
    if chosen.azure is not None:
        fine = azure(chosen.azure, chosen.plots) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
