"""`prfaas worker serve MODEL ...`: the fake vLLM worker, with the arguments of `vllm serve` and a few of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("worker", help="a vLLM worker without a GPU: real HTTP and KV bytes, modelled time")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_ServeParser)
    actions.add_parser("serve", help="serve a model, with the arguments of `vllm serve`", add_help=False)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 2 for values that the parser could refuse, 1 for what vLLM refuses later or cannot bind."""
    import asyncio
    import os

    from prfaas import logs
    from prfaas.worker.commandline.checks import check, log_level
    from prfaas.worker.commandline.parser import build, warn_once
    from prfaas.worker.commandline.rewrite import CommandLineError
    from prfaas.worker.commandline.table import table
    from prfaas.worker.flags import read_config
    from prfaas.worker.memory import keep_small
    from prfaas.worker.serve import run as serve

    try:
        check(args, os.environ, warn_once)
        config = read_config(args, os.environ)
    except CommandLineError as error:
        return _refused(error, 1)
    except ValueError as error:
        return _refused(error, 2)
    logs.set_up(log_level(args, os.environ))
    build.cache_clear()
    table.cache_clear()
    keep_small()
    try:
        return asyncio.run(serve(config))
    except OSError as error:  # a port is taken, an address is not of this machine, a certificate cannot be read
        return _refused(error, 1)


def _refused(error: Exception, status: int) -> int:
    print(f"{PROG}: error: {error}", file=sys.stderr)
    return status


class _ServeParser(argparse.ArgumentParser):
    """Built only when it is used: the table of vLLM's flags is long."""

    def parse_known_args(  # type: ignore[override]  # argparse's overloads are about namespaces of other types
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all: what is left over is refused."""
        from prfaas.worker.commandline.own import add_own
        from prfaas.worker.commandline.parser import parse, warn_once
        from prfaas.worker.commandline.rewrite import CommandLineError

        try:
            parsed = parse(args or (), PROG, add_own, warn_once)
        except CommandLineError as error:
            _end(_refused(error, 1))
        parsed.run = run
        return parsed, []


def _end(status: int) -> NoReturn:
    raise SystemExit(status)


PROG = "prfaas worker serve"
