"""An upper bound for any number of pools, and the solution that it comes from.

Forget that instances are whole and that policies are thresholds: any division of any length between any places. That is
a linear program with one variable for every way to route a pool's requests, solved by column generation. With a price
on every resource the best way is known length by length: each goes where its price is lowest,

    price of length l at place d:   pi_d T_d(l) + beta_d S_d(l)          (local: no S)

and since T and S are polynomials by pieces the lengths at which the cheapest place changes are roots of quadratics, so
this is exact, not sampled. It is also why thresholds lose nothing where long prompts are what the other end is best at.
Any prices at all give a bound (weak duality):

    Lambda <= sum of price * capacity / cheapest price of a request

The larger side of the two is the sum over the pools' shares where the demand of each pool is given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from prfaas.planner.curve import Curve, Polynomial, evaluate, line, roots
from prfaas.planner.simplex import LinearProgram
from prfaas.planner.throughput import Model
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, kv_curve, seconds_curve
from prfaas.planner.workload import Segment

ROUNDS = 200
FORCE = 1.0
"""What an instance that is wanted is worth, in the program's unit: more than it can ever bring."""


@dataclass(frozen=True)
class Box:
    """Bounds on Np of every PD pool, and on their sums over alike pools: what branching narrows."""

    low: Mapping[str, int]
    high: Mapping[str, int]
    least: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """By group of pools: fewest prefill instances of all together."""
    most: Mapping[tuple[str, ...], int] = field(default_factory=dict)


@dataclass
class Way:
    """One way to route a pool's requests, and what a request/s of it needs of each resource."""

    pd: str
    masses: dict[str | None, float]
    """Share of the pool's requests by link; None: local."""
    tokens: dict[str | None, float]
    """The same, weighted with the length: E[L; link]."""
    need: dict[str, float]


@dataclass(frozen=True)
class Relaxed:
    """The optimum of the relaxation."""

    bound: float
    """No setting within the box serves more, requests/s."""
    prefill: Mapping[str, float]
    """Np by PD pool, not whole."""
    rates: Mapping[str, float]
    """Requests/s by PD pool."""
    masses: Mapping[str, Mapping[str | None, float]]
    """By PD pool: share of its requests by link."""
    tokens: Mapping[str, Mapping[str | None, float]]


@dataclass
class Relaxation:
    """The ways found so far, kept between boxes: they stay valid."""

    model: Model
    lines: Mapping[str, Curve] | None = None
    """`representative`: the line below T of each pool (by resource) that stands in for it; None: T itself."""
    ways: list[Way] = field(default_factory=list)

    def cost(self, pool: PrfaaSPool | PDPool, segment: Segment) -> Curve:
        """Seconds of the pool by uncached length."""
        if self.lines is not None:
            return self.lines[resource_of(pool)]
        return seconds_curve(pool.profile, segment.cached)

    def seconds(self, pool: PrfaaSPool | PDPool, lo: float, hi: float) -> float:
        """E[cost; lo < L <= hi]."""
        if self.lines is not None:
            intercept, slope = self.lines[resource_of(pool)].pieces[0]
            return intercept * self.model.count(lo, hi) + slope * self.model.tokens(lo, hi)
        return self.model.work(pool).over(lo, hi)

    def solve(self, box: Box) -> Relaxed:
        """The optimum within a box, and a bound that holds whatever the last decimals of the solution are."""
        master = _Master(self.model, box)
        for way in self.ways:
            master.add(way)
        if not self.ways:
            for pd in master.pools:
                for way in self._first(pd):
                    self.ways.append(way)
                    master.add(way)
        bound = float("inf")
        for _ in range(ROUNDS):
            master.program.solve()
            rate = master.value()
            prices = master.prices()
            cheapest = {}
            for pd in master.pools:
                cheapest[pd.name], way = self._cheapest(pd, prices)
                self.ways.append(way)
                master.add(way)
            bound = min(bound, master.bound(prices, cheapest))
            if bound <= rate * (1 + 1e-5) + 1e-12:
                break
        return master.read(self.ways, max(bound, rate))

    def _first(self, pd: PDPool) -> list[Way]:
        free: dict[str, float] = {}
        places = [None, *(link.name for link in self.model.topology.links_of(pd.name))]
        return [self._cheapest(pd, free, only=(place,))[1] for place in places]

    def _cheapest(
        self, pd: PDPool, prices: Mapping[str, float], only: tuple[str | None] | None = None
    ) -> tuple[float, Way]:
        """The price of the cheapest way to serve a request of the pool, and that way. `only`: one place, if allowed."""
        topology = self.model.topology
        way = Way(pd.name, {}, {}, {})
        decode = 1 / self.model.decode_rate(pd)
        way.need[f"decode/{pd.name}"] = decode
        total = prices.get(f"decode/{pd.name}", 0.0) * decode
        segments = self.model.workload.segments
        alike = self.lines is not None or all(s.cached == segments[0].cached for s in segments)
        if alike:
            segments = (Segment(segments[0].lo, segments[-1].hi, 1.0, segments[0].cached),)
        for weight, links in self.model.populations(pd):
            below = -1.0
            for segment in segments:
                for low, high, there in _ranges(links, below, segment.hi):
                    if only is not None:
                        there = tuple(each for each in there if (each and each.name) in only) or there[:1]
                    places = [(link, pd if link is None else topology.pool(link.prfaas)) for link in there]
                    costs = [self._priced(pool, segment, link, prices) for link, pool in places]
                    for lo, hi, index in envelope(costs, low, high, at_zero=segment.lo):
                        total += self._assign(way, weight, *places[index], lo, hi, prices)
                below = segment.hi
        return total, way

    def _priced(
        self, pool: PrfaaSPool | PDPool, segment: Segment, link: Link | None, prices: Mapping[str, float]
    ) -> Curve:
        """pi T(l) + beta S(l)."""
        cost = self.cost(pool, segment).times(prices.get(resource_of(pool), 0.0))
        if link is not None and (price := prices.get(f"line/{link.line_name}", 0.0)) > 0:
            cost = cost.plus(kv_curve(pool.profile).times(price))
        return cost

    def _assign(
        self,
        way: Way,
        weight: float,
        link: Link | None,
        pool: PrfaaSPool | PDPool,
        lo: float,
        hi: float,
        prices: Mapping[str, float],
    ) -> float:
        """Send lengths in (lo, hi] there, and say what that costs."""
        name = None if link is None else link.name
        way.masses[name] = way.masses.get(name, 0.0) + weight * self.model.count(lo, hi)
        way.tokens[name] = way.tokens.get(name, 0.0) + weight * self.model.tokens(lo, hi)
        need = {resource_of(pool): weight * self.seconds(pool, lo, hi)}
        if link is not None:
            need[f"line/{link.line_name}"] = weight * self.model.gbit(pool).over(lo, hi)
        for key, amount in need.items():
            way.need[key] = way.need.get(key, 0.0) + amount
        return sum(prices.get(key, 0.0) * amount for key, amount in need.items())


class _Master:
    """The linear program over the ways found: rows are resources as shares of their capacity."""

    def __init__(self, model: Model, box: Box) -> None:
        topology = model.topology
        self.box = box
        self.groups: dict[tuple[str, ...], tuple[int, int]] = {}
        self.demand = {pd.name: pd.demand for pd in topology.pd}
        given = sum(value for value in self.demand.values() if value is not None)
        self.shares = None if given <= 0 else {name: (value or 0.0) / given for name, value in self.demand.items()}
        self.pools = [pd for pd in topology.pd if pd.instances and (self.shares is None or self.shares[pd.name] > 0)]
        self.capacity: dict[str, float] = {}
        for pool in topology.prfaas:
            self.capacity[f"prfaas/{pool.name}"] = pool.instances
        for name, rate in topology.lines.items():
            self.capacity[f"line/{name}"] = rate
        for pd in self.pools:
            self.capacity[f"prefill/{pd.name}"] = box.low[pd.name]
            self.capacity[f"decode/{pd.name}"] = pd.instances - box.low[pd.name]
            self.capacity[f"move/{pd.name}"] = box.high[pd.name] - box.low[pd.name]
        names = [*self.capacity, *(f"share/{pd.name}" for pd in self.pools if self.shares is not None)]
        for group in sorted({*box.least, *box.most}):
            room = sum(box.low[name] for name in group)
            most = box.most.get(group, sum(box.high[name] for name in group))
            self.groups[group] = max(0, box.least.get(group, 0) - room), max(0, most - room)
            names += [f"most/{group}", f"least/{group}", f"wanted/{group}"]
        self.row = {name: index for index, name in enumerate(names)}
        # Rates are in units of what all decode instances could do, so that all entries are of about one size.
        self.unit = sum(min(1e6, model.decode_rate(pd)) * pd.instances for pd in self.pools) or 1.0
        self.scale = {name: max(1.0, value) for name, value in self.capacity.items()}
        bounds = [self.capacity.get(name, 0.0) / self.scale.get(name, 1.0) for name in names]
        for group, (least, most) in self.groups.items():
            bounds[self.row[f"most/{group}"]], bounds[self.row[f"wanted/{group}"]] = most, least
        self.program = LinearProgram(bounds)
        self.moves: dict[str, int] = {}
        for pd in self.pools:
            keys = f"prefill/{pd.name}", f"decode/{pd.name}", f"move/{pd.name}"
            signs = zip(keys, (-1.0, 1.0, 1.0), strict=True)
            entries = {self.row[key]: sign / self.scale[key] for key, sign in signs}
            for group in self.groups:
                if pd.name in group:
                    entries |= {self.row[f"most/{group}"]: 1.0, self.row[f"least/{group}"]: -1.0}
            self.moves[pd.name] = self.program.add(0.0, entries)
        # `sum of moves >= least` is a row whose bound would be below 0: instead each unit up to it is worth `FORCE`.
        for group in self.groups:
            self.program.add(FORCE, {self.row[f"least/{group}"]: 1.0, self.row[f"wanted/{group}"]: 1.0})
        self.rate = None
        if self.shares is not None:
            self.rate = self.program.add(1.0, {self.row[f"share/{pd.name}"]: self.shares[pd.name] for pd in self.pools})
        self.columns: list[int] = []

    def add(self, way: Way) -> None:
        """One more way."""
        entries = {self.row[name]: need * self.unit / self.scale[name] for name, need in way.need.items() if need}
        if self.shares is not None:
            entries[self.row[f"share/{way.pd}"]] = -1.0
        self.columns.append(self.program.add(1.0 if self.shares is None else 0.0, entries))

    def prices(self) -> dict[str, float]:
        """Of each resource, requests/s (in units) per unit of it."""
        found = self.program.prices
        return {name: found[row] / self.scale.get(name, 1.0) for name, row in self.row.items()}

    def value(self) -> float:
        """The rate of the solution, in units."""
        return self.program.value - sum(FORCE * least for least, _ in self.groups.values())

    def bound(self, prices: Mapping[str, float], cheapest: Mapping[str, float]) -> float:
        """Weak duality at these prices: in the program's unit, to compare with its value."""
        if self.shares is None:
            price = min(cheapest.values(), default=0.0)
        else:
            price = sum(self.shares[name] * each for name, each in cheapest.items())
        if price <= 0:
            return float("inf")
        factor = 1 / (price * self.unit)  # so that no way of serving a request is worth more than it costs
        at = {name: factor * each for name, each in prices.items()}
        value = sum(at[name] * self.capacity[name] for name in self.capacity if not name.startswith("move/"))
        for pd in self.pools:
            gain = at[f"prefill/{pd.name}"] - at[f"decode/{pd.name}"]
            for group in self.groups:
                if pd.name in group:
                    gain += at[f"least/{group}"] - at[f"most/{group}"]
            value += self.capacity[f"move/{pd.name}"] * max(0.0, gain)
        for group, (least, most) in self.groups.items():
            value += at[f"most/{group}"] * most + least * (max(0.0, FORCE - at[f"least/{group}"]) - FORCE)
        return value

    def read(self, ways: Sequence[Way], bound: float) -> Relaxed:
        """The solution in requests/s."""
        values = self.program.values
        rates = {pd.name: 0.0 for pd in self.pools}
        masses: dict[str, dict[str | None, float]] = {pd.name: {} for pd in self.pools}
        tokens: dict[str, dict[str | None, float]] = {pd.name: {} for pd in self.pools}
        for way, column in zip(ways, self.columns, strict=True):
            amount = values[column] * self.unit
            if amount <= 0:
                continue
            rates[way.pd] += amount
            for place, mass in way.masses.items():
                masses[way.pd][place] = masses[way.pd].get(place, 0.0) + amount * mass
                tokens[way.pd][place] = tokens[way.pd].get(place, 0.0) + amount * way.tokens[place]
        for name, rate in rates.items():
            if rate > 0:
                masses[name] = {place: mass / rate for place, mass in masses[name].items()}
                tokens[name] = {place: each / rate for place, each in tokens[name].items()}
        prefill = {pd.name: self.box.low[pd.name] + values[self.moves[pd.name]] for pd in self.pools}
        return Relaxed(bound * self.unit, prefill, rates, masses, tokens)


def _ranges(links: Sequence[Link], lo: float, hi: float) -> Iterator[tuple[float, float, tuple[Link | None, ...]]]:
    """(lo, hi] cut where a link's bounds begin or end, each part with the places that some threshold can send it to.

    At or below a link's lowest threshold nothing goes over it; above its highest, something else than local happens.
    """
    bounds = {float(b) for link in links for b in (link.min_threshold, link.max_threshold) if b is not None}
    edges = [lo, *sorted(b for b in bounds if lo < b < hi), hi]
    for a, b in pairwise(edges):
        over = [link for link in links if link.min_threshold <= a or link.min_threshold <= 0]
        forced = any(
            link.max_threshold is not None and max(link.max_threshold, link.min_threshold) <= a for link in links
        )
        yield a, b, tuple(over) if forced else (None, *over)


def resource_of(pool: PrfaaSPool | PDPool) -> str:
    """The resource that a prefill by the pool takes."""
    return f"{'prfaas' if isinstance(pool, PrfaaSPool) else 'prefill'}/{pool.name}"


def envelope(costs: Sequence[Curve], lo: float, hi: float, at_zero: float = 0.0) -> list[tuple[float, float, int]]:
    """Which function is lowest where on (lo, hi]: (from, to, index) in rising order; of equals the first.

    `at_zero`: the first length that occurs, which starts the first piece (whatever lies below it does not matter).
    """
    if len(costs) == 1:
        return [(lo, hi, 0)]
    begin = max(lo, at_zero)
    cuts = sorted({begin, *(s for cost in costs for s in cost.starts if begin < s < hi)})
    found: list[tuple[float, float, int]] = []
    for index, start in enumerate(cuts):
        end = cuts[index + 1] if index + 1 < len(cuts) else hi
        pieces = [_piece(cost, start) for cost in costs]
        inside = {
            root
            for one, other in combinations(pieces, 2)
            for root in roots(_difference(one, other))
            if start < root < end
        }
        edges = [start, *sorted(inside), end]
        for a, b in pairwise(edges):
            middle = (a + b) / 2
            at = [evaluate(piece, middle) for piece in pieces]
            lowest = at.index(min(at))
            if found and found[-1][2] == lowest:
                found[-1] = (found[-1][0], b, lowest)
            else:
                found.append((a, b, lowest))
    if found:
        found[0] = (lo, found[0][1], found[0][2])
    return found


def supporting_lines(model: Model, means: Mapping[str, float]) -> dict[str, Curve]:
    """For `representative`: below each pool's T a line that touches it at the mean length of its class.

    P T(M / P) >= P line(M / P) = E[line(L); class], so a bound with these lines is one with T(E[L | class]) as well.
    """
    found = {}
    pools: list[PrfaaSPool | PDPool] = [*model.topology.prfaas, *model.topology.pd]
    lo, hi = model.workload.shortest, model.workload.longest
    for pool in pools:
        at = min(max(means.get(resource_of(pool), model.workload.mean()), lo), hi)
        curve = model.curve(pool)
        found[resource_of(pool)] = _line_below(curve, at, lo, hi)
    return found


def _line_below(curve: Curve, at: float, lo: float, hi: float) -> Curve:
    """A line that touches the curve from below at `at`, or as near to it as leaves the shortest prompts some cost.

    A line that is negative there would make a class of short prompts a gain, and the linear program has no bound then.
    """
    while at - lo > 1:
        found = curve.supporting_line(at, lo, hi)
        if found(lo) > 0.01 * curve(lo):
            return found
        at = lo + (at - lo) / 2
    return line(curve(lo), 0.0)


def _piece(cost: Curve, start: float) -> Polynomial:
    return cost.pieces[max(0, bisect_right(cost.starts, start) - 1)]


def _difference(one: Polynomial, other: Polynomial) -> Polynomial:
    a, b = ((*p, 0.0, 0.0, 0.0)[:3] for p in (one, other))
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])
