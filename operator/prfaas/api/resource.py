"""What a kind is to the API server, beside its fields: names, printer columns, scale; and the object's frame.

Each kind's model carries a `Resource` as its `resource`: clients take the plural from it, the CRD generator the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from prfaas.api.base import API_VERSION, GROUP, VERSION, ApiModel
from prfaas.api.common import MAX_NAME
from prfaas.api.rules import Ruled, rule


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; one with priority 1 shows with `-o wide` only."""

    name: str
    json_path: str
    description: str
    type: Literal["string", "integer", "date"] = "string"
    priority: int = 0


@dataclass(frozen=True)
class Scale:
    """Paths of the scale subresource."""

    spec_replicas: str
    status_replicas: str
    label_selector: str


@dataclass(frozen=True)
class Resource:
    """Names of a kind in the API, and how it is listed and scaled."""

    kind: str
    plural: str
    singular: str
    short_names: tuple[str, ...]
    columns: tuple[Column, ...]
    scale: Scale | None = None

    @property
    def crd_name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"

    def path(self, namespace: str, name: str | None = None) -> str:
        """URL path of the collection in a namespace, or of one object in it."""
        collection = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{self.plural}"
        return collection if name is None else f"{collection}/{name}"


READY_COLUMNS = (
    Column("Ready", ".status.conditions[?(@.type=='Ready')].status", "Whether all is as specified."),
    Column("Reason", ".status.conditions[?(@.type=='Ready')].reason", "Why it is ready, or why not."),
)
AGE_COLUMN = Column("Age", ".metadata.creationTimestamp", "Time since the object was created.", "date")


class ObjectMeta(ApiModel):
    """The part of an object's metadata that we read; the rest is the API server's business."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1)]
    namespace: Annotated[str, Field(min_length=1)]
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


@rule(
    f"self.metadata.name.size() <= {MAX_NAME}",
    f"metadata.name may have at most {MAX_NAME} characters: names of children add to it",
    holds=lambda whole: len(whole.metadata.name) <= MAX_NAME,
)
class ApiObject(Ruled):
    """The frame of every kind: `spec` and `status` come with the kind."""

    resource: ClassVar[Resource]

    api_version: Literal["prfaas.io/v1alpha1"]
    """Version of the schema of this object."""
    kind: str
    """Kind of this object."""
    metadata: ObjectMeta
    """Standard metadata."""


assert API_VERSION == "prfaas.io/v1alpha1"
