"""Whatever happens: no request is lost or served twice, and nothing is held when all is over."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.planner.simulator.arrivals import Arrival
from prfaas.planner.simulator.changes import Change, Conversion, Failure, LineRate, NewThresholds
from prfaas.planner.simulator.engine import Options, Simulation
from prfaas.planner.topology import Link, PDPool
from prfaas.routing.prefixes import PrefixCache
from prfaas.routing.queueing import ByThreshold, Homed, Stealing
from prfaas.routing.triage import Promises, Triage
from prfaas.routing.waiting import Queue
from tests.planner.simulator.worlds import profile, setting, topology

NAMES = ("plain", "spill", "steal", "triage")
MOMENTS = st.floats(0, 12)
ARRIVALS = st.lists(st.tuples(MOMENTS, st.integers(1, 6000), st.integers(0, 400), st.integers(0, 3)), max_size=25)
CHANGES: st.SearchStrategy[list[Change]] = st.lists(
    st.one_of(
        st.builds(LineRate, MOMENTS, st.just("link:wire"), st.sampled_from([0.0, 1.0, 20.0])),
        st.builds(Failure, MOMENTS, st.sampled_from(["prfaas/far", "prefill/near", "decode/near"]), st.floats(0, 20)),
        st.builds(Conversion, MOMENTS, st.just("near"), st.sampled_from(["prefill", "decode"])),
        st.builds(NewThresholds, MOMENTS, st.sampled_from([{}, {"wire": 500}, {"wire": 3000}])),
    ),
    max_size=8,
)


def queue(name: str, links: Sequence[Link]) -> Queue:
    home = ByThreshold([None, *(1000.0 for _ in links)])
    if name == "steal":
        return Stealing(home)
    if name == "triage":
        return Triage(1000.0, Promises(2.0, floor=1.0, ceiling=9.0))
    return Homed(home, 1.0 if name == "spill" else None)


@settings(max_examples=150)
@given(
    rows=ARRIVALS,
    changes=CHANGES,
    name=st.sampled_from(NAMES),
    overlap=st.booleans(),
    slots=st.sampled_from(["before", "after"]),
    slow=st.booleans(),
)
def test_everybody_is_served_once_or_has_failed(
    rows: list[tuple[float, int, int, int]], changes: list[Change], name: str, overlap: bool, slots: str, slow: bool
) -> None:
    steps = [{"batch": 1, "seconds": 0.01}, {"batch": 4, "seconds": 0.02 if slow else 0.01}]
    on = topology(remote=2, local=6, of=profile(steps=steps))
    arrivals = [
        Arrival(at, tokens, output, 0.0, tuple(range(1000 * family, 1000 * family + tokens // 100)) if family else ())
        for at, tokens, output, family in sorted(rows)
    ]
    changes = [*changes, LineRate(100.0, "link:wire", 10.0)]

    def queue_of(pd: PDPool, links: Sequence[Link]) -> Queue:
        return queue(name, links)

    run = Simulation(
        on,
        setting(3, 3),
        arrivals,
        queue_of,
        options=Options(overlap=overlap, slots="before" if slots == "before" else "after", keep_values=True),
        cache_of=lambda pool: PrefixCache("hybrid", 100),
        changes=changes,
    )
    result = run.run()
    world = run._world
    completed = run._log.completed
    assert completed + result.failed + result.unfinished == len(arrivals)
    assert result.requests >= completed
    router = world.routers[0]
    there = bool(router.decoders.instances) and router.stations[0].servers.count > 0
    assert result.unfinished == 0 or not there
    if result.unfinished == 0:
        assert not router.waiting
        assert not router.ready
        assert len(router.queue) == 0
        assert router.decoders.active.value == 0
        assert router.decoders.slots == router.decoders.capacity.value == 4 * len(router.decoders.instances)
        assert all(not each.flights and each.busy.value == 0 for each in world.stations)
        assert world.lines["link:wire"].transfers == 0
    assert sum(each.servers.count for each in world.stations[1:]) + len(router.decoders.instances) == 6
