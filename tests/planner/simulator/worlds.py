"""Small worlds for the simulator's tests: profiles with round numbers, and the queues to run them with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prfaas.api.profile import Profile
from prfaas.planner.setting import Setting, Split
from prfaas.planner.simulator.arrivals import Arrival
from prfaas.planner.simulator.engine import Options, Simulation
from prfaas.planner.simulator.results import Result
from prfaas.planner.simulator.world import QueueOf
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.routing.queueing import ByThreshold, Homed, Stealing
from prfaas.routing.triage import Promises, Triage
from prfaas.routing.waiting import Queue
from tests.planner import cases

GBIT_BYTES = 125_000_000
T = 19_400


def profile(**decode: Any) -> Profile:
    """1 s of prefill and 1 Gbit of KV per 1,000 tokens, 2 Gbit of state; steps of 10 ms, up to 4 at once."""
    steps = decode.pop("steps", [{"batch": 1, "seconds": 0.01}])
    return Profile.model_validate(
        {
            "accelerator": "test",
            "gpus": 1,
            "prefill": {"coefficients": {"a": 0.0, "b": 1.0, "c": 0.0, "floor": 0.001}},
            "kv": {"fixedBytes": 2 * GBIT_BYTES, "bytesPerToken": GBIT_BYTES // 1000},
            "decode": {"steps": steps, "maxBatch": 4, **decode},
            "startupSeconds": 5,
            "source": "assumed",
        }
    )


def topology(
    *, remote: int = 1, local: int = 2, gbps: float = 10.0, of: Profile | None = None, **link: Any
) -> Topology:
    """One pool of each kind and a link; a transfer within the PD pool takes no time to speak of."""
    one = of or profile()
    return Topology(
        (PrfaaSPool("far", one, remote),) if remote else (),
        (PDPool("near", one, local, min_prefill=0, min_decode=0, rdma_gbps=1e6),),
        (Link("wire", "far", "near", gbps, **link),) if remote else (),
    )


def setting(prefill: int = 1, decode: int = 1, threshold: int | None = 1000) -> Setting:
    """Of `topology`."""
    return Setting({"near": Split(prefill, decode)}, {} if threshold is None else {"wire": threshold})


def plain(pd: PDPool, links: Sequence[Link], threshold: float = 1000) -> Queue:
    """First come, first served, above 1,000 tokens remote."""
    return Homed(ByThreshold([None, *(threshold for _ in links)]))


def simulate(
    arrivals: Iterable[Arrival],
    on: Topology | None = None,
    at: Setting | None = None,
    queue_of: QueueOf = plain,
    **more: Any,
) -> Result:
    """A run of the small world; every time to first token is kept."""
    options = Options(**{"keep_values": True, **more.pop("options", {})})
    return Simulation(on or topology(), at or setting(), arrivals, queue_of, options=options, **more).run()


def times(result: Result) -> list[float]:
    """All times to first token, local ones first."""
    return [value for values in result.ttft_values.values() for value in values]


def of_paper(name: str, threshold: float = T) -> QueueOf:
    """The queues of the case study, set as in tests/data/queue_disciplines.json: D1 from 6 s to 30 s."""

    def queue_of(pd: PDPool, links: Sequence[Link]) -> Queue:
        home = ByThreshold([None, *(threshold for _ in links)])
        if name == "plain":
            return Homed(home)
        if name == "spill":
            return Homed(home, 1.0)
        if name == "steal":
            return Stealing(home)
        promises = {
            "triage": Promises(6.0, floor=6.0, ceiling=30.0),
            "p90 first": Promises(6.0, ratio=2.5, late_share=0.06, gain=0.1, floor=6.0, ceiling=30.0),
        }
        return Triage(threshold, promises[name])

    return queue_of


PAPER = cases.topology()
PAPER_SETTING = Setting({"h20": Split(3, 5)}, {"east": T})
