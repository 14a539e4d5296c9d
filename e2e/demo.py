"""`python -m e2e.demo`: two datacenters, the operator in both, real requests, and a table of what happened.

It leaves everything running and says how to look around.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from e2e import images
from e2e.client import Outcome, replay
from e2e.datacenters.cache import progress, say
from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.errors import DatacentersError, in_words
from e2e.report import table
from e2e.stack import LineMeter, Stack, StackError
from e2e.workload import Ask, WorkloadError, from_paper, from_trace

RATE = 3.0
"""Requests per second of the demo's own workload."""
OUTPUT_TOKENS = 64
"""Tokens that each request of the demo's own workload asks for."""
TRACE_ROWS = 200


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("--requests", type=int, default=120, metavar="N", help="default: %(default)s")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay a Mooncake-format JSONL trace instead")
    parser.add_argument("--rows", type=int, default=TRACE_ROWS, metavar="N", help="rows of the trace (%(default)s)")
    return parser.parse_args()


def bring_up() -> Stack:
    """Datacenters, image, operator and samples, all Ready."""
    datacenters = Datacenters()
    datacenters.up()
    image = images.build()
    datacenters.load(image.archive)
    stack = Stack(datacenters, image.reference)
    stack.install()
    stack.apply_samples()
    stack.wait_ready()
    return stack


async def run(stack: Stack, asks: Sequence[Ask]) -> int:
    """Send the asks, print the table; the exit status: 0 if every answer was verified."""
    scales, target = stack.scales(), stack.target()
    meter = LineMeter(stack)
    done: list[Outcome] = []

    def so_far() -> str:
        return f"{len(done)} of {len(asks)} answered, {sum(outcome.error is not None for outcome in done)} errors"

    started = time.monotonic()
    with progress(f"sending {len(asks)} requests to {target.url}", so_far, every=5.0):
        outcomes = await replay(target, asks, on_done=done.append)
    seconds = time.monotonic() - started
    print()
    print(table(outcomes, seconds, stack.threshold(), meter.use(), scales, stack.pods()))
    print()
    return 0 if all(outcome.verified for outcome in outcomes) else 1


def look_around(stack: Stack) -> str:
    """Five commands to try next."""
    datacenters = ".venv/bin/python -m e2e.datacenters"
    body = '{"model": "kimi-linear", "prompt": "The line between two halls", "max_tokens": 8}'
    return "\n".join(
        [
            "Everything is left running. To look around:",
            f"  {datacenters} kubectl east get prfaas -A",
            f"  {datacenters} kubectl west get prfaas -A",
            f"  curl -si {stack.target().url}/v1/completions -H 'content-type: application/json' -d '{body}'",
            f"  {datacenters} line east west",
            "  make down",
        ]
    )


def main() -> int:
    """0: all answers verified; 1: not, or something could not be brought up (the reason is on stderr)."""
    chosen = arguments()
    try:
        if chosen.requests < 1 or chosen.rows < 1:
            raise WorkloadError("--requests and --rows must be at least 1")
        if chosen.trace is not None:
            from_trace(chosen.trace, rows=1, time_scale=1.0)  # a wrong path is said before anything is built
        with in_words():
            stack = bring_up()
        if chosen.trace is None:
            asks = from_paper(chosen.requests, rate=RATE, output_tokens=OUTPUT_TOKENS)
        else:
            asks = from_trace(chosen.trace, rows=chosen.rows, time_scale=stack.scales().time)
        status = asyncio.run(run(stack, asks))
        print(look_around(stack))
        return status
    except (DatacentersError, StackError, WorkloadError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; `make down` takes down what is up")
        return 130


if __name__ == "__main__":
    sys.exit(main())
