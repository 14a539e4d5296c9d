"""What a routing decision is made from: ready endpoints per role and link, and what each is doing now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Endpoint:
    """The HTTP server of one ready instance."""

    host: str
    """IP address."""
    port: int
    name: str = field(default="", compare=False)
    """Pod or instance name, for people."""
    compatibility_key: str | None = field(default=None, compare=False)
    """Key of the KV layout that it writes, if it was published with one."""

    @property
    def address(self) -> str:
        """`host:port` as Envoy writes it; IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Pools:
    """Ready endpoints by role; `remote` holds prefill endpoints by the link over which they are reached."""

    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
    remote: Mapping[str, tuple[Endpoint, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """What this router has in flight, and whom it leaves alone for now. Keys are addresses."""

    in_flight: Mapping[str, int] = field(default_factory=dict)
    """Prefill legs or streams that run now; absent: none."""
    skipped: frozenset[str] = frozenset()
    """Endpoints that did not take a connection a moment ago."""
