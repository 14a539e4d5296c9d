"""Plans for any number of pools: near the relaxation's optimum, and with the distance to it stated.

    1. relax        the linear program of `relaxation`: an upper bound, Np not whole, requests divided at will
    2. thresholds   per PD pool, places in the order of the mean length they got; thresholds at the quantiles that give
                    each place the share it got. Where the relaxation itself divides by intervals, nothing changes.
    3. climb        sequential linear programs: rates and thresholds together, linear around the present point, within
                    a trust region that shrinks when a step brings nothing
    4. exchange     two links of a pool change places: the mean length does not always say which gets the longer prompts
    5. branch       on the sum of Np over pools of one profile where that is not whole, else on the Np that is furthest
                    from whole; best bound first, until the best plan is within `GAP`. Without the sums, pools that are
                    alike would be tried in every order.

`representative` has P T(E[L | class]) in place of E[T(L)]: the relaxation then runs on the lines that touch T from
below at the class means of the plan in hand, and once more when those have moved. Each of its bounds is valid by
itself, but with several PrfaaS pools it can stay a per cent or two above: to give two pools the same mean length is
cheaper on paper than to give each an interval, and few thresholds do that. E[T(L)] knows no such gain.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from prfaas.planner.errors import PlanError
from prfaas.planner.relaxation import Box, Relaxation, Relaxed, resource_of, supporting_lines
from prfaas.planner.setting import Setting, Split
from prfaas.planner.simplex import LinearProgram
from prfaas.planner.throughput import Model, Part
from prfaas.planner.topology import PDPool

GAP = 0.002
NODES = 60
"""Boxes looked at, at most; with `representative` `ROUGH`, as every round begins anew."""
ROUGH = 8
STEPS = 30
REACH = 0.1, 0.5
"""How far a threshold may move in one step, relatively: at first, and at most."""


@dataclass(frozen=True)
class Found:
    """The best setting, what it serves, and a bound on what any setting serves, requests/s."""

    setting: Setting
    rate: float
    bound: float
    second: Setting | None = None
    """The best one with other splits that was met on the way."""


def search(model: Model, gap: float = GAP) -> Found:
    """The best setting for the model's topology, within `gap` of the bound unless `NODES` boxes do not suffice.

    Raises PlanError where no PD pool with demand has an instance, or one with demand has none.
    """
    for pd in model.topology.pd:
        if pd.demand and not pd.instances:
            raise PlanError(f"pd.{pd.name}.instances", "there is demand, but no instance")
    if not any(pd.instances and pd.demand != 0 for pd in model.topology.pd):
        raise PlanError("topology", "serves nothing: no PD pool with demand has an instance")
    if model.service_time == "mean":
        return _branch(Relaxation(model), gap, [], NODES)
    best: Found | None = None
    means: dict[str, float] = {}
    for _ in range(3):
        relaxation = Relaxation(model, supporting_lines(model, means))
        known = [] if best is None else [best.setting]
        found = _branch(relaxation, gap, known, ROUGH)
        bound = found.bound if best is None else min(best.bound, found.bound)
        if best is None or found.rate > best.rate:
            best = found
        best = replace(best, bound=max(bound, best.rate))
        means = class_means(model, best.setting)
        if best.bound <= best.rate * (1 + gap):
            break
    assert best is not None
    return best


def class_means(model: Model, setting: Setting) -> dict[str, float]:
    """Mean length of what each pool prefills, tokens, by resource."""
    sums: dict[str, list[float]] = {}
    links = {link.name: link for link in model.topology.links}
    for part in model.parts(setting):
        name = f"prefill/{part.pd}" if part.link is None else f"prfaas/{links[part.link].prfaas}"
        found = sums.setdefault(name, [0.0, 0.0])
        found[0] += part.share * model.count(part.lo, part.hi)
        found[1] += part.share * model.tokens(part.lo, part.hi)
    return {name: tokens / count for name, (count, tokens) in sums.items() if count > 1e-9}


def _branch(relaxation: Relaxation, gap: float, known: list[Setting], nodes: int) -> Found:
    model = relaxation.model
    tried: dict[tuple[int, ...], tuple[float, Setting]] = {}
    for setting in known:
        _keep(tried, setting, model.loads(setting).lambda_max)
    start = Box(
        {pd.name: pd.splits()[0] if pd.instances else 0 for pd in model.topology.pd},
        {pd.name: pd.splits()[-1] if pd.instances else 0 for pd in model.topology.pd},
    )
    groups = _groups(model)
    relaxed = relaxation.solve(start)
    serial = 0
    queue: list[tuple[float, int, Box, Relaxed]] = [(-relaxed.bound, serial, start, relaxed)]
    settled = 0.0
    while queue:
        negative, _, box, relaxed = heapq.heappop(queue)
        best = max((rate for rate, _ in tried.values()), default=0.0)
        if tried and (-negative <= best * (1 + gap) or serial >= nodes):
            heapq.heappush(queue, (negative, serial + 1, box, relaxed))
            break
        children = _children(box, relaxed, groups)
        splits = {name: _whole(box, name, value) for name, value in relaxed.prefill.items()}
        key = tuple(splits.values())
        if key not in tried or not children:  # where all is whole, the division found is the best for these splits
            setting, rate = climb(relaxation, _setting(model, relaxed, splits))
            _keep(tried, setting, rate, key)
        if not children:
            settled = max(settled, -negative)
        for child in children:
            serial += 1
            solved = relaxation.solve(child)
            heapq.heappush(queue, (-min(-negative, solved.bound), serial, child, solved))
    rate, setting = max(tried.values(), key=lambda each: each[0])
    bound = max([rate, settled, *(-negative for negative, *_ in queue)])
    if rate < bound * (1 - gap):
        for other in _exchanged(model, setting):
            better, reached = climb(relaxation, other)
            if reached > rate:
                setting, rate = better, reached
    others = sorted((each for each in tried.values() if each[1].splits != setting.splits), key=lambda each: -each[0])
    return Found(setting, rate, bound, others[0][1] if others else None)


def _groups(model: Model) -> list[tuple[str, ...]]:
    """PD pools that do the same with an instance, where there are several."""
    found: list[list[PDPool]] = []
    for pd in model.topology.pd:
        alike = next((group for group in found if group[0].profile == pd.profile), None)
        if alike is None:
            found.append([pd])
        else:
            alike.append(pd)
    return [tuple(pd.name for pd in group) for group in found if len(group) > 1]


def _children(box: Box, relaxed: Relaxed, groups: list[tuple[str, ...]]) -> list[Box]:
    """The box cut in two where something is not whole; none if all is."""
    for group in groups:
        total = sum(relaxed.prefill.get(name, 0.0) for name in group)
        if abs(total - round(total)) > 1e-6:
            below = math.floor(total)
            return [
                replace(box, most={**box.most, group: below}),
                replace(box, least={**box.least, group: below + 1}),
            ]
    name = max(relaxed.prefill, key=lambda each: abs(relaxed.prefill[each] - round(relaxed.prefill[each])))
    value = relaxed.prefill[name]
    if abs(value - round(value)) <= 1e-6:
        return []
    return [
        replace(box, high={**box.high, name: math.floor(value)}),
        replace(box, low={**box.low, name: math.floor(value) + 1}),
    ]


def _keep(
    tried: dict[tuple[int, ...], tuple[float, Setting]], setting: Setting, rate: float, key: tuple[int, ...] = ()
) -> None:
    key = key or tuple(split.prefill for split in setting.splits.values())
    if key not in tried or rate > tried[key][0]:
        tried[key] = rate, setting


def _exchanged(model: Model, setting: Setting) -> Iterator[Setting]:
    """The setting with the thresholds of two neighbouring links of one pool exchanged."""
    for pd in model.topology.pd:
        mine = [link.name for link in model.topology.links_of(pd.name) if link.name in setting.thresholds]
        for one, other in pairwise(sorted(mine, key=lambda name: setting.thresholds[name])):
            cuts = {one: setting.thresholds[other], other: setting.thresholds[one]}
            cuts = {name: held(model, name, t) for name, t in cuts.items()}
            yield replace(setting, thresholds={**setting.thresholds, **cuts})


def _whole(box: Box, name: str, value: float) -> int:
    return min(max(round(value), box.low[name]), box.high[name])


def _setting(model: Model, relaxed: Relaxed, splits: Mapping[str, int]) -> Setting:
    """Thresholds that give each place of each pool the share that it has in the relaxation."""
    total = sum(relaxed.rates.values())
    thresholds: dict[str, int] = {}
    for pd in model.topology.pd:
        masses = {p: m for p, m in relaxed.masses.get(pd.name, {}).items() if p is None or m > 1e-6}
        tokens = relaxed.tokens.get(pd.name, {})
        row = sorted((p for p in masses if p is not None), key=lambda p: (tokens[p] / masses[p], p))
        allowed = {link.name: link.allowance for link in model.topology.links_of(pd.name)}
        above = 0.0
        for place in reversed(row):
            above += masses[place] / allowed[place]
            cut = model.workload.quantile(max(0.0, 1 - above)) if above < 1 - 1e-9 else 0.0
            thresholds[place] = held(model, place, cut)
        for link in model.topology.links_of(pd.name):
            if link.max_threshold is not None and link.name not in thresholds:
                thresholds[link.name] = link.max_threshold
    return Setting(
        {pd.name: _split(pd, splits.get(pd.name)) for pd in model.topology.pd},
        thresholds,
        {name: rate / total for name, rate in relaxed.rates.items()}
        if total > 0
        else dict.fromkeys(relaxed.rates, 0.0),
    )


def _split(pd: PDPool, prefill: int | None) -> Split:
    """Of `prefill` instances; of the fewest where nothing comes to the pool."""
    if prefill is None:
        prefill = pd.splits()[0] if pd.instances else 0
    return Split(prefill, pd.instances - prefill)


def climb(relaxation: Relaxation, setting: Setting) -> tuple[Setting, float]:
    """The best nearby setting with the same splits: shares and thresholds moved together; and what it serves."""
    model = relaxation.model
    rate = model.loads(setting).lambda_max
    reach, most = REACH
    for _ in range(STEPS):
        if rate <= 0:
            break
        here = relaxation
        if model.service_time == "representative":
            here = Relaxation(model, supporting_lines(model, class_means(model, setting)))
        step = _step(here, setting, rate, reach)
        reached = model.loads(step).lambda_max
        if reached > rate * (1 + 1e-5):
            setting, rate, reach = step, reached, min(most, 2 * reach)
        elif reach < 2e-3:
            break
        else:
            reach /= 4
    return setting, rate


def marginal(relaxation: Relaxation, setting: Setting, rate: float) -> dict[str, float]:
    """What one more of each resource would add to the rate, at a setting that climbing cannot better."""
    step = _Step(relaxation, setting, rate, 1e-3)
    step.program.solve()
    return {n: rate * step.program.prices[i] / step.capacity[n] for i, n in enumerate(step.names)}


def _step(relaxation: Relaxation, setting: Setting, rate: float, reach: float) -> Setting:
    """One linear program: rates by pool, and moves of thresholds of at most `reach`, relatively."""
    step = _Step(relaxation, setting, rate, reach)
    step.program.solve()
    values = step.program.values
    thresholds = {name: float(t) for name, t in setting.thresholds.items()}
    for cut, width, column in step.moves:
        thresholds[cut] += width * values[column]
    whole = {name: held(relaxation.model, name, t) for name, t in thresholds.items()}
    shares = dict(setting.shares)
    total = sum(values[column] for column in step.rates)
    if len(step.rates) == len(step.pools) and total > 0:
        shares = {pd.name: values[column] / total for pd, column in zip(step.pools, step.rates, strict=True)}
    return replace(setting, thresholds=whole, shares=shares)


class _Step:
    """The linear program around a setting; rates are relative to its own, rows to the capacities."""

    def __init__(self, relaxation: Relaxation, setting: Setting, rate: float, reach: float) -> None:
        model = relaxation.model
        self.capacity = model.loads(setting).capacity
        self.names = [name for name in self.capacity if self.capacity[name] > 0]
        self.pools = [pd for pd in model.topology.pd if setting.shares.get(pd.name, 0.0) > 1e-9]
        cuts = [n for n in setting.thresholds if any(pd.name == _pd_of(model, n) for pd in self.pools)]
        self.program = LinearProgram([1.0] * (len(self.names) + len(cuts)))
        needs = {pd.name: _need(relaxation, setting, pd) for pd in self.pools}
        shares = {pd.name: setting.shares[pd.name] for pd in self.pools}
        if any(pd.demand is not None for pd in model.topology.pd):
            together: dict[str, float] = {}
            for name, need in needs.items():
                for resource, each in need.items():
                    together[resource] = together.get(resource, 0.0) + shares[name] * each
            self.rates = [self.program.add(1.0, self._entries(together, rate))]
        else:
            self.rates = [self.program.add(1.0, self._entries(needs[pd.name], rate)) for pd in self.pools]
        self.moves: list[tuple[str, float, int]] = []
        for index, cut in enumerate(cuts):
            pd = model.topology.pd_pool(_pd_of(model, cut))
            present = setting.thresholds[cut]
            span = model.workload.longest - model.workload.shortest
            width = max(8.0, reach * min(max(present, 0.02 * model.workload.longest), span))
            for sign in (1, -1):
                moved = replace(setting, thresholds={**setting.thresholds, cut: present + sign * round(width / 8)})
                slope = width / round(width / 8)
                changed = _need(relaxation, moved, pd)
                delta = {n: changed.get(n, 0.0) - needs[pd.name].get(n, 0.0) for n in {*changed, *needs[pd.name]}}
                entries = self._entries(delta, rate * shares[pd.name] * slope)
                entries[len(self.names) + index] = 1.0
                self.moves.append((cut, sign * width, self.program.add(0.0, entries)))

    def _entries(self, need: Mapping[str, float], rate: float) -> dict[int, float]:
        return {i: rate * need[n] / self.capacity[n] for i, n in enumerate(self.names) if need.get(n)}


def held(model: Model, link: str, threshold: float) -> int:
    """The threshold within the link's own bounds."""
    found = next(each for each in model.topology.links if each.name == link)
    most = math.ceil(model.workload.longest) if found.max_threshold is None else found.max_threshold
    # Nor beyond the lengths that occur: from there no small move changes anything, and climbing would stop.
    least = max(found.min_threshold, min(most, math.floor(model.workload.shortest)))
    return int(min(max(round(threshold), least), max(most, least)))


def _pd_of(model: Model, link: str) -> str:
    return next(each.pd for each in model.topology.links if each.name == link)


def _need(relaxation: Relaxation, setting: Setting, pd: PDPool) -> dict[str, float]:
    """What a request/s of one pool needs of each resource."""
    model = relaxation.model
    links = {link.name: link for link in model.topology.links}
    need = {f"decode/{pd.name}": 1 / model.decode_rate(pd)}
    alone = replace(setting, shares={pd.name: 1.0})
    part: Part
    for part in model.parts(alone):
        server = pd if part.link is None else model.topology.pool(links[part.link].prfaas)
        name = resource_of(server)
        need[name] = need.get(name, 0.0) + part.share * relaxation.seconds(server, part.lo, part.hi)
        if part.link is not None:
            line = f"line/{links[part.link].line_name}"
            need[line] = need.get(line, 0.0) + part.share * model.gbit(server).over(part.lo, part.hi)
    return need
