"""Does a live object already hold what we want it to hold?

Pure. `covers(live, wanted)` is true when applying `wanted` would change nothing we own: every member of `wanted` is in
`live` with an equal value; what others added (defaults, injected containers, foreign labels) does not count. It knows
the three ways in which the server rewrites what it was given: some empty values are left out, quantities are put in
canonical form, and lists that are maps in disguise (containers by name, ports by number) may hold elements of others.
Where it errs, it errs towards "no", which costs a request that changes nothing (see apply.py), never a lost write.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# Lists that server-side apply merges element by element, and what identifies an element in them.
_LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_PORT_KEYS = ("containerPort", "port")
_QUANTITY_MAPS = ("limits", "requests", "capacity")
_QUANTITIES = ("sizeLimit", "storage", "divisor")
# Members that the server does not store when they are empty; elsewhere an empty value differs from none
# (`emptyDir: {}`, `automountServiceAccountToken: false`).
_LEFT_OUT_WHEN_EMPTY = frozenset(
    "annotations labels nodeSelector matchLabels data limits requests value apiGroup hostNetwork hostPID hostIPC "
    "readOnly stdin tty publishNotReadyAddresses paused minReadySeconds initialDelaySeconds".split()
)
_ATOMIC_KINDS = ("EndpointSlice",)
"""Kinds whose every list is replaced whole, so that an element of somebody else is drift."""

_QUANTITY = re.compile(r"([+-]?[0-9.]+)(m|[kKMGTPE]i?|[eE][+-]?[0-9]+)?")
_UNIT = {"": 0, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def covers(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether `live` holds every member of `wanted`; identity members that only the server writes are not compared."""
    atomic = wanted.get("kind") in _ATOMIC_KINDS
    return all(
        _holds(live.get(member), value, member, in_quantities=False, atomic=atomic) for member, value in wanted.items()
    )


def same_status(live: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether a status we own whole is already written: equal in both directions, empty members aside."""
    return bool(_pruned(live or {}) == _pruned(wanted))


def content_hash(obj: Mapping[str, Any]) -> str:
    """A short hash of an object's JSON, the same for equal content whatever the order of its members."""
    canonical = json.dumps(obj, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def parse_quantity(value: object) -> Decimal | None:
    """A Kubernetes quantity ("1500m", "2Gi", 3) as a number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    match = _QUANTITY.fullmatch(str(value))
    if not match:
        return None
    digits, unit = match[1], match[2] or ""
    try:
        number = Decimal(digits)
    except ArithmeticError:
        return None
    if unit in _BINARY:
        return number * Decimal(1024 ** _BINARY[unit])
    exponent = int(unit[1:]) if len(unit) > 1 and unit[0] in "eE" else _UNIT.get(unit)
    return None if exponent is None else number.scaleb(exponent)


def _holds(live: Any, wanted: Any, member: str, *, in_quantities: bool, atomic: bool) -> bool:
    if live is None and (wanted is None or wanted == [] or (not wanted and member in _LEFT_OUT_WHEN_EMPTY)):
        return True
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return False
        inside = member in _QUANTITY_MAPS
        return all(
            _holds(live.get(name), value, name, in_quantities=inside, atomic=atomic) for name, value in wanted.items()
        )
    if isinstance(wanted, (list, tuple)):
        return isinstance(live, list) and _list_holds(live, wanted, member, atomic=atomic)
    if (in_quantities or member in _QUANTITIES) and (number := parse_quantity(wanted)) is not None:
        return parse_quantity(live) == number
    return isinstance(live, bool) == isinstance(wanted, bool) and bool(live == wanted)


def _list_holds(live: list[Any], wanted: list[Any] | tuple[Any, ...], member: str, *, atomic: bool) -> bool:
    keys = None if atomic else [_element_key(member, element) for element in wanted]
    if not keys or any(key is None for key in keys):
        return len(live) == len(wanted) and all(
            _holds(have, want, "", in_quantities=False, atomic=atomic) for have, want in zip(live, wanted, strict=True)
        )
    by_key = {_element_key(member, element): element for element in live}
    return all(
        _holds(by_key.get(key), want, "", in_quantities=False, atomic=atomic)
        for key, want in zip(keys, wanted, strict=True)
    )


def _element_key(member: str, element: Any) -> tuple[Any, ...] | None:
    if not isinstance(element, Mapping):
        return None
    if member == "ports":
        number = next((element[key] for key in _PORT_KEYS if key in element), None)
        return None if number is None else (number, element.get("protocol", "TCP"))
    if member not in _LIST_KEYS:
        return None
    key = tuple(element.get(name) for name in _LIST_KEYS[member])
    return None if None in key else key


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        inner = {name: _pruned(item) for name, item in value.items()}
        return {name: item for name, item in inner.items() if item is not None and item != {} and item != []}
    if isinstance(value, (list, tuple)):
        return [_pruned(item) for item in value]
    return value
