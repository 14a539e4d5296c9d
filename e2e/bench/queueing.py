"""The disciplines of the router's queue on the paper's case study, and how fast they are simulated.

First the speed: 100,000 requests at 2.90 requests/s, the process's highest memory (RSS) with it. Then, for every
load and seed, all disciplines on the same arrivals; ratios are to the plain threshold, +- is a 95 % t interval over
seeds. The first 5,000 requests of a run are dropped. Threshold 19,400, Np/Nd 3/5, 4 remote instances, 100 Gbit/s, D1
from 6 to 30 s.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from prfaas.api.profiles import shipped
from prfaas.planner.setting import Setting, Split
from prfaas.planner.simulator.arrivals import generate
from prfaas.planner.simulator.engine import Options, Simulation
from prfaas.planner.simulator.results import Result
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.planner.workload import Workload
from prfaas.routing.queueing import ByThreshold, Homed, Stealing
from prfaas.routing.triage import Promises, Triage
from prfaas.routing.waiting import Queue

T = 19_400
DROPPED = 5_000
WORKLOAD = Workload.log_normal(mu=9.90, sigma=1.00, lo=128, hi=131_072, output=1024)
TOPOLOGY = Topology(
    (PrfaaSPool("h200", shipped("H200x8"), 4),),
    (PDPool("h20", shipped("H20x8"), 8),),
    (Link("east", "h200", "h20", 100.0),),
)
SETTING = Setting({"h20": Split(3, 5)}, {"east": T})
QUEUES: dict[str, Callable[[], Queue]] = {
    "plain": lambda: Homed(ByThreshold([None, T])),
    "spill": lambda: Homed(ByThreshold([None, T]), 1.0),
    "steal": lambda: Stealing(ByThreshold([None, T])),
    "triage, self-tuned": lambda: Triage(T, Promises(6.0, floor=6.0, ceiling=30.0)),
    "triage, P90 first": lambda: Triage(
        T, Promises(6.0, ratio=2.5, late_share=0.06, gain=0.1, floor=6.0, ceiling=30.0)
    ),
    "triage 5.5/18": lambda: Triage(T, Promises(5.5, ratio=18 / 5.5, gain=0.0)),
}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
MOST_SECONDS, MOST_BYTES = 15.0, 500e6


def simulated(name: str, rate: float, seed: int, requests: int) -> Result:
    """One run."""
    arrivals = generate(WORKLOAD, rate, seed=seed, count=requests)
    options = Options(warmup=DROPPED / rate)
    return Simulation(TOPOLOGY, SETTING, arrivals, lambda pd, links: QUEUES[name](), options=options).run()


def interval(values: Sequence[float]) -> str:
    """Mean and half of the interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f}+-{half:.3f}"


def speed() -> bool:
    """Whether 100,000 requests take no longer and no more memory than they may."""
    print(f"{'100,000 requests at 2.90/s':28}{'seconds':>10}{'of CPU':>10}{'memory, MB':>12}")
    fits = True
    for name in ("plain", "triage, self-tuned"):
        began, used = time.perf_counter(), time.process_time()
        simulated(name, 2.90, 0, 100_000)
        took, used = time.perf_counter() - began, time.process_time() - used
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{name:28}{took:10.1f}{used:10.1f}{most / 1e6:12.0f}", flush=True)
        fits = fits and used <= MOST_SECONDS and most <= MOST_BYTES
    return fits


def compare(rates: Sequence[float], seeds: Sequence[int], requests: int) -> None:
    """The table."""
    for rate in rates:
        print(f"\n{rate:.2f} requests/s, {len(seeds)} seeds x {requests:,} requests")
        head = ("mean s", "P50 s", "P90 s", "P99 s", "most s", "ratio mean", "ratio P90", "ratio P99")
        print(f"{'':22}" + "".join(f"{cell:>8}" for cell in head[:5]) + "".join(f"{cell:>15}" for cell in head[5:]))
        base: list[Result] = []
        for name in QUEUES:
            runs = [simulated(name, rate, seed, requests) for seed in seeds]
            base = base or runs
            row = [
                statistics.fmean(getattr(run.ttft, key) for run in runs) for key in ("mean", "p50", "p90", "p99")
            ] + [max(run.ttft.longest for run in runs)]
            ratios = [
                interval([getattr(a.ttft, key) / getattr(b.ttft, key) for a, b in zip(runs, base, strict=True)])
                for key in ("mean", "p90", "p99")
            ]
            cells = "".join(f"{value:8.2f}" for value in row) + "".join(f"{ratio:>15}" for ratio in ratios)
            print(f"{name:22}{cells}", flush=True)


def main() -> int:
    """0 if the simulator is fast enough, else 1."""
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.queueing", description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[2.54, 2.90, 3.02])
    parser.add_argument("--seeds", type=int, default=8, help="2 to 10")
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--requests", type=int, default=300_000)
    chosen = parser.parse_args()
    fits = speed()
    compare(chosen.rates, range(chosen.first_seed, chosen.first_seed + chosen.seeds), chosen.requests)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
