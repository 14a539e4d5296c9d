"""`prfaas`: dispatch to one module per command.

A command's own imports happen inside its function: a worker pod must not pay for the operator's libraries.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("crds", "link", "operator", "router", "worker")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command's own parser below it."""
    parser = argparse.ArgumentParser(prog="prfaas", description=importlib.import_module("prfaas").__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"prfaas.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its return value is the exit status."""
    args = build_parser().parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
