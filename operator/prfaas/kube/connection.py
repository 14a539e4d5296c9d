"""The connection to one API server: TLS, credentials, bounds on time and size, and every failure a KubeError.

It stands on `kubernetes.aio`'s connection layer (TLS, kubeconfig, in-cluster token refresh) and nothing above it: the
typed models of that client reject objects of newer servers, and its calls have no default timeout.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config import load_incluster_config as _load_pod_untyped
from kubernetes.aio.config import load_kube_config as _load_file_untyped

from prfaas.kube.errors import BadCredentials, KubeError, Unreachable, error_from_response
from prfaas.kube.kubeconfig import Credentials
from prfaas.kube.resources import Object

# kubernetes.aio's own functions carry no annotations.
_load_pod: Callable[..., None] = _load_pod_untyped
_load_file: Callable[..., Awaitable[object]] = _load_file_untyped

USER_AGENT = "prfaas-operator"
Query = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `call` bounds a whole request, body included; a watch is bounded by its inactivity instead."""

    connect: float = 5.0
    call: float = 20.0


@dataclass
class Connection:
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
    ) -> Self:
        """A person's or a test's own kubeconfig: all that kubectl accepts, plugins included."""
        configuration = _configuration()
        try:
            await _load_file(str(path), context, configuration, persist_config=False)
        except (ConfigException, TypeError) as error:  # TypeError: the loader's way to say that the file is missing
            raise BadCredentials(f"{path}: {error}") from error
        return cls(_api(configuration), timeouts or Timeouts())

    @classmethod
    def from_credentials(
        cls, credentials: Credentials, *, timeouts: Timeouts | None = None, max_bytes: int | None = None
    ) -> Self:
        """Needs a running event loop. Raises BadCredentials when the certificate or key cannot be loaded."""
        configuration = _configuration()
        configuration.host = credentials.server
        configuration.ca_cert_data = credentials.ca
        configuration.tls_server_name = credentials.tls_server_name
        if credentials.token:
            configuration.api_key["BearerToken"] = f"Bearer {credentials.token}"
        if credentials.client_certificate and credentials.client_key:
            api = _api_with_key(configuration, credentials.client_certificate, credentials.client_key)
        else:
            api = _api(configuration)
        client = cls(api, timeouts or Timeouts())
        if max_bytes is not None:
            client.max_bytes = max_bytes
        return client

    @classmethod
    def in_cluster(cls, *, timeouts: Timeouts | None = None) -> Self:
        """The pod's own service account; its token is read again as kubelet renews it. Raises BadCredentials."""
        configuration = _configuration()
        try:
            _load_pod(configuration)
        except ConfigException as error:
            raise BadCredentials(f"not in a cluster: {error}") from error
        return cls(_api(configuration), timeouts or Timeouts())

    async def close(self) -> None:
        await self._rest.close()

    async def __aenter__(self) -> Self:
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

    async def json(
        self,
        method: str,
        path: str,
        query: Query = (),
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
    ) -> Object:
        """One request and its answer."""
        if method != "GET" and self.write_gate is not None:
            self.write_gate()
        timeout = aiohttp.ClientTimeout(total=self.timeouts.call, sock_connect=self.timeouts.connect)
        async with self.stream(method, path, query, body, content_type=content_type, timeout=timeout) as response:
            return decoded(await _read(response, self.max_bytes, f"{method} {path}"), f"{method} {path}")

    async def text(self, path: str, query: Query = ()) -> str:
        """What a GET answers that is no JSON, such as a log."""
        timeout = aiohttp.ClientTimeout(total=self.timeouts.call, sock_connect=self.timeouts.connect)
        async with self.stream("GET", path, query, timeout=timeout) as response:
            return (await _read(response, self.max_bytes, f"GET {path}")).decode(errors="replace")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        query: Query,
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


def _api_with_key(configuration: Configuration, certificate: str, key: str) -> ApiClient:
    """The ssl module loads client keys from files only: they exist just while the TLS context is made."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for member, pem in (("cert", certificate), ("key", key)):
                file = Path(folder) / member
                file.touch(mode=0o600)
                file.write_text(pem)
                setattr(configuration, f"{member}_file", str(file))
            return _api(configuration)
    except OSError as error:
        raise BadCredentials(f"no temporary file can be made for the client key: {error}") from error


def decoded(raw: bytes, request: str) -> Object:
    try:
        decoded = json.loads(raw)
    except (ValueError, RecursionError):
        raise Unreachable("the answer is not JSON", request=request) from None
    if not isinstance(decoded, dict):
        raise Unreachable("the answer is not a JSON object", request=request)
    return decoded


async def read_line(response: aiohttp.ClientResponse, request: str) -> bytes:
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
