"""The one client of an API server: plain dicts in and out, a timeout on every call, every failure a KubeError.

It stands on `kubernetes.aio`'s connection layer (TLS, kubeconfig, in-cluster token refresh) and nothing above it: the
typed models of that client reject objects of newer servers, and its calls have no default timeout. Retrying is the
caller's business: the informer, the elector and the reconcile queue each have their own rule for it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config import load_incluster_config as _load_pod_untyped
from kubernetes.aio.config import load_kube_config as _load_file_untyped

from prfaas.kube.errors import BadCredentials, KubeError, Unreachable, error_from_response, error_from_status
from prfaas.kube.kubeconfig import Credentials, parse_kubeconfig
from prfaas.kube.resources import Object, Resource, resource_of

# kubernetes.aio's own functions carry no annotations.
_load_pod: Callable[..., None] = _load_pod_untyped
_load_file: Callable[..., Awaitable[object]] = _load_file_untyped

USER_AGENT = "prfaas-operator"
PAGE = 500
"""Objects per page of a list: bounds what one answer holds in memory on both sides."""

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
Propagation = Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `call` bounds a whole request, body included; a watch is bounded by its inactivity instead."""

    connect: float = 5.0
    call: float = 20.0


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


@dataclass
class KubeClient:
    """One API server, one set of credentials. Close it; or use it as an async context manager."""

    api: ApiClient
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_bytes: int = 64 * 1024 * 1024
    """Largest answer that is read; a peer's client has a smaller one."""
    write_gate: Callable[[], None] | None = None
    """Called before every write; raises to forbid it (we no longer lead)."""

    @classmethod
    async def from_kubeconfig_file(
        cls, path: Path, *, context: str | None = None, timeouts: Timeouts | None = None
    ) -> KubeClient:
        """A person's or a test's own kubeconfig: all that kubectl accepts, plugins included."""
        configuration = _configuration()
        try:
            await _load_file(str(path), context, configuration, persist_config=False)
        except (ConfigException, TypeError) as error:  # TypeError: the loader's way to say that the file is missing
            raise BadCredentials(f"{path}: {error}") from error
        return cls(_api(configuration), timeouts or Timeouts())

    @classmethod
    async def from_kubeconfig(
        cls,
        document: str | bytes | Mapping[str, Any],
        *,
        timeouts: Timeouts | None = None,
        max_bytes: int | None = None,
    ) -> KubeClient:
        """A kubeconfig from a Secret, with the restrictions of `parse_kubeconfig`. Raises BadCredentials."""
        return cls.from_credentials(parse_kubeconfig(document), timeouts=timeouts, max_bytes=max_bytes)

    @classmethod
    def from_credentials(
        cls, credentials: Credentials, *, timeouts: Timeouts | None = None, max_bytes: int | None = None
    ) -> KubeClient:
        """Needs a running event loop. Raises BadCredentials when the certificate or key cannot be loaded."""
        configuration = _configuration()
        configuration.host = credentials.server
        configuration.ca_cert_data = credentials.ca
        configuration.tls_server_name = credentials.tls_server_name
        if credentials.token:
            configuration.api_key["BearerToken"] = f"Bearer {credentials.token}"
        # The ssl module loads client keys from files only: they exist just while the TLS context is made.
        with tempfile.TemporaryDirectory() as folder:
            if credentials.client_certificate and credentials.client_key:
                for member, pem in (("cert", credentials.client_certificate), ("key", credentials.client_key)):
                    file = Path(folder) / member
                    file.touch(mode=0o600)
                    file.write_text(pem)
                    setattr(configuration, f"{member}_file", str(file))
            api = _api(configuration)
        client = cls(api, timeouts or Timeouts())
        if max_bytes is not None:
            client.max_bytes = max_bytes
        return client

    @classmethod
    def in_cluster(cls, *, timeouts: Timeouts | None = None) -> KubeClient:
        """The pod's own service account; its token is read again as kubelet renews it. Raises BadCredentials."""
        configuration = _configuration()
        try:
            _load_pod(configuration)
        except ConfigException as error:
            raise BadCredentials(f"not in a cluster: {error}") from error
        return cls(_api(configuration), timeouts or Timeouts())

    async def close(self) -> None:
        await self._rest.close()

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _rest(self) -> Any:
        return self.api.rest_client

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self.api.configuration.host)

    # Reading

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        return await self._json("GET", resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> ObjectList:
        """All objects, read page by page at one resourceVersion; each carries its apiVersion and kind."""
        items: list[Object] = []
        version = ""
        token = ""
        while True:
            query = _query(labelSelector=labels, fieldSelector=fields, limit=PAGE, **{"continue": token})
            page = await self._json("GET", resource.path(namespace), query)
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
        async with self._request("WATCH", path, query, timeout=timeout) as response:
            while line := await _line(response, f"WATCH {path}"):
                event = _decode(line, f"WATCH {path}")
                if event.get("type") == "ERROR":
                    raise error_from_status(event.get("object") or {}, request=f"WATCH {path}")
                obj = event.get("object")
                if event.get("type") not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or not isinstance(obj, dict):
                    raise Unreachable("the watch sent something that is not an event", request=f"WATCH {path}")
                yield WatchEvent(event["type"], obj)

    async def version(self) -> str:
        """The server's gitVersion; also the cheapest question that proves it answers."""
        return str((await self._json("GET", "/version"))["gitVersion"])

    # Writing

    async def create(self, obj: Object, *, field_manager: str = USER_AGENT) -> Object:
        resource, namespace, _ = _place(obj)
        return await self._json("POST", resource.path(namespace), _query(fieldManager=field_manager), obj)

    async def replace(self, obj: Object, *, field_manager: str = USER_AGENT) -> Object:
        """Replaces the whole object; with `metadata.resourceVersion`, a Conflict if somebody changed it since."""
        resource, namespace, name = _place(obj)
        return await self._json("PUT", resource.path(namespace, name), _query(fieldManager=field_manager), obj)

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
        return await self._json(
            "PATCH", path, _query(fieldManager=field_manager), patch, content_type="application/merge-patch+json"
        )

    async def apply(
        self, obj: Object, *, field_manager: str, force: bool = True, subresource: str | None = None
    ) -> Object:
        """Server-side apply: `obj` holds exactly the fields that `field_manager` owns from now on.

        With `metadata.uid` or `metadata.resourceVersion` set, it is a Conflict when the live object is another one.
        """
        resource, namespace, name = _place(obj)
        query = _query(fieldManager=field_manager, force="true" if force else "false")
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", path, query, obj, content_type="application/apply-patch+yaml")

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
        await self._json("DELETE", resource.path(namespace, name), (), body)

    # Who may do what

    async def create_token(
        self, service_account: str, namespace: str, *, seconds: int, audiences: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        """A token of a service account and when it ends (RFC 3339); the server may shorten `seconds`."""
        spec: Object = {"expirationSeconds": seconds}
        if audiences:
            spec["audiences"] = [*audiences]
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = Resource("", "v1", "serviceaccounts", "ServiceAccount").path(namespace, service_account, "token")
        status = (await self._json("POST", path, (), body))["status"]
        return status["token"], status["expirationTimestamp"]

    async def token_review(self, token: str, audience: str) -> str | None:
        """The user name a bearer token stands for, if it is valid for `audience`; None otherwise."""
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = await self._json("POST", "/apis/authentication.k8s.io/v1/tokenreviews", (), review)
        status = answer.get("status") or {}
        # A server that ignores audiences leaves the list out: then the token was not checked for ours.
        if not status.get("authenticated") or audience not in (status.get("audiences") or ()):
            return None
        return str(status["user"]["username"])

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
        answer = await self._json("POST", path, (), review, writes=False)
        return bool((answer.get("status") or {}).get("allowed"))

    # The request itself

    async def _json(
        self,
        method: str,
        path: str,
        query: tuple[tuple[str, str], ...] = (),
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        writes: bool = True,
    ) -> Object:
        if method != "GET" and writes and self.write_gate is not None:
            self.write_gate()
        timeout = aiohttp.ClientTimeout(total=self.timeouts.call, sock_connect=self.timeouts.connect)
        async with self._request(method, path, query, body, content_type=content_type, timeout=timeout) as response:
            return _decode(await _read(response, self.max_bytes, f"{method} {path}"), f"{method} {path}")

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: tuple[tuple[str, str], ...],
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with a 2xx code, its body unread. Closed, not reused, when left before its end."""
        request = f"{method} {path}"
        headers = {"User-Agent": USER_AGENT, "Accept": "application/json", "Content-Type": content_type}
        verb = "GET" if method == "WATCH" else method
        url = self.server + path + ("?" + urlencode(query) if query else "")
        try:
            await self.api.update_params_for_auth(headers, None, ["BearerToken"], path, verb, body)
            answer = await self._rest.request(verb, url, headers=headers, body=body, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            try:
                if not 200 <= response.status < 300:
                    raw = await _read(response, 1024 * 1024, request)
                    raise error_from_response(response.status, response.headers, raw, request=request)
                yield response
            finally:
                if response.content.at_eof():
                    response.release()
                else:
                    # A watch that is left early. A TLS goodbye would be waited for, from a server that may be gone.
                    if response.connection is not None and response.connection.transport is not None:
                        response.connection.transport.abort()
                    response.close()
        except (aiohttp.ClientError, ApiException, OSError) as error:
            raise Unreachable(_why(error), request=request) from error


def _configuration() -> Configuration:
    configuration = Configuration()
    # Proxies and credentials of the environment (HTTPS_PROXY, .netrc) must not decide where a cluster's secrets go.
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    configuration.client_session_kwargs = {"trust_env": False, "trace_configs": [trace]}
    return configuration


async def _refuse_redirect(*_: object) -> None:
    raise aiohttp.ClientError("the server answered with a redirect, which an API server does not do")


def _api(configuration: Configuration) -> ApiClient:
    try:
        return ApiClient(configuration)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise BadCredentials(f"certificate or key cannot be loaded: {error}") from error


def _query(**parameters: object) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in parameters.items() if value not in (None, ""))


def _place(obj: Object) -> tuple[Resource, str | None, str]:
    metadata = obj["metadata"]
    return resource_of(obj), metadata.get("namespace"), metadata["name"]


def _decode(raw: bytes, request: str) -> Object:
    try:
        decoded = json.loads(raw)
    except (ValueError, RecursionError):
        raise Unreachable("the answer is not JSON", request=request) from None
    if not isinstance(decoded, dict):
        raise Unreachable("the answer is not a JSON object", request=request)
    return decoded


async def _line(response: aiohttp.ClientResponse, request: str) -> bytes:
    try:
        return await response.content.readline()
    except ValueError:  # longer than the stream's buffer: four times etcd's own limit on an object
        raise KubeError("one event of the watch is too large", reason="AnswerTooLarge", request=request) from None


async def _read(response: aiohttp.ClientResponse, limit: int, request: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise KubeError(f"the answer is larger than {limit} bytes", reason="AnswerTooLarge", request=request)
    return b"".join(chunks)


def _why(error: BaseException) -> str:
    """What went wrong, for a person, without volatile parts (a condition may show it)."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"certificate not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__
