"""`prfaas fetch SOURCE --to DIR`: bring a model to a folder. It is what the operator's fetch Jobs run.

Credentials come from the environment, never from arguments, which everyone on the machine may read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from prfaas.cli.arguments import count

EXIT_STOPPED = 143


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "fetch",
        help="bring a model to a folder: resumed, checked, whole",
        description="Credentials come from the environment: HF_TOKEN, or AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
        "AWS_SESSION_TOKEN and AWS_REGION. Interrupted at any point, it goes on from there when it is run again.",
    )
    parser.add_argument("source", metavar="SOURCE", help="hf://ORG/NAME or s3://BUCKET/PREFIX")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the model's own folder")
    parser.add_argument("--revision", default="main", metavar="R", help="branch, tag or commit of a repository")
    parser.add_argument("--endpoint", metavar="URL", help="a mirror of Hugging Face, or an S3-compatible store")
    parser.add_argument("--size-limit", type=count, metavar="BYTES", help="most bytes that the model may take")
    parser.add_argument("--report", type=Path, metavar="FILE", help="how it ended, as JSON, for whoever started it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the model is whole; 1 with the reason on standard error; 2 for a source that is none."""
    import asyncio

    from prfaas import logs
    from prfaas.fetch.errors import FetchError
    from prfaas.fetch.run import Request, Surroundings, source_of

    request = Request(args.source, args.to, args.revision, args.endpoint, args.size_limit)
    try:
        source_of(request, {})
    except ValueError as error:
        print(f"prfaas fetch: error: {error}", file=sys.stderr)
        return 2
    logs.set_up()
    try:
        commit = asyncio.run(_until_stopped(request, Surroundings(os.environ)))
    except FetchError as error:
        _report(args.report, error.reason.value, error.message)
        print(f"prfaas fetch: {error.message}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("prfaas fetch: told to stop; run it again to go on", file=sys.stderr)
        return EXIT_STOPPED
    _report(args.report, "Cached", commit)
    return 0


async def _until_stopped(request: object, around: object) -> str:
    """The fetch, which SIGTERM and SIGINT cancel: as a container's first process it would not hear them otherwise."""
    import asyncio
    import signal

    from prfaas.fetch.run import Request, Surroundings, fetch

    assert isinstance(request, Request)
    assert isinstance(around, Surroundings)
    task = asyncio.ensure_future(fetch(request, around))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def _report(file: Path | None, reason: str, message: str) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps({"reason": reason, "message": message}))
    except OSError as error:
        print(f"prfaas fetch: cannot write {file}: {error.strerror}", file=sys.stderr)
