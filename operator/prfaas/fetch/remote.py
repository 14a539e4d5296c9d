"""Requests to a source: signed by it, explained by it, tried again where that may help.

A source knows its own manners: what it wants in a request, and what its refusals mean. What all have in common is here:
a server that is away, busy (429, Retry-After) or broken (5xx) is asked again, later and later, for a while.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

import aiohttp
from yarl import URL

from prfaas.api.conditions import Reason
from prfaas.fetch.errors import FetchError, Transient
from prfaas.fetch.listing import Listing

Sleep = Callable[[float], Awaitable[None]]
SILENCE_SECONDS = 60.0
"""How long a server may send nothing before it counts as away."""
_LONGEST_REFUSAL = 64 * 1024


class Source(Protocol):
    """One place that models come from."""

    @property
    def follows_redirects(self) -> bool:
        """Whether files may be somewhere else than where they are asked for."""

    @property
    def host(self) -> str:
        """Who is asked, for a person."""

    def headers(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of a request, with what proves who asks."""

    def explain(self, status: int, headers: Mapping[str, str], body: bytes) -> FetchError:
        """What a refusal means."""

    async def listing(self, remote: Remote) -> Listing:
        """The model's files. Raises FetchError."""


@dataclass(frozen=True)
class Patience:
    """How often a request may fail in a row, and how long is waited in between. Seconds."""

    tries: int = 8
    first: float = 1.0
    longest: float = 60.0
    asked: float = 300.0
    """Longest wait that a server may ask for; beyond it the fetch ends, and its next start is the next try."""


@dataclass
class Attempts:
    """Failures in a row of one thing."""

    patience: Patience
    sleep: Sleep
    failures: int = 0

    def progressed(self) -> None:
        """It went on: earlier failures do not count."""
        self.failures = 0

    async def again(self, error: Transient) -> None:
        """Wait for the next try, or raise the error when there have been enough."""
        self.failures += 1
        asked = error.retry_after or 0.0
        if self.failures >= self.patience.tries or asked > self.patience.asked:
            raise error
        backoff = min(self.patience.longest, self.patience.first * 2.0 ** (self.failures - 1))
        await self.sleep(max(asked, backoff * random.uniform(0.5, 1.0)))


@dataclass(frozen=True)
class Remote:
    """A source, and the session in which it is asked."""

    source: Source
    session: aiohttp.ClientSession
    patience: Patience
    sleep: Sleep

    def attempts(self) -> Attempts:
        """For one thing that may be tried more than once."""
        return Attempts(self.patience, self.sleep)

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One try of one request; the answer has status 200 or 206. Raises FetchError, Transient where it may pass."""
        asked = {"Accept-Encoding": "identity", **(headers or {})}
        try:
            async with self.session.request(
                method,
                URL(url, encoded=True),
                headers=self.source.headers(method, url, asked),
                allow_redirects=self.source.follows_redirects,
            ) as response:
                if response.status not in (200, 206):
                    raise self._refused(response, await response.content.read(_LONGEST_REFUSAL))
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            text = f"{self.source.host} does not answer as it should ({why(error)})"
            raise Transient(Reason.SOURCE_UNREACHABLE, text) from error

    async def read(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, dict[str, str]]:
        """Body and headers (names in lower case) of an answer, with as many tries as it takes. Raises FetchError."""
        attempts = self.attempts()
        while True:
            try:
                async with self.request(method, url, headers) as response:
                    found = {name.lower(): value for name, value in response.headers.items()}
                    return await response.read(), found
            except Transient as error:
                await attempts.again(error)

    def _refused(self, response: aiohttp.ClientResponse, body: bytes) -> FetchError:
        if response.status == 429:
            text = f"{self.source.host} has had too many requests; they are tried again later"
            return Transient(Reason.RATE_LIMITED, text, retry_after(response.headers, datetime.now(UTC)))
        if response.status >= 500 or response.status == 408:
            text = f"{self.source.host} answers with error {response.status}"
            return Transient(Reason.SOURCE_UNREACHABLE, text, retry_after(response.headers, datetime.now(UTC)))
        return self.source.explain(response.status, response.headers, body)


def retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds for which a server asks to wait: `Retry-After` in either form, or Hugging Face's `RateLimit: ..;t=55`."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    if text:
        try:
            return max(0.0, (parsedate_to_datetime(text) - now).total_seconds())
        except (ValueError, TypeError):
            pass
    found = re.search(r";\s*t=([0-9]{1,6})\b", headers.get("RateLimit", ""))
    return float(found[1]) if found else None


def why(error: BaseException) -> str:
    """What went wrong on the way, without addresses and times that change."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, TimeoutError):
        return "silence"
    return type(error).__name__ if isinstance(error, aiohttp.ClientError) else str(error) or type(error).__name__
