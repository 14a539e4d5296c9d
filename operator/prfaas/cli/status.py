"""`prfaas status`: what the pools of a cluster are, and what their models are waiting for, right now.

What moves all the time (how far a fetch is, how fast, how long still) is in no status of the API: it is read here from
the last lines that the pods which fetch have logged. The rights of whoever asks are enough: get and list, and pods/log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING

from prfaas.cli.arguments import kubeconfig_file, users_kubeconfig

if TYPE_CHECKING:
    from prfaas.cli.status_report import PoolReport


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("status", help="pools, their conditions, and how far their models are")
    parser.add_argument("-n", "--namespace", metavar="NS", help="one namespace (default: all)")
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    parser.add_argument(
        "--kubeconfig", type=kubeconfig_file, metavar="FILE", help="default: $KUBECONFIG or ~/.kube/config"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 with one line on standard error."""
    from prfaas.cli.status_report import as_table
    from prfaas.kube.errors import Forbidden, KubeError, NotFound

    try:
        reports = asyncio.run(_read(args))
    except NotFound as error:
        text = "the cluster does not know PrfaaSCluster and PDCluster: is this the right context?"
        print(f"prfaas status: {text} ({error.message})", file=sys.stderr)
        return 1
    except Forbidden as error:
        hint = "" if args.namespace else "; give -n NAMESPACE if you may read one namespace alone"
        print(f"prfaas status: {error.message}{hint}", file=sys.stderr)
        return 1
    except KubeError as error:
        print(f"prfaas status: {error.message}", file=sys.stderr)
        return 1
    if args.output == "json":
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        print(as_table(reports))
    return 0


async def _read(args: argparse.Namespace) -> list[PoolReport]:
    from datetime import UTC, datetime

    from prfaas.cli.status_report import gather
    from prfaas.kube.client import KubeClient
    from prfaas.kube.errors import Invalid

    try:
        path = args.kubeconfig or users_kubeconfig()
    except ValueError as error:
        raise Invalid(str(error)) from error
    async with await KubeClient.from_kubeconfig_file(path, context=args.context) as client:
        return await gather(client, args.namespace, datetime.now(UTC))
