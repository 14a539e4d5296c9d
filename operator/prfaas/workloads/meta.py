"""Metadata of everything that belongs to one of our objects: labels, owner, and the hash that names a revision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.api import labels
from prfaas.api.base import API_VERSION
from prfaas.api.resource import ApiObject

Object = dict[str, Any]
"""A Kubernetes object as plain JSON."""


@dataclass(frozen=True)
class Owner:
    """The object of ours that children belong to."""

    kind: str
    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, obj: ApiObject) -> Owner:
        """The owner that `obj` is of its children."""
        return cls(obj.kind, obj.metadata.namespace, obj.metadata.name, obj.metadata.uid)

    @property
    def reference(self) -> Object:
        """The ownerReference by which the cluster deletes a child with its owner."""
        return {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }

    @property
    def selector(self) -> dict[str, str]:
        """Labels by which all of the owner's children (and their pods) are found."""
        return {labels.CLUSTER: self.name, labels.KIND: self.kind.lower()}

    def labels(self, component: str, **more: str) -> dict[str, str]:
        """Labels of a child; `component` is what the child does: a role, or what it is for."""
        return {
            labels.LABEL_NAME: f"{labels.PART_OF}-{component}",
            labels.LABEL_INSTANCE: self.name,
            labels.LABEL_COMPONENT: component,
            labels.LABEL_MANAGED_BY: labels.MANAGED_BY,
            labels.LABEL_PART_OF: labels.PART_OF,
            **self.selector,
            **more,
        }

    def metadata(self, name: str, child_labels: Mapping[str, str]) -> Object:
        """metadata of a child of that name, in the owner's namespace."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": dict(child_labels),
            "ownerReferences": [self.reference],
        }


def pod_templates(obj: Mapping[str, Any]) -> tuple[Object, ...]:
    """The templates of the pods that an object makes; of an instance on several nodes the leader's first."""
    if obj["kind"] == "Deployment":
        return (obj["spec"]["template"],)
    if obj["kind"] == "LeaderWorkerSet":
        group = obj["spec"]["leaderWorkerTemplate"]
        return (group["leaderTemplate"], group["workerTemplate"])
    return ()


def digest(value: Any, length: int = 10) -> str:
    """Hex digest of a JSON value, equal for equal values whatever the order of their members."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def selector_text(wanted: Mapping[str, str]) -> str:
    """A label selector as query text."""
    return ",".join(f"{name}={value}" for name, value in wanted.items())
