"""`prfaas plan`: how many instances prefill and decode, and from which length on prompts go over a link."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from prfaas.cli.arguments import picture

if TYPE_CHECKING:
    from prfaas.planner.input import Planning
    from prfaas.planner.plan import Plan
    from prfaas.planner.report import Row

GOALS = ("throughput", "latency", "cost")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="split and thresholds for a workload, pools and links",
        description="Plan a PlanInput document, with the pools and links in it or in manifests of the three kinds.",
    )
    parser.add_argument(
        "-f", "--file", dest="files", action="append", required=True, metavar="FILE", help="YAML; - is standard input"
    )
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")
    parser.add_argument("--plot", type=picture, metavar="OUT", help="draw throughput over threshold (.png or .svg)")
    parser.add_argument("--sweep", metavar="NAME=N,N,...", help="plan again for each: link=100,50,25 or prfaas=2,4,8")
    parser.add_argument("--what-if", metavar="NAME=[+-]N,...", help="and if there were: prfaas=+2,link=25")
    parser.add_argument("--rate", type=float, help="offered requests/s; adds latency under load")
    parser.add_argument("--objective", choices=GOALS, help="instead of the document's")
    parser.add_argument("--service-time", choices=("mean", "representative"), help="instead of the document's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print: 0; 1 with one line for what cannot be planned."""
    from prfaas.cli.documents import DocumentError, read
    from prfaas.planner.errors import PlanError
    from prfaas.planner.input import read_documents, with_objective

    try:
        documents = [(document.title, document.content) for document in read(args.files)]
        planning = with_objective(
            read_documents(documents), rate=args.rate, goal=args.objective, service_time=args.service_time
        )
        return _run(args, planning)
    except (DocumentError, PlanError, OSError) as error:
        print(f"prfaas plan: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, planning: Planning) -> int:
    from dataclasses import replace

    from prfaas.planner.report import keys_of, plan_keys, sweep_table, table
    from prfaas.planner.variation import changed, parse_sweep, parse_what_if

    plan, row, baselines = planned("plan", planning)
    keys = plan_keys(row, plan, baselines)
    text = [table(row, plan, baselines, planning.objective.rate)]
    if args.what_if:
        topology = planning.topology
        for change in parse_what_if(args.what_if):
            topology = changed(topology, change)
        other, other_row, others = planned(args.what_if, replace(planning, topology=topology, present=plan.setting))
        keys["whatIf"] = {"change": args.what_if, **plan_keys(other_row, other, others)}
        text.append(f"If {args.what_if}:\n\n" + table(other_row, other, others, planning.objective.rate))
    if args.sweep:
        changes = parse_sweep(args.sweep)
        points = [_point(planning, changed(planning.topology, change), plan) for change in changes]
        values, rows, kept = [c.value for c in changes], [p[0] for p in points], [p[1] for p in points]
        keys["sweep"] = [
            {"name": c.name, "value": c.value, **keys_of(r), "kept": k}
            for c, r, k in zip(changes, rows, kept, strict=True)
        ]
        text.append(sweep_table(changes[0].name, values, rows, kept))
    if args.plot:
        from prfaas.cli.plots import plan_plot, sweep_plot

        if args.sweep:
            sweep_plot(args.plot, keys["sweep"])
        else:
            plan_plot(args.plot, planning, plan)
    _print(args.output, keys, text)
    return 0


def planned(name: str, planning: Planning) -> tuple[Plan, Row, dict[str, Row]]:
    """The plan, and the baselines it is compared with. Raises PlanError."""
    from prfaas.planner.baselines import blind, homogeneous, naive
    from prfaas.planner.plan import expect_of, plan
    from prfaas.planner.report import Row
    from prfaas.planner.throughput import Model

    workload, objective = planning.workload, planning.objective
    model = Model(workload, planning.topology, objective.service_time)
    found = plan(workload, planning.topology, objective, planning.present)
    baselines = {"homogeneous": homogeneous(model), "naive": naive(model), "blind": blind(model)}
    rows = {
        each: Row(each, base.setting, expect_of(base, objective.rate), base.model.topology)
        for each, base in baselines.items()
        if base is not None
    }
    return found, Row(name, found.setting, found.expected, planning.topology), rows


def _point(planning: Planning, topology: Any, base: Plan) -> tuple[Row, float | None]:
    """The plan for one point of a sweep, and what the first plan's setting would serve there."""
    from prfaas.planner.errors import PlanError
    from prfaas.planner.plan import plan
    from prfaas.planner.report import Row
    from prfaas.planner.throughput import Model

    found = plan(planning.workload, topology, planning.objective)
    try:
        kept = Model(planning.workload, topology, planning.objective.service_time).loads(base.setting).lambda_max
    except PlanError:
        return Row("", found.setting, found.expected, topology), None
    return Row("", found.setting, found.expected, topology), float(f"{kept:.6g}")


def _print(output: str, keys: dict[str, Any], text: list[str]) -> None:
    if output == "json":
        import json

        print(json.dumps(keys, indent=2))
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(keys, sort_keys=False), end="")
    else:
        print("\n".join(text), end="")
