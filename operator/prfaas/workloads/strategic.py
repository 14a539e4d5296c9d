"""Merge a user's partial pod template over ours, the way `kubectl patch --type strategic` would.

Objects merge member by member and `null` removes a member. Lists whose items Kubernetes tells apart by a key
(containers by name, mounts by path) merge item by item, new items at the end; every other list is replaced as a whole.
An item `{"$patch": "delete", <key>: ...}` removes one. What cannot be merged is an error with the path of the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Field name of a list in a pod template -> the member that tells its items apart (as in Kubernetes' own API)."""

_PATCH = "$patch"


class MergeError(ValueError):
    """The override does not fit; `path` says where, the text what would."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def merge(base: Mapping[str, Any], override: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`base` with `override` over it; neither is changed. `path` names the override in errors (MergeError)."""
    merged = dict(base)
    for name, value in override.items():
        where = f"{path}.{name}"
        if name == _PATCH:
            raise MergeError(where, "only an item of a list can be removed this way; set the member to null instead")
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(merged.get(name), value, name, where)
    return merged


def _merge_value(base: Any, override: Any, name: str, path: str) -> Any:
    if isinstance(override, Mapping):
        if base is not None and not isinstance(base, Mapping):
            raise MergeError(path, f"is an object, but this field is {_kind(base)}")
        return merge(base or {}, override, path)
    if isinstance(override, list):
        if base is not None and not isinstance(base, list):
            raise MergeError(path, f"is a list, but this field is {_kind(base)}")
        key = MERGE_KEYS.get(name)
        return list(override) if key is None else _merge_list(base or [], override, key, path)
    if isinstance(base, Mapping | list):
        raise MergeError(path, f"is {_kind(override)}, but this field is {_kind(base)}")
    return override


def _merge_list(base: Sequence[Any], override: Sequence[Any], key: str, path: str) -> list[Any]:
    merged = {item[key]: item for item in base}
    for index, item in enumerate(override):
        where = f"{path}[{index}]"
        if not isinstance(item, Mapping):
            raise MergeError(where, f"must be an object with {key!r}")
        if key not in item:
            raise MergeError(where, f"needs {key!r}, by which items of this list are merged")
        if item.get(_PATCH) == "delete":
            merged.pop(item[key], None)
            continue
        merged[item[key]] = merge(merged.get(item[key], {}), item, where)
    return list(merged.values())


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    return {list: "a list", str: "a string", bool: "a boolean"}.get(type(value), "a number")
