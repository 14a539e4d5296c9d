"""A client for tests: what the operator does not do, and a person with kubectl does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from prfaas.kube.client import KubeClient
from prfaas.kube.connection import USER_AGENT
from prfaas.kube.kubeconfig import parse_kubeconfig
from prfaas.kube.resources import Object, Resource


class Hand(KubeClient):
    """A KubeClient that can patch, and ask what it may do."""

    @classmethod
    def from_kubeconfig(cls, document: str | bytes | Mapping[str, Any]) -> Self:
        """With the credentials that a link's Secret holds. Raises BadCredentials."""
        return cls.from_credentials(parse_kubeconfig(document))

    async def patch_merge(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any],
        *,
        subresource: str | None = None,
        field_manager: str = USER_AGENT,
    ) -> Object:
        """A JSON merge patch: null removes a member, a list is replaced whole."""
        path = resource.path(namespace, name, subresource)
        return await self.json(
            "PATCH", path, (("fieldManager", field_manager),), patch, content_type="application/merge-patch+json"
        )

    async def may_i(
        self, verb: str, resource: Resource, namespace: str | None = None, *, subresource: str = "", name: str = ""
    ) -> bool:
        """Whether these credentials may do `verb`, by SelfSubjectAccessReview."""
        attributes = {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": subresource,
            "namespace": namespace or "",
            "name": name,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = await self.json("POST", path, (), review)
        return bool((answer.get("status") or {}).get("allowed"))
