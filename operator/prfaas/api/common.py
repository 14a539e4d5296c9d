"""Scalar types and small pieces that the kinds share: names, durations, quantities, resources, environment.

Quantities and durations stay the strings that the user wrote (a round trip changes nothing); the functions here give
their value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from prfaas.api.base import ApiModel
from prfaas.api.rules import Ruled, rule

MAX_NAME = 40
"""Longest `metadata.name` of our kinds: child names add suffixes and must fit in 63 characters."""

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DURATION = r"^([0-9]{1,4}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?$"
QUANTITY = r"^[0-9]{1,18}(\.[0-9]{1,9})?([numkMGTPE]|[KMGTPE]i)?$"
BANDWIDTH = r"^[0-9]{1,15}(\.[0-9]{1,3})?[kMGT]?$"

Name = Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=63)]
OwnName = Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=MAX_NAME)]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)]
Text = Annotated[str, Field(max_length=1024)]
Duration = Annotated[str, Field(pattern=DURATION, min_length=2, max_length=18)]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Quantity = Whole | Annotated[str, Field(pattern=QUANTITY, max_length=32)]
Bandwidth = Whole | Annotated[str, Field(pattern=BANDWIDTH, max_length=24)]
Tokens = Annotated[int, Field(ge=0, le=100_000_000)]
Port = Annotated[int, Field(ge=1, le=65535)]
ImagePullPolicy = Literal["Always", "IfNotPresent", "Never"]

_UNITS = {"h": 3600, "m": 60, "s": 1}
_DECIMAL_POWERS = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SUFFIXES = {
    **{suffix: Decimal(10) ** power for suffix, power in _DECIMAL_POWERS.items()},
    **{f"{prefix}i": Decimal(1024) ** (power + 1) for power, prefix in enumerate("KMGTPE")},
}


def duration_seconds(text: str) -> int:
    """Seconds of a Go-style duration of hours, minutes and seconds such as `1h30m` or `90s`; ValueError otherwise."""
    if len(text) < 2 or not re.fullmatch(DURATION, text):
        raise ValueError(f"not a duration such as 1h30m or 90s: {text!r}")
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+)([hms])", text))


def quantity_value(quantity: int | str) -> Decimal:
    """Value of a Kubernetes quantity: bytes, cores, or whatever it counts; ValueError if it is none."""
    text = str(quantity)
    if not re.fullmatch(QUANTITY, text):
        raise ValueError(f"not a quantity such as 500m, 2 or 64Gi: {text!r}")
    number = text.rstrip("numkMGTPEKi")
    return Decimal(number) * _SUFFIXES[text[len(number) :]]


def bits_per_second(bandwidth: int | str) -> int:
    """Bits per second of a bandwidth such as `400M` (400 Mbit/s) or `100G`; ValueError if it is none."""
    if not re.fullmatch(BANDWIDTH, str(bandwidth)):
        raise ValueError(f"not a bandwidth in bit/s such as 400M or 100G: {bandwidth!r}")
    return int(quantity_value(bandwidth))


def unique_by(attribute: str) -> tuple[Any, Any]:
    """Metadata of a list that is a map by one member: the server merges it by that key and refuses twins, as we do."""
    key = to_camel(attribute)

    def check(items: Sequence[Any]) -> Sequence[Any]:
        seen = set()
        for item in items:
            value = getattr(item, attribute)
            if value in seen:
                raise ValueError(f"Duplicate value: {key} {value!r}")
            seen.add(value)
        return items

    schema: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return AfterValidator(check), Field(json_schema_extra=schema)


class KeyRef(ApiModel):
    """One key of a Secret or ConfigMap in the same namespace."""

    name: ObjectName
    """Name of the object."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in its data."""
    optional: bool | None = None
    """Whether the object or its key may be missing."""


class FieldRef(ApiModel):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=253)]
    """Path of the field, such as `status.podIP`."""


_SOURCES = ("secret_key_ref", "config_map_key_ref", "field_ref")


@rule(
    "(has(self.secretKeyRef) ? 1 : 0) + (has(self.configMapKeyRef) ? 1 : 0) + (has(self.fieldRef) ? 1 : 0) == 1",
    "exactly one of secretKeyRef, configMapKeyRef and fieldRef is required",
    holds=lambda source: sum(getattr(source, name) is not None for name in _SOURCES) == 1,
)
class EnvSource(Ruled):
    """Where the value of an environment variable comes from: exactly one member."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod."""


@rule(
    "!(has(self.value) && has(self.valueFrom))",
    "value and valueFrom exclude each other",
    holds=lambda env: env.value is None or env.value_from is None,
)
class EnvVar(Ruled):
    """One environment variable."""

    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=253)]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value; empty where neither value nor valueFrom is given."""
    value_from: EnvSource | None = None
    """Where its value comes from."""


Args = Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=128)]
_env_unique, _env_schema = unique_by("name")
Env = Annotated[tuple[EnvVar, ...], Field(max_length=64), _env_unique, _env_schema]


class Resources(ApiModel):
    """Compute resources of one container, without the GPUs of the pool, which the operator adds."""

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] | None = None
    """Amounts reserved, by resource name."""
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] | None = None
    """Amounts that may not be exceeded, by resource name."""


@rule(
    "has(self.key) || self.operator == 'Exists'",
    "a toleration without key tolerates everything and needs operator Exists",
    holds=lambda toleration: toleration.key is not None or toleration.operator == "Exists",
)
@rule(
    "self.operator != 'Exists' || !has(self.value)",
    "a toleration with operator Exists takes no value",
    holds=lambda toleration: toleration.operator != "Exists" or toleration.value is None,
)
@rule(
    "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
    "tolerationSeconds needs effect NoExecute",
    holds=lambda toleration: toleration.toleration_seconds is None or toleration.effect == "NoExecute",
)
class Toleration(Ruled):
    """A taint that instances tolerate, as in a pod."""

    key: Annotated[str, Field(min_length=1, max_length=317)] | None = None
    """Key of the taint; absent: every taint (operator Exists)."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the value must be equal, or the key need only exist."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect tolerated; absent: all."""
    toleration_seconds: Annotated[int, Field(ge=0, le=86_400 * 365)] | None = None
    """Seconds for which a NoExecute taint is tolerated; absent: for ever."""
