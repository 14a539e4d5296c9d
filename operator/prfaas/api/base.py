"""What every model of the API shares: strict parsing, camelCase on the wire, immutability.

Python names are snake_case, wire names are camelCase (the alias generator), so that a model reads like Python and a
manifest reads like Kubernetes. Unknown fields are an error with their path: a misspelt field must never be ignored.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

GROUP = "prfaas.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class ApiModel(BaseModel):
    """A frozen, strict piece of the API. `to_wire` gives the JSON form with only the fields that were set."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def to_wire(self) -> dict[str, Any]:
        """The camelCase JSON object; absent (None) members are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
