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

Every reconcile takes one such step from what it sees and forgets it: there is no plan to resume after a crash, and
running it on a settled pool gives no action. A mark never changes how many instances there are: that is the spec's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Step:
    """What to do now. The sets are disjoint; `held` names children that wait for a later step and stay untouched."""

    delete: tuple[str, ...] = ()
    create: Mapping[str, Role] = field(default_factory=dict)
    convert: Mapping[str, Role] = field(default_factory=dict)
    roll: Mapping[str, Role] = field(default_factory=dict)
    keep: Mapping[str, Role] = field(default_factory=dict)
    held: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """True when nothing is left to do."""
        return not (self.delete or self.create or self.convert or self.roll or self.held)

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


def plan(cluster: str, observed: Sequence[Observed], wanted: Wanted, max_unavailable: int) -> Step:
    """The next step of this pool. Raises ValueError for two children of one name or a negative count."""
    if len({child.name for child in observed}) != len(observed):
        raise ValueError("two children with one name")
    if any(count < 0 for count in wanted.counts.values()):
        raise ValueError("a negative count of instances")

    present = sorted((child for child in observed if not child.going), key=lambda child: child.index)
    victims = _victims(present, wanted)
    stay = [child for child in present if child not in victims]
    lacking = _lacking(stay, wanted)
    moves = _conversions(stay, wanted, lacking)
    create = _creations(cluster, observed, lacking, moves)

    budget = _Budget(max_unavailable - sum(not child.ready for child in stay))
    convert, roll, keep, held = {}, {}, {}, []
    for child in stay:
        if child.name in moves:
            if budget.take(child):
                convert[child.name] = moves[child.name]
            else:
                held.append(child.name)
    for child in stay:
        if child.name in moves:
            continue
        if child.revision == wanted.revisions[child.role]:
            keep[child.name] = child.role
        elif budget.take(child):
            roll[child.name] = child.role
        else:
            held.append(child.name)
    return Step(tuple(child.name for child in victims), create, convert, roll, keep, tuple(held))


class _Budget:
    """How many ready instances a step may still take out of service."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, child: Observed) -> bool:
        if not child.ready:
            return True
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _expendable(child: Observed) -> tuple[bool, int]:
    """Sort key: the child whose loss costs least comes first."""
    return child.ready, -child.index


def _victims(observed: Sequence[Observed], wanted: Wanted) -> list[Observed]:
    surplus = len(observed) - wanted.total
    if surplus <= 0:
        return []
    victims = sorted((child for child in observed if child.marked), key=_expendable)[:surplus]
    for _ in range(surplus - len(victims)):
        rest = [child for child in observed if child not in victims]
        excess = _excess(rest, wanted)
        role = max(sorted(excess), key=lambda name: excess[name])
        victims.append(min((child for child in rest if child.role == role), key=_expendable))
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
