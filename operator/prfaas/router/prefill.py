"""The prefill leg: one request to a prefill instance, whose answer is a KV descriptor.

Its failures are told apart by what may be done about them: what the instance says about the client's request (4xx) goes
to the client, everything else may be tried on another instance.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import aiohttp

from prfaas.router.body import NoKVError, descriptor
from prfaas.routing.world import Endpoint


class Trouble(StrEnum):
    """Why a prefill instance gave no KV descriptor. A metric label."""

    UNREACHABLE = "Unreachable"
    """No connection within the connect timeout: over a link, the whole line is suspect."""
    REFUSED = "Refused"
    """The instance's host answered that nobody listens."""
    BROKEN = "Broken"
    """The connection ended before the answer was complete."""
    TIMEOUT = "Timeout"
    """No answer within the leg's deadline."""
    OVERLOADED = "Overloaded"
    """503: the instance's queue is full, or it shuts down."""
    SERVER_ERROR = "ServerError"
    """Any other 5xx."""
    NO_KV = "NoKV"
    """A success without a KV descriptor."""


@dataclass(frozen=True)
class Prefilled:
    """The KV cache is there to be pulled; the descriptor is for one decode attempt only."""

    kv: Mapping[str, Any]


@dataclass(frozen=True)
class ClientFault:
    """The instance refused the request itself (4xx); another would do the same."""

    status: int
    body: bytes
    content_type: str


@dataclass(frozen=True)
class Failed:
    """The instance could not do it."""

    trouble: Trouble
    detail: str


Outcome = Prefilled | ClientFault | Failed

PASSED_ON: Final = ("authorization", "traceparent", "tracestate", "x-session-id", "x-vllm-priority")
"""Client headers that a prefill instance gets too; X-Request-Id besides, on both legs alike."""


@dataclass(frozen=True)
class LegTimes:
    """Seconds."""

    connect: float = 2.0
    total: float = 300.0
    idle: float = 4.0
    """Keep-alive of unused connections: vLLM closes them after 5."""


class PrefillClient:
    """HTTP client of all prefill instances. Cancelling a leg closes its connection, which makes the instance abort."""

    def __init__(self, times: LegTimes | None = None) -> None:
        self.times = times or LegTimes()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> PrefillClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self.times.idle, socket_factory=probing_socket)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self.times.total, sock_connect=self.times.connect),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def run(self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str]) -> Outcome:
        """One leg. `headers` are the ones to send, content type excepted."""
        assert self._session is not None
        url = f"http://{endpoint.address}{path}"
        sent = {**headers, "content-type": "application/json"}
        try:
            async with self._session.post(url, data=io.BytesIO(body), headers=sent, allow_redirects=False) as response:
                answer = await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            return Failed(Trouble.UNREACHABLE, str(error))
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return Failed(Trouble.REFUSED if refused else Trouble.UNREACHABLE, str(error.os_error))
        except TimeoutError:
            return Failed(Trouble.TIMEOUT, f"no answer within {self.times.total:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Failed(Trouble.BROKEN, str(error))
        return _read(response.status, answer, response.headers.get("content-type", "application/json"))


def _read(status: int, answer: bytes, content_type: str) -> Outcome:
    if 400 <= status < 500:
        return ClientFault(status, answer, content_type)
    if status == 503:
        return Failed(Trouble.OVERLOADED, "status 503")
    if status != 200:
        return Failed(Trouble.SERVER_ERROR, f"status {status}")
    try:
        return Prefilled(descriptor(answer))
    except NoKVError as error:
        return Failed(Trouble.NO_KV, str(error))


def probing_socket(info: tuple[Any, ...]) -> socket.socket:
    """A socket that notices a dead line: while a leg waits for its answer no data moves, so only probes can tell."""
    made = socket.socket(family=info[0], type=info[1], proto=info[2])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 11_000)
    return made
