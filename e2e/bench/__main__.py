"""`python -m e2e.bench --results FOLDER`: every bench one after the other, their output kept as text.

Each bench is a program of its own, so that its memory is its own. A file begins with what a reader needs to compare it:
the command, the day, the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

BENCHES = {
    "worker": ["-m", "e2e.bench.worker", "--seconds", "20"],
    "router": ["-m", "e2e.bench.router"],
    "datacenters": ["-m", "e2e.bench.datacenters"],
    "planner": ["-m", "e2e.bench.planner"],
    "queueing": ["-m", "e2e.bench.queueing", "--rates", "2.90", "--seeds", "4", "--requests", "60000"],
}


def header(command: list[str]) -> str:
    """What was run, when, and on what."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"command: python {' '.join(command)}\n"
        f"day: {datetime.now(UTC):%Y-%m-%d}\n"
        f"machine: {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, Python "
        f"{platform.python_version()}, load average {os.getloadavg()[0]:.1f} at the start\n\n"
    )


def main() -> int:
    """0 if every bench ran and held its own limits, else 1."""
    parser = argparse.ArgumentParser(prog="python -m e2e.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("docs/results"), metavar="FOLDER")
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], metavar="BENCH", help=f"of {', '.join(BENCHES)}")
    chosen = parser.parse_args()
    chosen.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in chosen.names or BENCHES:
        started = time.monotonic()
        print(f"bench {name} ...", flush=True)
        text = header(BENCHES[name])
        done = subprocess.run([sys.executable, *BENCHES[name]], capture_output=True, text=True, check=False)
        (chosen.results / f"bench-{name}.txt").write_text(text + done.stdout, encoding="utf-8")
        if done.returncode != 0:
            failed.append(name)
            print(f"{done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
        print(f"bench {name}: {'ok' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
