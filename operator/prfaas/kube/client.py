"""The one client of an API server: plain dicts in and out, a timeout on every call, every failure a KubeError.

Retrying is the caller's business: the informer, the elector and the reconcile queue each have their own rule for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

import aiohttp

from prfaas.kube.connection import USER_AGENT, Connection, Query, Timeouts, decoded, read_line
from prfaas.kube.errors import Unreachable, error_from_status
from prfaas.kube.resources import POD, SERVICE_ACCOUNT, Object, Resource, resource_of

__all__ = ["KubeClient", "ObjectList", "Propagation", "Timeouts", "WatchEvent"]

PAGE = 500
"""Objects per page of a list: bounds what one answer holds in memory on both sides."""

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
Propagation = Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True)
class ObjectList:
    """What a list answered: the objects and the version from which a watch continues it."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch. A BOOKMARK's object carries only `metadata.resourceVersion`."""

    type: EventType
    object: Object


class KubeClient(Connection):
    """One API server, one set of credentials. Close it; or use it as an async context manager."""

    # Reading

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        return await self.json("GET", resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> ObjectList:
        """All objects, read page by page at one resourceVersion; each carries its apiVersion and kind."""
        items: list[Object] = []
        version = ""
        token = ""
        while True:
            query = _query(labelSelector=labels, fieldSelector=fields, limit=PAGE, **{"continue": token})
            page = await self.json("GET", resource.path(namespace), query)
            version = page["metadata"]["resourceVersion"]
            for item in page.get("items") or []:
                item.setdefault("apiVersion", resource.api_version)
                item.setdefault("kind", resource.kind)
                items.append(item)
            token = page["metadata"].get("continue", "")
            if not token:
                return ObjectList(items, version)

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str | None = None,
        fields: str | None = None,
        server_timeout: float = 300.0,
        inactivity: float = 70.0,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Events after `resource_version`, until the server ends the stream (after `server_timeout` seconds).

        Bookmarks are asked for; servers send one a minute, so a stream silent for `inactivity` seconds is dead and
        raises Unreachable. An expired version raises Gone, as answer or within the stream. Close the iterator
        (`contextlib.aclosing`) when leaving it early.
        """
        query = _query(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            timeoutSeconds=int(server_timeout) or 1,
            labelSelector=labels,
            fieldSelector=fields,
        )
        path = resource.path(namespace)
        timeout = aiohttp.ClientTimeout(
            total=server_timeout + inactivity, sock_connect=self.timeouts.connect, sock_read=inactivity
        )
        async with self.stream("WATCH", path, query, timeout=timeout) as response:
            while line := await read_line(response, f"WATCH {path}"):
                event = decoded(line, f"WATCH {path}")
                if event.get("type") == "ERROR":
                    raise error_from_status(event.get("object") or {}, request=f"WATCH {path}")
                obj = event.get("object")
                if event.get("type") not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or not isinstance(obj, dict):
                    raise Unreachable("the watch sent something that is not an event", request=f"WATCH {path}")
                yield WatchEvent(event["type"], obj)

    async def log(self, pod: str, namespace: str, container: str, *, lines: int, previous: bool = False) -> str:
        """The end of a container's log; `previous`: of the one before it was started again."""
        path = POD.path(namespace, pod, "log")
        query = _query(container=container, tailLines=lines, previous="true" if previous else "")
        return await self.text(path, query)

    async def version(self) -> str:
        """The server's gitVersion; also the cheapest question that proves it answers."""
        return str((await self.json("GET", "/version"))["gitVersion"])

    # Writing

    async def create(self, obj: Object, *, field_manager: str = USER_AGENT) -> Object:
        resource, namespace, _ = _place(obj)
        return await self.json("POST", resource.path(namespace), _query(fieldManager=field_manager), obj)

    async def replace(self, obj: Object, *, field_manager: str = USER_AGENT) -> Object:
        """Replaces the whole object; with `metadata.resourceVersion`, a Conflict if somebody changed it since."""
        resource, namespace, name = _place(obj)
        return await self.json("PUT", resource.path(namespace, name), _query(fieldManager=field_manager), obj)

    async def apply(
        self, obj: Object, *, field_manager: str, force: bool = True, subresource: str | None = None
    ) -> Object:
        """Server-side apply: `obj` holds exactly the fields that `field_manager` owns from now on.

        With `metadata.uid` or `metadata.resourceVersion` set, it is a Conflict when the live object is another one.
        """
        resource, namespace, name = _place(obj)
        query = _query(fieldManager=field_manager, force="true" if force else "false")
        path = resource.path(namespace, name, subresource)
        return await self.json("PATCH", path, query, obj, content_type="application/apply-patch+yaml")

    async def apply_status(self, obj: Object, *, field_manager: str) -> Object:
        """Server-side apply of the status subresource; `obj` needs apiVersion, kind, name, namespace and status."""
        return await self.apply(obj, field_manager=field_manager, subresource="status")

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        propagation: Propagation = "Background",
        grace_seconds: int | None = None,
    ) -> None:
        """Raises NotFound if it is gone already, and Conflict if `uid` is given and a new object has the name.

        `grace_seconds` 0 removes a pod without waiting for its kubelet.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        await self.json("DELETE", resource.path(namespace, name), (), body)

    # Who may do what

    async def create_token(
        self, service_account: str, namespace: str, *, seconds: int, audiences: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        """A token of a service account and when it ends (RFC 3339); the server may shorten `seconds`."""
        spec: Object = {"expirationSeconds": seconds}
        if audiences:
            spec["audiences"] = [*audiences]
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = SERVICE_ACCOUNT.path(namespace, service_account, "token")
        status = (await self.json("POST", path, (), body))["status"]
        return status["token"], status["expirationTimestamp"]

    async def token_review(self, token: str, audience: str) -> str | None:
        """The user name a bearer token stands for, if it is valid for `audience`; None otherwise."""
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = await self.json("POST", "/apis/authentication.k8s.io/v1/tokenreviews", (), review)
        status = answer.get("status") or {}
        # A server that ignores audiences leaves the list out: then the token was not checked for ours.
        if not status.get("authenticated") or audience not in (status.get("audiences") or ()):
            return None
        return str(status["user"]["username"])


def _query(**parameters: object) -> Query:
    return tuple((name, str(value)) for name, value in parameters.items() if value not in (None, ""))


def _place(obj: Object) -> tuple[Resource, str | None, str]:
    metadata = obj["metadata"]
    return resource_of(obj), metadata.get("namespace"), metadata["name"]
