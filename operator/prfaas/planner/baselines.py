"""What a plan is compared with: the same hardware, used in the ways that the paper compares itself with, and two more.

    homogeneous   no PrfaaS pool: as many GPUs as it has, of the PD pools' kind, best split (Table 6, 96 H20)
    naive         every prompt is prefilled remotely, the PD pool only decodes (Table 6, "naive heterogeneous")
    blind         requests go over the link at random, whatever their length; best share and split
    inverted      short prompts go over the link, long ones stay; best threshold and split

The last two are for one PD pool with one link; they say what routing by length is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from prfaas.planner.network import search
from prfaas.planner.setting import Setting
from prfaas.planner.single import Pair, first
from prfaas.planner.throughput import Loads, Model, Part
from prfaas.planner.topology import Link, PDPool, Topology

ALL = math.inf


@dataclass(frozen=True)
class Baseline:
    """A setting on a topology of its own, and the parts its requests fall into."""

    model: Model
    setting: Setting
    parts: list[Part]

    @property
    def loads(self) -> Loads:
        """What it needs of each resource."""
        return self.model.loads_of(self.parts, self.setting)


def best_setting(model: Model) -> Setting:
    """The setting of highest throughput: exact for a pair, within a stated gap else."""
    pair = pair_of(model)
    if pair is None:
        return search(model).setting
    choice = pair.choices()[0]
    return pair.setting(choice.prefill, choice.threshold)


def pair_of(model: Model) -> Pair | None:
    """The one PD pool and its link, where there is no more than that."""
    topology = model.topology
    pools = [pd for pd in topology.pd if pd.instances]
    links = [link for link in topology.links if link.allowance > 0]
    if len(topology.pd) != 1 or not pools or len(links) > 1:
        return None
    return Pair(model, pools[0], links[0] if links else None)


def homogeneous(model: Model) -> Baseline:
    """As many GPUs, all in PD pools of the present kind."""
    topology = model.topology
    gpus = sum(pool.instances * pool.profile.gpus for pool in topology.prfaas)
    total = sum(pd.instances for pd in topology.pd) or 1
    pools, left = [], float(gpus)
    for pd in topology.pd:
        more = int(gpus * pd.instances / total / pd.profile.gpus + 1e-9)
        left -= more * pd.profile.gpus
        pools.append(replace(pd, instances=pd.instances + more, max_prefill=None, max_decode=None))
    for index, pd in enumerate(pools):
        more = int(left / pd.profile.gpus + 1e-9)
        left -= more * pd.profile.gpus
        pools[index] = replace(pd, instances=pd.instances + more)
    alone = Model(model.workload, Topology((), tuple(pools)), model.service_time)
    setting = best_setting(alone)
    return Baseline(alone, setting, alone.parts(setting))


def naive(model: Model) -> Baseline | None:
    """Every prompt prefilled remotely; None where some pool has no link that all its requests may take."""
    topology = model.topology
    for pd in topology.pd:
        if not any(link.allowance >= 1 for link in topology.links_of(pd.name)):
            return None
    pools = tuple(replace(pd, min_prefill=0, max_prefill=0, max_decode=None) for pd in topology.pd)
    remote = Model(model.workload, Topology(topology.prfaas, pools, topology.links), model.service_time)
    pair = pair_of(remote)
    setting = search(remote).setting if pair is None else pair.setting(0, 0)
    return Baseline(remote, setting, remote.parts(setting))


def blind(model: Model, prefill: int | None = None) -> Baseline | None:
    """A random share over the link; `prefill`: Np, None for the best. None where there is more than one link."""
    pair = pair_of(model)
    if pair is None or pair.link is None:
        return None
    found = []
    for np in [prefill] if prefill is not None else pair.pd.splits():
        out, home = pair.out(0), np * pair.home(pair.longest)
        share = min(1.0, pair.link.allowance, out / (out + home)) if out + home > 0 else 0.0
        parts = _split(pair.pd, pair.link, share)
        setting = pair.setting(np, None)
        found.append(Baseline(model, setting, parts))
    return max(found, key=lambda each: each.loads.lambda_max)


def inverted(model: Model, prefill: int | None = None) -> Baseline | None:
    """Requests up to a threshold over the link, the longer ones prefilled locally; `prefill` as in `blind`."""
    pair = pair_of(model)
    if pair is None or pair.link is None or pair.link.allowance < 1:
        return None
    if prefill is None:
        found = [each for np in pair.pd.splits() if (each := inverted(model, np)) is not None]
        return max(found, key=lambda each: each.loads.lambda_max)
    pd, link = pair.pd, pair.link
    setting = pair.setting(prefill, None)

    def at(t: int) -> Baseline:
        parts = [Part(pd.name, link.name, 1.0, -1.0, float(t)), Part(pd.name, None, 1.0, float(t), ALL)]
        return Baseline(model, setting, parts)

    def remote_is_full(t: int) -> bool:
        loads = at(t).loads
        used = loads.utilisation
        return used[f"prefill/{pd.name}"] < max(used[n] for n in used if n.split("/")[0] in ("prfaas", "line"))

    crossing = first(0, pair.longest, remote_is_full)
    return max((at(t) for t in (max(0, crossing - 1), crossing)), key=lambda each: each.loads.lambda_max)


def _split(pd: PDPool, link: Link, share: float) -> list[Part]:
    return [Part(pd.name, link.name, share, -1.0, ALL), Part(pd.name, None, 1 - share, -1.0, ALL)]
