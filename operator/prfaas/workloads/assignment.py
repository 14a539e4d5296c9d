"""Which engine instance does what next: stateless arithmetic over what is observed.

An instance has a stable name, `<cluster>-<index>`, and is its own child object, so a step can name its victim.

 1. Wanted is a count per role and a template revision per role; observed is the list of children.
 2. Surplus children go. Those that a person or the controller marked go first; then those of the role that has too
    many, not ready before ready (no capacity is lost), highest index first.
 3. A role that lacks instances takes them from the role that has too many: the same child is converted in place, into
    the room that it leaves itself. What is still lacking is created under the lowest free indices.
 4. A child whose revision is not that of its role is rolled: the same child gets the new template.
 5. Conversions and rolls make an instance unavailable. At most `max_unavailable` instances may be unavailable at once;
    an instance that is not ready already costs nothing. The rest waits for a later step, conversions before rolls.
 6. With a `Pairing` no step takes from the pool what it can do (`pairing.py`): the role of which the smaller part has
    the wanted key goes first, and a single decode instance changes its role with a prefill instance, so that the
    old one serves until the new one does.

Every reconcile takes one such step from what it sees and forgets it: there is no plan to resume after a crash, and
running it on a settled pool gives no action. A mark never changes how many instances there are: that is the spec's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.api import labels
from prfaas.workloads.pairing import Ability, Member, Pairing

Role = str
"""`prefill` or `decode`."""


@dataclass(frozen=True)
class Observed:
    """One child as the API server shows it. `role` and `revision` are those of its pod template: what really runs."""

    name: str
    index: int
    role: Role
    revision: str
    ready: bool
    key: str = ""
    """Compatibility key of its pod template."""
    marked: bool = False
    """The child carries the annotation that chooses it as the next victim."""
    going: bool = False
    """The child is being deleted: it no longer counts, but its name is not free yet."""


@dataclass(frozen=True)
class Wanted:
    """How many instances of each role, and the revision that each role's template has now."""

    counts: Mapping[Role, int]
    revisions: Mapping[Role, str]

    @property
    def total(self) -> int:
        """Instances over all roles."""
        return sum(self.counts.values())


class Cause(StrEnum):
    """Why a child waits for a later step."""

    BUDGET = "Budget"
    """As many instances as may be are out of service."""
    GROUP = "Group"
    """The pool could do less without it until another instance here is ready."""
    PEER = "Peer"
    """The same, until a peer has an instance ready."""
    MODEL = "Model"
    """The model is not on disk yet."""


@dataclass(frozen=True)
class Hold:
    """Why a child waits, and for which links' other ends."""

    cause: Cause
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """What to do now. The sets are disjoint; `held` are children that wait for a later step and stay untouched."""

    delete: tuple[str, ...] = ()
    create: Mapping[str, Role] = field(default_factory=dict)
    convert: Mapping[str, Role] = field(default_factory=dict)
    roll: Mapping[str, Role] = field(default_factory=dict)
    keep: Mapping[str, Role] = field(default_factory=dict)
    held: Mapping[str, Hold] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    """Compatibility keys that children had before the step."""

    @property
    def settled(self) -> bool:
        """True when nothing is left to do."""
        return not (self.delete or self.create or self.convert or self.roll or self.held)

    @property
    def only_rolls(self) -> bool:
        """True when instances are changed where they are, and none is added or removed."""
        return not (self.delete or self.create)

    @property
    def apply(self) -> dict[str, Role]:
        """Children whose wanted object is to be applied, with the role to render them for."""
        return {**self.keep, **self.roll, **self.convert, **self.create}


def instance_name(cluster: str, index: int) -> str:
    """Name of the child (and value of its instance label)."""
    return f"{cluster}-{index}"


def instance_index(cluster: str, name: str) -> int | None:
    """The index in an instance's name; None when the name is not one of this cluster's instances."""
    prefix, _, digits = name.rpartition("-")
    if prefix != cluster or not digits.isdecimal() or digits != str(int(digits)):
        return None
    return int(digits)


def plan(
    cluster: str,
    observed: Sequence[Observed],
    wanted: Wanted,
    max_unavailable: int,
    *,
    pairing: Pairing | None = None,
    hold: bool = False,
) -> Step:
    """The next step of this pool. Raises ValueError for two children of one name or a negative count.

    Without a `pairing` only the budget bounds a step. `hold`: no child is converted or rolled.
    """
    if len({child.name for child in observed}) != len(observed):
        raise ValueError("two children with one name")
    if any(count < 0 for count in wanted.counts.values()):
        raise ValueError("a negative count of instances")

    present = sorted((child for child in observed if not child.going), key=lambda child: child.index)
    victims = _victims(present, wanted, pairing)
    stay = [child for child in present if child not in victims]
    lacking = _lacking(stay, wanted)
    moves = _conversions(stay, wanted, lacking)
    create = _creations(cluster, observed, lacking, moves)
    if pairing is not None and not (moves or create):
        moves = _exchange(stay, wanted)

    changes = [(child, moves[child.name]) for child in stay if child.name in moves]
    rest = [child for child in stay if child.name not in moves]
    outdated = [child for child in rest if child.revision != wanted.revisions[child.role]]
    changes += [(child, child.role) for child in _in_turn(outdated, stay, pairing)]
    if hold:
        chosen: dict[str, Role] = {}
        held = {child.name: Hold(Cause.MODEL) for child, _ in changes}
    else:
        alone = not (victims or create)
        chosen, held = _choose(changes, stay, max_unavailable, pairing, wanted.total, alone=alone)
    return Step(
        delete=tuple(child.name for child in victims),
        create=create,
        convert={name: role for name, role in chosen.items() if name in moves},
        roll={name: role for name, role in chosen.items() if name not in moves},
        keep={child.name: child.role for child in rest if child not in outdated},
        held=held,
        keys=frozenset(child.key for child in observed if child.key),
    )


Change = tuple[Observed, Role]
"""A child, and the role that it has afterwards."""


def _choose(
    changes: Sequence[Change],
    stay: Sequence[Observed],
    max_unavailable: int,
    pairing: Pairing | None,
    total: int,
    *,
    alone: bool,
) -> tuple[dict[str, Role], dict[str, Hold]]:
    """Which changes are made now, and why the others wait. `alone`: nothing else is on its way in this step."""
    left = max_unavailable - sum(not child.ready for child in stay)
    ready = _ready(stay)
    chosen: dict[str, Role] = {}
    held: dict[str, Hold] = {}
    losses: list[tuple[Change, frozenset[Ability]]] = []
    for child, role in changes:
        if not child.ready:
            chosen[child.name] = role
        elif left < 1:
            held[child.name] = Hold(Cause.BUDGET)
        elif pairing is not None and (lost := _lost(ready, child, pairing)):
            peers = pairing.peers(lost, ready, total)
            held[child.name] = Hold(Cause.PEER if peers else Cause.GROUP, peers)
            losses.append(((child, role), lost))
        else:
            chosen[child.name] = role
            ready -= Counter([_member(child)])
            left -= 1
    if pairing is not None and alone and not chosen and all(child.ready for child in stay):
        spared = _bearable(losses, ready, pairing, total)
        if spared is not None:
            child, role = spared
            del held[child.name]
            chosen[child.name] = role
            held |= {name: Hold(Cause.BUDGET) for name, why in held.items() if why.cause is Cause.GROUP}
    return chosen, held


def _bearable(
    losses: Sequence[tuple[Change, frozenset[Ability]]], ready: Counter[Member], pairing: Pairing, total: int
) -> Change | None:
    """Of the changes that all take something, the one to make; None: each is to wait."""
    before = pairing.abilities(ready)

    def not_made_good(change: Change) -> bool:
        child, role = change
        after = ready - Counter([_member(child)])
        return not before <= pairing.abilities([*after, Member(role, pairing.key)])

    fit = [change for change, lost in losses if pairing.bearable(lost, ready, total)]
    return min(fit, key=not_made_good, default=None)


def _ready(children: Iterable[Observed]) -> Counter[Member]:
    return Counter(_member(child) for child in children if child.ready)


def _lost(ready: Counter[Member], child: Observed, pairing: Pairing | None) -> frozenset[Ability]:
    """What the pool could not do without this child: nothing, as long as there is another of its role and key."""
    member = _member(child)
    if pairing is None or not child.ready or ready[member] > 1:
        return frozenset()
    return pairing.abilities(ready) - pairing.abilities(ready.keys() - {member})


def _member(child: Observed) -> Member:
    return Member(child.role, child.key)


def _in_turn(outdated: Sequence[Observed], stay: Sequence[Observed], pairing: Pairing | None) -> list[Observed]:
    """In which order children are rolled: so that the new group becomes whole soon, and both grow and shrink evenly."""
    if pairing is None:
        return list(outdated)

    there = Counter(child.role for child in stay)
    new = Counter(child.role for child in stay if child.key == pairing.key)
    done = {role: new[role] / count for role, count in there.items()}
    return sorted(outdated, key=lambda child: (child.key == pairing.key, done[child.role], child.index))


def _exchange(stay: Sequence[Observed], wanted: Wanted) -> dict[str, Role]:
    """A single decode instance that is to be rolled goes on serving: a prefill instance becomes the new one first.

    The next steps see one decode instance too many and convert the old one.
    """
    decode = [child for child in stay if child.role == labels.ROLE_DECODE]
    donors = [child for child in stay if child.role == labels.ROLE_PREFILL]
    if wanted.counts.get(labels.ROLE_DECODE) != 1 or len(decode) != 1 or not donors:
        return {}
    (single,) = decode
    if not single.ready or single.revision == wanted.revisions[single.role]:
        return {}
    donors.sort(key=lambda child: (child.revision == wanted.revisions[child.role], *_expendable(child)))
    return {donors[0].name: labels.ROLE_DECODE}


def _expendable(child: Observed) -> tuple[bool, int]:
    """Sort key: the child whose loss costs least comes first."""
    return child.ready, -child.index


def _victims(observed: Sequence[Observed], wanted: Wanted, pairing: Pairing | None) -> list[Observed]:
    surplus = len(observed) - wanted.total
    if surplus <= 0:
        return []
    victims = sorted((child for child in observed if child.marked), key=_expendable)[:surplus]
    rest = [child for child in observed if child not in victims]
    for _ in range(surplus - len(victims)):
        ready = _ready(rest)
        excess = _excess(rest, wanted)
        role = max(sorted(excess), key=lambda name: excess[name])
        own = [child for child in rest if child.role == role]
        taken = {child.name: len(_lost(ready, child, pairing)) for child in own}
        victim = min(own, key=lambda child: (child.ready, taken[child.name], -child.index))
        victims.append(victim)
        rest.remove(victim)
    return victims


def _excess(children: Iterable[Observed], wanted: Wanted) -> dict[Role, int]:
    have: dict[Role, int] = {}
    for child in children:
        have[child.role] = have.get(child.role, 0) + 1
    return {role: count - wanted.counts.get(role, 0) for role, count in have.items()}


def _lacking(stay: Sequence[Observed], wanted: Wanted) -> dict[Role, int]:
    return {
        role: max(0, count - sum(child.role == role for child in stay)) for role, count in sorted(wanted.counts.items())
    }


def _conversions(stay: Sequence[Observed], wanted: Wanted, lacking: Mapping[Role, int]) -> dict[str, Role]:
    """Which children change role: from the roles with too many, those that must be rolled anyway first."""
    donors: list[Observed] = []
    for role, excess in sorted(_excess(stay, wanted).items()):
        own = [child for child in stay if child.role == role]
        own.sort(key=lambda child: (child.revision == wanted.revisions.get(child.role), *_expendable(child)))
        donors += own[: max(0, excess)]
    takers = [role for role, count in lacking.items() for _ in range(count)]
    return {child.name: role for child, role in zip(donors, takers, strict=False)}


def _creations(
    cluster: str, observed: Sequence[Observed], lacking: Mapping[Role, int], moves: Mapping[str, Role]
) -> dict[str, Role]:
    """New instances under the lowest indices that no child holds; one being deleted still holds its own."""
    taken = {child.index for child in observed}
    free = (index for index in range(len(taken) + sum(lacking.values())) if index not in taken)
    created: dict[str, Role] = {}
    for role, count in lacking.items():
        for _ in range(count - sum(target == role for target in moves.values())):
            created[instance_name(cluster, next(free))] = role
    return created
