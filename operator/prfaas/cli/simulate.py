"""`prfaas simulate`: run a setting on made-up or recorded requests, and see what its averages leave out."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.cli.arguments import at_least_zero, picture, positive

if TYPE_CHECKING:
    from prfaas.planner.input import Planning
    from prfaas.planner.simulator.arrivals import Arrival
    from prfaas.planner.simulator.engine import Simulation
    from prfaas.planner.simulator.results import Result
    from prfaas.planner.simulator.scenario import Scenario
    from prfaas.planner.simulator.traces import Observed

REQUESTS = 20_000
"""That are made if neither a duration nor a trace says how many."""
WARMUP_SHARE = 0.05
WARMUP_REQUESTS = 5_000
INTERRUPTED = 130


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="run a setting on made-up or recorded requests",
        description="Simulate a PlanInput document, with the pools and links in it or in manifests of the three kinds.",
    )
    parser.add_argument(
        "-f", "--file", dest="files", action="append", required=True, metavar="FILE", help="YAML; - is standard input"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rate", type=positive, help="requests/s, Poisson, of the document's workload")
    source.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake JSON lines or Azure CSV")
    parser.add_argument("--scale-rate", type=positive, default=1.0, metavar="X", help="the trace X times as fast")
    parser.add_argument(
        "--plan-for", choices=("mean", "busiest"), default="mean", help="the trace's rate that is planned for"
    )
    parser.add_argument("--duration", type=positive, metavar="S", help="requests of that many seconds")
    parser.add_argument("--variation", type=at_least_zero, metavar="C", help="of the gaps; above 1: bursts (--rate)")
    parser.add_argument(
        "--policy", default="planned", help="planned (default), threshold=N, homogeneous, naive or blind"
    )
    parser.add_argument("--queueing", choices=("plain", "spill", "steal", "triage"), default="plain")
    parser.add_argument("--objective", choices=("throughput", "latency", "cost"), help="of planned, at the rate here")
    parser.add_argument("--service-time", choices=("mean", "representative"), help="instead of the document's")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run (default: 0)")
    parser.add_argument("--link-schedule", type=Path, metavar="FILE", help="CSV: seconds,gbps[,link]")
    parser.add_argument("--overlap", action="store_true", help="layers cross the line while the prefill runs")
    parser.add_argument(
        "--slots",
        choices=("before", "after"),
        default="before",
        help="a decode slot is taken before the prefill (default) or after it",
    )
    parser.add_argument(
        "--prefix-cache",
        choices=("auto", "full", "hybrid", "none"),
        default="auto",
        help="of each pool, for traces that name their blocks (default: as the profile's model is)",
    )
    parser.add_argument("--cache-gib", type=positive, metavar="G", help="its size per pool (default: no limit)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--plot", type=picture, metavar="OUT", help="draw it (.png or .svg)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 1 with one line for what cannot be simulated; 130 if interrupted, with what there is printed."""
    from prfaas.cli.documents import DocumentError, read
    from prfaas.planner.errors import PlanError
    from prfaas.planner.input import read_documents
    from prfaas.planner.simulator.traces import TraceError

    if args.variation is not None and args.trace is not None:
        print("prfaas simulate: --variation is for --rate; a trace has its own gaps", file=sys.stderr)
        return 2
    try:
        documents = [(document.title, document.content) for document in read(args.files)]
        return _run(args, read_documents(documents))
    except (DocumentError, PlanError, TraceError, OSError, UnicodeDecodeError) as error:
        print(f"prfaas simulate: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, planning: Planning) -> int:
    from prfaas.planner.input import with_objective
    from prfaas.planner.simulator.changes import read_schedule
    from prfaas.planner.simulator.engine import Options, Simulation
    from prfaas.planner.simulator.scenario import caches, scenario
    from prfaas.planner.simulator.traces import BLOCK_TOKENS

    capacity = math.inf if args.cache_gib is None else args.cache_gib * 2**30
    cache_of = caches(args.prefix_cache, BLOCK_TOKENS, capacity)
    if args.trace is None:
        rate = planned_for = args.rate
        warmup = _warmup(args)
        total = round(rate * args.duration) if args.duration else REQUESTS
    else:
        planning, seen = _observed(args, planning)
        rate, total, warmup = seen.rate, seen.requests, 0.0
        planned_for = seen.busiest if args.plan_for == "busiest" else rate
    planning = with_objective(
        planning, rate=planned_for if planned_for > 0 else None, goal=args.objective, service_time=args.service_time
    )
    chosen = scenario(args.policy, planning, args.queueing, args.seed)
    changes = []
    if args.link_schedule is not None:
        with args.link_schedule.open(encoding="utf-8") as lines:
            changes = read_schedule(lines, str(args.link_schedule), chosen.topology)
    options = Options(warmup=warmup, overlap=args.overlap, slots=args.slots, keep_values=args.plot is not None)
    simulation = Simulation(
        chosen.topology,
        chosen.setting,
        _arrivals(args, planning, total),
        chosen.queue_of,
        seed=args.seed,
        options=options,
        cache_of=cache_of,
        changes=changes,
    )
    interrupted = _go(simulation, total)
    result = simulation.result()
    keys = _keys(args, chosen, result, rate, interrupted=interrupted)
    if args.output == "json":
        import json

        print(json.dumps(keys, indent=2))
    else:
        from prfaas.cli.simulate_report import table

        print(table(keys), end="")
    if args.plot is not None:
        from prfaas.cli.simulate_plot import simulation_plot

        simulation_plot(args.plot, result)
    return INTERRUPTED if interrupted else 0


def _warmup(args: argparse.Namespace) -> float:
    """Seconds until the queues are what they are: a twentieth of the run, at most the time of 5,000 requests."""
    duration = args.duration or REQUESTS / args.rate
    return float(min(WARMUP_SHARE * duration, WARMUP_REQUESTS / args.rate))


def _observed(args: argparse.Namespace, planning: Planning) -> tuple[Planning, Observed]:
    """What to plan for: the trace's own lengths, and how many requests come how fast."""
    from dataclasses import replace

    from prfaas.planner.simulator.scenario import caches
    from prfaas.planner.simulator.traces import BLOCK_TOKENS, observe

    capacity = math.inf if args.cache_gib is None else args.cache_gib * 2**30
    cache = caches(args.prefix_cache, BLOCK_TOKENS, capacity)(planning.topology.pd[0])
    seen = observe(_trace(args), cache)
    return replace(planning, workload=seen.histogram.workload()), seen


def _trace(args: argparse.Namespace) -> Iterator[Arrival]:
    """The trace, line by line, at the speed that was asked for."""
    from prfaas.planner.simulator.arrivals import scaled
    from prfaas.planner.simulator.traces import read

    with args.trace.open(encoding="utf-8") as lines:
        yield from scaled(read(lines, str(args.trace)), args.scale_rate, args.duration or math.inf)


def _arrivals(args: argparse.Namespace, planning: Planning, total: int) -> Iterator[Arrival]:
    from prfaas.planner.simulator.arrivals import generate

    if args.trace is not None:
        return _trace(args)
    return generate(
        planning.workload,
        args.rate,
        seed=args.seed,
        duration=args.duration or math.inf,
        count=math.inf if args.duration else total,
        variation=1.0 if args.variation is None else args.variation,
    )


def _go(simulation: Simulation, total: int) -> bool:
    """Run it, with a bar where somebody watches; True if it was interrupted."""
    bar = sys.stderr.isatty()

    def progress(requests: int, seconds: float) -> None:
        if bar:
            done = min(1.0, requests / max(1, total))
            filled = round(30 * done)
            row = f"[{'#' * filled}{'.' * (30 - filled)}] {done:4.0%}  {requests:,} requests, {seconds:,.0f} s"
            print(f"\r{row}", end="", file=sys.stderr, flush=True)

    try:
        simulation.run(progress)
        return False
    except KeyboardInterrupt:
        return True
    finally:
        if bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _keys(
    args: argparse.Namespace, chosen: Scenario, result: Result, rate: float, *, interrupted: bool
) -> dict[str, Any]:
    """What `-o json` prints; the names are API."""
    setting = chosen.setting
    used = sum(setting.prfaas.get(pool.name, pool.instances) for pool in chosen.topology.prfaas)
    cuts = {} if args.policy == "blind" else dict(sorted(setting.thresholds.items()))
    return {
        "policy": args.policy,
        "queueing": args.queueing,
        "seed": args.seed,
        "rate": float(f"{rate:.6g}"),
        "lambdaMax": float(f"{chosen.lambda_max:.6g}"),
        "threshold": min(cuts.values(), default=None),
        "thresholds": cuts,
        "instances": {
            "prefill": sum(split.prefill for split in setting.splits.values()),
            "decode": sum(split.decode for split in setting.splits.values()),
            "prfaas": used if cuts or args.policy == "blind" else 0,
        },
        "interrupted": interrupted,
        **result.to_json(),
    }
