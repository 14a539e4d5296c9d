"""`prfaas`: dispatch to one module per command.

Only the module of the command that was called is imported, and its heavy imports happen inside its function: a worker
pod must not pay for the operator's libraries.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = (
    "calibrate",
    "crds",
    "fetch",
    "link",
    "operator",
    "plan",
    "render",
    "router",
    "simulate",
    "status",
    "worker",
)


def build_parser(wanted: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser with each wanted command's own parser below it."""
    parser = argparse.ArgumentParser(prog="prfaas", description=importlib.import_module("prfaas").__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in wanted:
        importlib.import_module(f"prfaas.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its return value is the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    known = words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS
    args = build_parser(known).parse_args(words)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
