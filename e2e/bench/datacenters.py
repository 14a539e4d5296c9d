"""What the datacenters cost: a warm `up`, `up` again, at rest, `down`. Whatever is up is taken down first.

Limits, from the cgroup of all nodes: at most 0.6 core and 2.2 GiB at rest, and 75 s for a warm `up`. Exit status 1 says
that one was not held.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from e2e.datacenters.build import build_all
from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.docker import PrivateDaemon, state_root
from e2e.datacenters.nodeimage import node_archive

UP_SECONDS, REST_CORES, REST_GIB = 75.0, 0.6, 2.2


def timed(work: Callable[[], object]) -> float:
    """Seconds of the clock."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def group(*places: str) -> Path:
    """The file of the nodes' cgroup (`@` in a place), in whichever hierarchy it is (cgroup v1 or v2)."""
    name = PrivateDaemon(state_root()).cgroup
    for place in places:
        if (found := Path("/sys/fs/cgroup") / place.replace("@", name)).exists():
            return found
    raise SystemExit(f"none of {', '.join(places)} below the cgroup root: the nodes run under another daemon")


def cpu_seconds() -> float:
    """CPU seconds that all nodes have used."""
    file = group("@/cpu.stat", "cpuacct/@/cpuacct.usage", "cpu,cpuacct/@/cpuacct.usage")
    text = file.read_text()
    if file.name == "cpuacct.usage":
        return int(text) / 1e9
    return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6


def memory_gib() -> float:
    """Memory of all nodes without page cache that could be dropped, in GiB."""
    file = group("@/memory.stat", "memory/@/memory.stat")
    stat = {key: int(value) for key, value in (line.split() for line in file.read_text().splitlines())}
    anonymous = stat.get("total_rss", stat.get("anon", 0)) + stat.get("total_shmem", stat.get("shmem", 0))
    return anonymous / 2**30


def main() -> int:
    """Print one row a figure; 1 if a limit was not held."""
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.datacenters", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="at rest")
    seconds = parser.parse_args().seconds
    build_all()
    node_archive()
    datacenters = Datacenters()
    datacenters.down()
    warm = timed(datacenters.up)
    again = timed(datacenters.up)
    time.sleep(30)  # what starting leaves behind is not rest
    before = cpu_seconds()
    time.sleep(seconds)
    cores = (cpu_seconds() - before) / seconds
    memory = memory_gib()
    down = timed(datacenters.down)
    print(f"warm up until Ready and DNS answers: {warm:.1f} s (limit {UP_SECONDS:g})")
    print(f"up again: {again:.1f} s")
    print(f"at rest over {seconds:g} s: {cores:.2f} core (limit {REST_CORES}), {memory:.2f} GiB (limit {REST_GIB})")
    print(f"down: {down:.1f} s")
    return 0 if warm <= UP_SECONDS and cores <= REST_CORES and memory <= REST_GIB else 1


if __name__ == "__main__":
    sys.exit(main())
