"""What there is to serve with: remote prefill pools, PD pools, and the links between them. Rates are Gbit/s."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from prfaas.api.profile import Profile
from prfaas.planner.curve import Curve, line, prefill_curve
from prfaas.planner.errors import PlanError, number

GBIT = 1e9


@dataclass(frozen=True)
class PrfaaSPool:
    """A pool of remote prefill instances (a PrfaaSCluster)."""

    name: str
    profile: Profile
    instances: int
    gpu_price: float = 1.0
    """Price of one GPU, in any unit; only ratios count."""


@dataclass(frozen=True)
class PDPool:
    """A pool whose instances prefill (Np) or decode (Nd), Np + Nd = instances (a PDCluster)."""

    name: str
    profile: Profile
    instances: int
    min_prefill: int = 1
    max_prefill: int | None = None
    min_decode: int = 1
    max_decode: int | None = None
    rdma_gbps: float = 800.0
    """What a transfer from a prefill to a decode instance of the pool gets."""
    demand: float | None = None
    """This pool's part of all traffic, relative to the others'; None for all pools: the plan divides the traffic."""
    gpu_price: float = 1.0

    def splits(self) -> range:
        """Every Np that the bounds allow, rising; empty if there is none."""
        lowest = max(self.min_prefill, 0 if self.max_decode is None else self.instances - self.max_decode)
        highest = self.instances - self.min_decode
        if self.max_prefill is not None:
            highest = min(highest, self.max_prefill)
        return range(lowest, highest + 1)

    def decode_rate(self, output_tokens: float, context_tokens: float) -> float:
        """Requests/s that one decode instance completes: BS_max / (T_decode * L_out) (Eq. 5); inf for no output."""
        decode = self.profile.decode
        if output_tokens <= 0:
            return float("inf")
        step = decode.step_seconds(decode.max_batch, context_tokens)
        return decode.max_batch * decode.tokens_per_step / (step * output_tokens)


@dataclass(frozen=True)
class Link:
    """A link over which a PrfaaS pool prefills for a PD pool."""

    name: str
    prfaas: str
    pd: str
    capacity_gbps: float
    line: str | None = None
    """Physical line; links that name the same one share the smallest of their usable rates. None: a line of its own."""
    measured_gbps: float | None = None
    """What the line was measured to carry; None: not measured, the capacity counts."""
    flow_gbps: float | None = None
    """What one transfer gets at most; None: all of the line."""
    headroom: float = 0.0
    """Share of the rate kept free for loss, retransmission and bursts, 0 up to 1."""
    allowance: float = 1.0
    """Share of the requests that may leave over this link at all (residency); it does not depend on their length."""
    min_threshold: int = 0
    """Lowest threshold, tokens."""
    max_threshold: int | None = None
    """Highest threshold, tokens; None: the link need not be used."""

    @property
    def usable_gbps(self) -> float:
        """What the plan may fill on average."""
        rate = self.capacity_gbps if self.measured_gbps is None else min(self.capacity_gbps, self.measured_gbps)
        return rate * (1 - self.headroom)

    @property
    def transfer_gbps(self) -> float:
        """What a single transfer gets on an idle line."""
        rate = self.capacity_gbps if self.measured_gbps is None else min(self.capacity_gbps, self.measured_gbps)
        return rate if self.flow_gbps is None else min(rate, self.flow_gbps)

    @property
    def line_name(self) -> str:
        """The line, named."""
        return self.line if self.line is not None else f"link:{self.name}"


@dataclass(frozen=True)
class Topology:
    """Pools and links. Raises PlanError where names clash or lead nowhere, or a number is out of range."""

    prfaas: tuple[PrfaaSPool, ...]
    pd: tuple[PDPool, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        """Check what the optimiser relies on."""
        for field, names in (
            ("prfaas", [each.name for each in self.prfaas]),
            ("pd", [each.name for each in self.pd]),
            ("links", [each.name for each in self.links]),
        ):
            for name, times in Counter(names).items():
                if times > 1:
                    raise PlanError(field, f"the name {name!r} is there {times} times")
        if not self.pd:
            raise PlanError("pd", "there must be at least one PD pool: nothing else decodes")
        for index, pool in enumerate(self.prfaas):
            _check_pool(f"prfaas[{index}]", pool)
        for index, pd in enumerate(self.pd):
            _check_pd(f"pd[{index}]", pd)
        shares = [pd.demand for pd in self.pd]
        if any(s is None for s in shares) != all(s is None for s in shares):
            raise PlanError("pd", "demand must be given for every PD pool or for none")
        if all(s is not None for s in shares) and not sum(s for s in shares if s is not None) > 0:
            raise PlanError("pd", "demand must be above 0 for some PD pool")
        for index, link in enumerate(self.links):
            self._check_link(f"links[{index}]", link)
        for (prfaas, one), times in Counter((link.prfaas, link.pd) for link in self.links).items():
            if times > 1:
                raise PlanError("links", f"{prfaas} and {one} are joined {times} times: give one link")

    def _check_link(self, path: str, link: Link) -> None:
        known = ("prfaas", link.prfaas, {p.name for p in self.prfaas}), ("pd", link.pd, {p.name for p in self.pd})
        for field, name, names in known:
            if name not in names:
                raise PlanError(f"{path}.{field}", f"there is no pool {name!r}")
        number(f"{path}.capacityGbps", link.capacity_gbps, above=True, most=1e6)
        for field, value in (("measuredGbps", link.measured_gbps), ("flowGbps", link.flow_gbps)):
            if value is not None:
                number(f"{path}.{field}", value, above=True, most=1e6)
        number(f"{path}.headroom", link.headroom, most=0.99)
        number(f"{path}.allowance", link.allowance, most=1)
        number(f"{path}.minThreshold", link.min_threshold)
        if link.max_threshold is not None:
            number(f"{path}.maxThreshold", link.max_threshold, least=link.min_threshold)

    @property
    def lines(self) -> dict[str, float]:
        """Usable rate of every physical line, Gbit/s."""
        found: dict[str, float] = {}
        for link in self.links:
            found[link.line_name] = min(link.usable_gbps, found.get(link.line_name, float("inf")))
        return found

    def links_of(self, pd: str) -> list[Link]:
        """The links of a PD pool, in the order given."""
        return [link for link in self.links if link.pd == pd]

    def pool(self, name: str) -> PrfaaSPool:
        """The PrfaaS pool of that name."""
        return next(pool for pool in self.prfaas if pool.name == name)

    def pd_pool(self, name: str) -> PDPool:
        """The PD pool of that name."""
        return next(pool for pool in self.pd if pool.name == name)

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        pools: list[PrfaaSPool | PDPool] = [*self.prfaas, *self.pd]
        return sum(pool.instances * pool.profile.gpus for pool in pools)


def kv_curve(profile: Profile) -> Curve:
    """S(n) of n uncached tokens, Gbit: the state of the linear layers always crosses, rows only of new tokens."""
    gbit = profile.kv.scale * 8 / GBIT
    return line(profile.kv.fixed_bytes * gbit, profile.kv.bytes_per_token * gbit)


def seconds_curve(profile: Profile, cached: float = 0.0) -> Curve:
    """n -> T(n | cached) of the profile, seconds."""
    return prefill_curve(profile.prefill, cached)


def _check_pool(path: str, pool: PrfaaSPool | PDPool) -> None:
    number(f"{path}.instances", pool.instances, most=100_000)
    number(f"{path}.gpuPrice", pool.gpu_price, most=1e9)
    if seconds_curve(pool.profile)(0) <= 0:
        raise PlanError(f"{path}.profile.prefill", "a prefill must take some time at any length: T(0) is 0")


def _check_pd(path: str, pool: PDPool) -> None:
    _check_pool(path, pool)
    number(f"{path}.minPrefill", pool.min_prefill)
    number(f"{path}.minDecode", pool.min_decode)
    number(f"{path}.rdmaGbps", pool.rdma_gbps, above=True, most=1e6)
    if pool.demand is not None:
        number(f"{path}.demand", pool.demand)
    if pool.instances and not pool.splits():
        raise PlanError(
            f"{path}.instances",
            f"{pool.instances} cannot be divided into prefill and decode instances within the bounds",
        )
