"""What a pool can do, and what a step would take from it: the guard of a paired rollout.

KV cache never crosses between two compatibility keys, so the instances of one key, here and at the peers, are a group
that serves by itself or not at all. While a new key goes through a pool, each step is judged by what is observed:

 1. A PDCluster can *decode* (some decode instance is ready), prefill *locally* (some group has a ready decode and a
    ready prefill instance here) and *remotely* (some group has a ready decode instance here and a ready prefill
    instance at the other end of a link).
 2. A prefill pool has, for each key that a linked pool decodes with, an instance of that key that is ready, or not.
 3. An instance is taken out of service only if the pool can do afterwards what it could do before. So of each role one
    instance of the old group stays until the new group is whole, and a prefill pool keeps one of the old key while a
    peer decodes with it.
 4. Where no step is left that takes nothing, although all instances are ready, there is none to spare. Then one
    instance may go whose loss can be borne: local prefill, since a peer or the decode instance itself stands in; or
    the key of a peer that has a ready decode instance of the wanted key, since it can serve with the first new
    instance that is made in its place. The loss that the new instance makes good at once comes first.
 5. The last decode instance, and remote prefill, are never given up: for them the step waits.

Two pools that follow this never wait for each other: a PDCluster waits for the peer's first new prefill instance with
nothing but its last old decode instance, and a prefill pool waits for new decode instances with nothing but its last
old instance. A PDCluster of two instances has none to wait with: it begins when its peer means to go the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.api import labels


class Member(NamedTuple):
    """A ready instance, as far as groups go."""

    role: str
    key: str


class Ability(NamedTuple):
    """One thing that a pool can do. `peer` and `key` are set for what a prefill pool does for a peer."""

    name: str
    peer: str = ""
    key: str = ""


DECODE, LOCAL, REMOTE = Ability("decode"), Ability("local"), Ability("remote")


@dataclass(frozen=True)
class Supplier:
    """The prefill pool at the other end of a link, as a PDCluster sees it."""

    name: str
    """Name of the link."""
    ready: frozenset[str] = frozenset()
    """Keys of which it has a ready instance that is mirrored here."""
    heading: str | None = None
    """The key that its spec asks for; None: not known."""


@dataclass(frozen=True)
class Consumer:
    """The PDCluster at the other end of a link, as a prefill pool sees it."""

    name: str
    """Name of the link."""
    decodes: frozenset[str] | None = frozenset()
    """Keys of its decode instances, ready or not; None: not known, so every key may be one of them."""
    ready: frozenset[str] = frozenset()
    """Keys of which a decode instance is ready."""


@dataclass(frozen=True)
class Pairing:
    """What a paired rollout goes by beside the pool itself. `key` is the one that the spec asks for."""

    key: str
    suppliers: tuple[Supplier, ...] = ()
    consumers: tuple[Consumer, ...] = ()

    def abilities(self, ready: Iterable[Member]) -> frozenset[Ability]:
        """What a pool with these ready instances can do."""
        members = set(ready)
        decode = {member.key for member in members if member.role == labels.ROLE_DECODE}
        prefill = {member.key for member in members if member.role == labels.ROLE_PREFILL}
        found = {
            Ability("peer", consumer.name, key)
            for consumer in self.consumers
            for key in prefill
            if consumer.decodes is None or key in consumer.decodes
        }
        if decode:
            found.add(DECODE)
        if decode & prefill:
            found.add(LOCAL)
        if any(decode & supplier.ready for supplier in self.suppliers):
            found.add(REMOTE)
        return frozenset(found)

    def bearable(self, lost: frozenset[Ability], ready: Iterable[Member], total: int) -> bool:
        """Whether a pool of `total` instances may lose this for the time of one restart (rule 4)."""
        return not self._missed(lost, ready, total)

    def peers(self, lost: frozenset[Ability], ready: Iterable[Member], total: int) -> tuple[str, ...]:
        """Links whose other end a step waits for that would lose this; none: it waits for an instance here."""
        missed = self._missed(lost, ready, total)
        if REMOTE in missed:
            return tuple(supplier.name for supplier in self.suppliers)
        return tuple(sorted({ability.peer for ability in missed if ability.peer}))

    def _missed(self, lost: frozenset[Ability], ready: Iterable[Member], total: int) -> frozenset[Ability]:
        """What of `lost` cannot be borne. A pool of two that loses local prefill will have to lose remote prefill."""
        members = set(ready)
        has_new = Member(labels.ROLE_PREFILL, self.key) in members
        missed = {ability for ability in lost if not self._can_be_borne(ability, has_new)}
        if LOCAL in lost and total == 2 and REMOTE in self.abilities(members) and not self._peer_goes_along():
            missed.add(REMOTE)
        return frozenset(missed)

    def _can_be_borne(self, ability: Ability, has_new: bool) -> bool:
        if ability in (DECODE, REMOTE):
            return False
        if ability == LOCAL or ability.key == self.key:
            return True
        ready = next(each.ready for each in self.consumers if each.name == ability.peer)
        return self.key in ready and not has_new

    def _peer_goes_along(self) -> bool:
        return any(self.key in supplier.ready or supplier.heading == self.key for supplier in self.suppliers)
