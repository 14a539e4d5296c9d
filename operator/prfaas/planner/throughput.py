"""What a setting can serve: Eq. 3-6 of arXiv:2604.15039 for any number of pools and links, in both service times.

Every resource r (the instances of a PrfaaS pool, a line, the prefill or the decode instances of a PD pool) has a
capacity C_r, and needs u_r of it per request/s that arrives anywhere. Then

    Lambda_max = min over r of C_r / u_r

    PrfaaS pool i     C = N_i           u = sum over its links of P(class) * T_i(class)          s of work per request
    line              C = usable rate   u = sum over its links of E[S(L); class]                 Gbit per request
    prefill of pool j C = Np_j          u = P(local class) * T_j(class)
    decode of pool j  C = Nd_j          u = share_j * T_decode * E[output] / (BS_max * tokens per step)

With `mean`, P(class) * T(class) is E[T(L); class]; with `representative` it is P(class) * T(E[L | class]), the class of
a PrfaaS pool being all that it gets. One PrfaaS pool and one PD pool give back Eq. 3-6: Theta = P(class) * C / u.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from prfaas.planner.curve import Curve
from prfaas.planner.errors import PlanError
from prfaas.planner.setting import ServiceTime, Setting, Split, Theta
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology, kv_curve, seconds_curve
from prfaas.planner.workload import ONE, Integral, Workload, integral_of

LOCAL = None
"""Destination of requests that their own pool prefills."""


@dataclass(frozen=True)
class Part:
    """Requests of a PD pool with uncached lengths in (lo, hi] that go to one place."""

    pd: str
    link: str | None
    share: float
    """Part of all requests that belong to this pool and may go where these go, before their length is looked at."""
    lo: float
    hi: float


@dataclass(frozen=True)
class Loads:
    """What one request/s in all needs of each resource, and what there is. `None` link: prefilled locally."""

    need: Mapping[str, float]
    capacity: Mapping[str, float]
    offload_share: float
    mean_long: float
    mean_short: float
    gbit: float
    """KV bytes on all lines, Gbit per request."""

    @cached_property
    def lambda_max(self) -> float:
        """Highest rate, requests/s; 0 for a setting that sends no request anywhere."""
        rate = min((_ratio(self.capacity[name], need) for name, need in self.need.items()), default=0.0)
        return rate if math.isfinite(rate) else 0.0

    @property
    def bottleneck(self) -> str:
        """The resource that is full first; of several the first by name."""
        return min(self.need, key=lambda name: (_ratio(self.capacity[name], self.need[name]), name))

    @property
    def utilisation(self) -> dict[str, float]:
        """At lambda_max, by resource."""
        rate = self.lambda_max
        return {
            name: rate * need / self.capacity[name] if need > 1e-15 and rate else 0.0
            for name, need in self.need.items()
        }

    @property
    def theta(self) -> Theta:
        """Requests/s that each stage can complete of those that come to it (Eq. 3-5)."""

        def stage(share: float, *kinds: str) -> float:
            rates = [_ratio(self.capacity[n], need) for n, need in self.need.items() if n.split("/")[0] in kinds]
            return share * min(rates, default=math.inf) if share > 0 else math.inf

        local = 1 - self.offload_share
        return Theta(
            prfaas=stage(self.offload_share, "prfaas", "line"),
            prefill=stage(local if local > 1e-12 else 0.0, "prefill"),
            decode=stage(1.0, "decode"),
        )


class Model:
    """A workload on a topology: the integrals that every setting is evaluated with, computed once."""

    def __init__(self, workload: Workload, topology: Topology, service_time: ServiceTime = "mean") -> None:
        """Raises PlanError where a profile was not measured up to the longest request."""
        self.workload = workload.with_mean_cached() if service_time == "representative" else workload
        self.topology = topology
        self.service_time = service_time
        self._count = integral_of(workload, ONE)
        self._tokens = integral_of(workload, Curve((0.0,), ((0.0, 1.0),)))
        self._work: dict[int, Integral] = {}
        self._squared: dict[int, Integral] = {}
        self._gbit: dict[int, Integral] = {}
        pools: list[PrfaaSPool | PDPool] = [*topology.prfaas, *topology.pd]
        for pool in pools:
            measured = pool.profile.prefill.measured_tokens
            longest = max(s.hi + s.cached for s in workload.segments)
            if measured is not None and longest > measured * (1 + 1e-9):
                raise PlanError(
                    f"{pool.name}.profile.prefill.points",
                    f"end at {measured} tokens, but there are requests of up to {longest:,.0f}: measure that long a"
                    " prompt, or bound the workload",
                )

    def count(self, lo: float, hi: float) -> float:
        """P(lo < L <= hi)."""
        return self._count.over(lo, hi)

    def tokens(self, lo: float, hi: float) -> float:
        """E[L; lo < L <= hi], tokens."""
        return self._tokens.over(lo, hi)

    def curve(self, pool: PrfaaSPool | PDPool) -> Curve:
        """n -> T(n | x) with the mean cached prefix x: what a representative length is put into."""
        return seconds_curve(pool.profile, self.workload.cached)

    def work(self, pool: PrfaaSPool | PDPool) -> Integral:
        """x -> E[T(L | cached); L <= x], seconds."""
        found = self._work.get(id(pool))
        if found is None:
            found = Integral(self.workload, lambda segment: seconds_curve(pool.profile, segment.cached))
            self._work[id(pool)] = found
        return found

    def work_squared(self, pool: PrfaaSPool | PDPool) -> Integral:
        """x -> E[T(L | cached)^2; L <= x], s^2."""
        found = self._squared.get(id(pool))
        if found is None:
            found = Integral(self.workload, lambda segment: seconds_curve(pool.profile, segment.cached).squared())
            self._squared[id(pool)] = found
        return found

    def gbit(self, pool: PrfaaSPool | PDPool) -> Integral:
        """x -> E[S(L); L <= x], Gbit."""
        found = self._gbit.get(id(pool))
        if found is None:
            found = self._gbit[id(pool)] = integral_of(self.workload, kv_curve(pool.profile))
        return found

    def decode_rate(self, pool: PDPool) -> float:
        """Requests/s that one decode instance of the pool completes."""
        context = self.workload.mean() + self.workload.cached + self.workload.output / 2
        return pool.decode_rate(self.workload.output, context)

    def populations(self, pd: PDPool) -> list[tuple[float, tuple[Link, ...]]]:
        """Who may go where: shares of the pool's requests, each with the links it may take (residency)."""
        return populations(self.topology.links_of(pd.name))

    def parts(self, setting: Setting) -> list[Part]:
        """Where each length of each PD pool's requests goes."""
        found = []
        for pd in self.topology.pd:
            share = setting.shares.get(pd.name, 1.0 if len(self.topology.pd) == 1 else 0.0)
            if share <= 0:
                continue
            for weight, links in self.populations(pd):
                cuts = [(setting.thresholds[link.name], link.name) for link in links if link.name in setting.thresholds]
                row = [(-1.0, LOCAL), *sorted(cuts, key=lambda cut: (cut[0], cut[1]))]
                for index, (lo, link_name) in enumerate(row):
                    hi = row[index + 1][0] if index + 1 < len(row) else math.inf
                    if hi > lo:
                        found.append(Part(pd.name, link_name, share * weight, float(lo), float(hi)))
        return found

    def loads(self, setting: Setting) -> Loads:
        """What the setting needs of each resource. Raises PlanError where the setting does not fit the topology."""
        _check(setting, self.topology)
        return self.loads_of(self.parts(setting), setting)

    def loads_of(self, parts: list[Part], setting: Setting) -> Loads:
        """The same for any division of the requests into parts."""
        links = {link.name: link for link in self.topology.links}
        count: dict[str, float] = {}
        tokens: dict[str, float] = {}
        need: dict[str, float] = {}
        capacity: dict[str, float] = {}
        for pool in self.topology.prfaas:
            name = f"prfaas/{pool.name}"
            capacity[name], need[name] = setting.prfaas.get(pool.name, pool.instances), 0.0
        for line, rate in self.topology.lines.items():
            capacity[f"line/{line}"], need[f"line/{line}"] = rate, 0.0
        for pd in self.topology.pd:
            split = setting.splits[pd.name]
            capacity[f"prefill/{pd.name}"], need[f"prefill/{pd.name}"] = split.prefill, 0.0
            capacity[f"decode/{pd.name}"], need[f"decode/{pd.name}"] = split.decode, 0.0
        long_count = long_tokens = short_count = short_tokens = gbit = 0.0
        for part in parts:
            pd = self.topology.pd_pool(part.pd)
            n, m = part.share * self.count(part.lo, part.hi), part.share * self.tokens(part.lo, part.hi)
            need[f"decode/{pd.name}"] += n / self.decode_rate(pd)
            server: PrfaaSPool | PDPool = pd
            name = f"prefill/{pd.name}"
            if part.link is not None:
                link = links[part.link]
                server, name = self.topology.pool(link.prfaas), f"prfaas/{link.prfaas}"
                bits = part.share * self.gbit(server).over(part.lo, part.hi)
                need[f"line/{link.line_name}"] += bits
                gbit += bits
                long_count, long_tokens = long_count + n, long_tokens + m
            else:
                short_count, short_tokens = short_count + n, short_tokens + m
            if self.service_time == "mean":
                need[name] += part.share * self.work(server).over(part.lo, part.hi)
            else:
                count[name], tokens[name] = count.get(name, 0.0) + n, tokens.get(name, 0.0) + m
        if self.service_time == "representative":
            pools: list[PrfaaSPool | PDPool] = [*self.topology.prfaas, *self.topology.pd]
            for server in pools:
                name = f"{'prfaas' if isinstance(server, PrfaaSPool) else 'prefill'}/{server.name}"
                if count.get(name, 0.0) > 0:
                    need[name] = count[name] * self.curve(server)(tokens[name] / count[name])
        return Loads(
            need=need,
            capacity=capacity,
            offload_share=long_count,
            mean_long=long_tokens / long_count if long_count > 1e-12 else 0.0,
            mean_short=short_tokens / short_count if short_count > 1e-12 else 0.0,
            gbit=gbit,
        )


def populations(links: list[Link]) -> list[tuple[float, tuple[Link, ...]]]:
    """Shares of requests by the links they may take; who may take one link may also take any with more allowance."""
    found: list[tuple[float, tuple[Link, ...]]] = []
    below = 0.0
    for level in sorted({link.allowance for link in links} | {1.0}):
        if level > below:
            found.append((level - below, tuple(link for link in links if link.allowance >= level)))
            below = level
    return found


def _ratio(capacity: float, need: float) -> float:
    return capacity / need if need > 1e-15 else math.inf  # below is what cancellation leaves of nothing


def _check(setting: Setting, topology: Topology) -> None:
    for pd in topology.pd:
        split = setting.splits.get(pd.name)
        if split is None:
            raise PlanError(f"setting.splits.{pd.name}", "is missing: how many instances prefill and decode")
        _check_split(pd, split)
    for link in setting.thresholds:
        if link not in {each.name for each in topology.links}:
            raise PlanError(f"setting.thresholds.{link}", "there is no such link")


def _check_split(pd: PDPool, split: Split) -> None:
    if min(split.prefill, split.decode) < 0 or split.prefill + split.decode > pd.instances:
        raise PlanError(
            f"setting.splits.{pd.name}",
            f"{split.prefill} prefill and {split.decode} decode instances are not a part of {pd.instances}",
        )
