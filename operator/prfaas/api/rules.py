"""Rules between fields: written once in CEL for the API server and once in Python for us, side by side.

`@rule(...)` on a model keeps both. The CRD generator emits the CEL at the level of the schema where the model stands;
`Ruled` runs the Python when a model is parsed, with the same message, so that a document which never saw an API server
is held to the same law. A transition rule (one that reads `oldSelf`) has no Python side: only the server knows the old
object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prfaas.api.base import ApiModel


@dataclass(frozen=True)
class Rule:
    """One CEL rule with its message; `holds` is the same predicate in Python, None for a transition rule."""

    cel: str
    message: str
    field_path: str | None
    holds: Callable[[Any], bool] | None

    def to_wire(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": self.message}
        if self.field_path is not None:
            entry["fieldPath"] = self.field_path
        return entry


class Ruled(ApiModel):
    """An ApiModel that may carry rules."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [each.to_wire() for each in cls.rules]
        return schema

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [each.message for each in self.rules if each.holds is not None and not each.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self


Model = TypeVar("Model", bound=type[Ruled])


def rule(
    cel: str, message: str, *, holds: Callable[[Any], bool] | None = None, field_path: str | None = None
) -> Callable[[Model], Model]:
    """Class decorator that adds a rule. `holds` may be left out only where the CEL reads `oldSelf`."""
    if (holds is None) != ("oldSelf" in cel):
        raise TypeError(f"a rule has a Python side exactly when it does not read oldSelf: {cel}")

    def add(model: Model) -> Model:
        model.rules = (Rule(cel, message, field_path, holds), *model.rules)
        return model

    return add
