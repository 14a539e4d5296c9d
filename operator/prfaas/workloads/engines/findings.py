"""What is wrong with a spec, or only unwise: the form in which rules say so, and what they look at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.api import labels
from prfaas.api.common import EnvVar
from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines.base import CONTAINER, roles_of
from prfaas.workloads.errors import SpecError


@dataclass(frozen=True)
class Finding:
    """One thing about a spec. `refused`: the pool is not built; otherwise a person should know."""

    path: str
    problem: str
    remedy: str
    refused: bool = True

    @property
    def error(self) -> SpecError:
        """The error that refuses the spec."""
        return SpecError(self.path, self.problem, self.remedy)

    def __str__(self) -> str:
        return str(self.error)


def warning(path: str, problem: str, remedy: str) -> Finding:
    """Something that a person should know and that stops nothing."""
    return Finding(path, problem, remedy, refused=False)


@dataclass(frozen=True)
class Arguments:
    """Arguments of the user's, where they stand, and for which roles."""

    path: str
    words: tuple[str, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Variable:
    """An environment variable of the user's, where it stands, and for which roles."""

    path: str
    name: str
    value: str | None
    """None where it comes from elsewhere, such as a Secret."""
    roles: tuple[str, ...]
    source: str | None = None
    """Where it comes from then, as JSON."""


def arguments_of(spec: PoolSpec) -> Iterator[Arguments]:
    """All arguments that a spec has."""
    yield Arguments("spec.engine.args", spec.engine.args, roles_of(spec))
    if isinstance(spec, PDClusterSpec):
        yield Arguments("spec.roles.prefill.args", spec.roles.prefill.args, (labels.ROLE_PREFILL,))
        yield Arguments("spec.roles.decode.args", spec.roles.decode.args, (labels.ROLE_DECODE,))


def variables_of(spec: PoolSpec) -> Iterator[Variable]:
    """All environment variables that a spec has, those that win last."""
    yield from _variables("spec.engine.env", spec.engine.env, roles_of(spec))
    if isinstance(spec, PDClusterSpec):
        yield from _variables("spec.roles.prefill.env", spec.roles.prefill.env, (labels.ROLE_PREFILL,))
        yield from _variables("spec.roles.decode.env", spec.roles.decode.env, (labels.ROLE_DECODE,))
    path, container = engine_override(spec)
    for index, item in enumerate(_items(container.get("env"))):
        if isinstance(item.get("name"), str):
            source = json.dumps(item["valueFrom"], sort_keys=True, default=str) if "valueFrom" in item else None
            value = None if source else str(item.get("value", ""))
            yield Variable(f"{path}.env[{index}]", item["name"], value, roles_of(spec), source)


def environment_of(spec: PoolSpec, role: str) -> dict[str, str | None]:
    """The user's variables of one role with the values that count, or where those come from."""
    return {each.name: each.source or each.value for each in variables_of(spec) if role in each.roles}


def engine_override(spec: PoolSpec) -> tuple[str, Mapping[str, Any]]:
    """What the pod template says about the engine's container, and where; empty where it says nothing."""
    for index, item in enumerate(_items(spec.pod_template.spec.get("containers"))):
        if item.get("name") == CONTAINER:
            return f"spec.podTemplate.spec.containers[{index}]", item
    return "spec.podTemplate.spec.containers", {}


def _variables(path: str, variables: Sequence[EnvVar], roles: tuple[str, ...]) -> Iterator[Variable]:
    for index, each in enumerate(variables):
        source = None if each.value_from is None else json.dumps(each.value_from.to_wire(), sort_keys=True)
        value = None if source else each.value or ""
        yield Variable(f"{path}[{index}]", each.name, value, roles, source)


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
