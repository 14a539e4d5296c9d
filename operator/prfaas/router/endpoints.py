"""Which endpoints there are: EndpointSlices read into pools.

An endpoint counts from the moment its slice says ready to the moment it says otherwise; one that terminates is gone,
even while it still serves what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from prfaas.api import labels
from prfaas.routing.world import Endpoint, Pools

_KIND = "pdcluster"


class EndpointSource(Protocol):
    """Where the pools come from. Kubernetes in a pod, memory in a test."""

    @property
    def synced(self) -> bool:
        """Whether `pools` was read at least once. An empty pool before that means nothing."""

    @property
    def pools(self) -> Pools:
        """The ready endpoints now."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this after every change of `pools`."""


def read_pools(slices: Iterable[Mapping[str, Any]], cluster: str) -> Pools:
    """The pools of one PDCluster from all of our EndpointSlices in its namespace.

    Slices say by their labels what they list: role, compatibility key, and the PDCluster or the link. Kubernetes copies
    them from the Service. `remote` has every link that is mirrored here; the policy says which of them are used.
    """
    local: dict[str, set[Endpoint]] = {labels.ROLE_PREFILL: set(), labels.ROLE_DECODE: set()}
    remote: dict[str, set[Endpoint]] = {}
    for piece in slices:
        marks = piece["metadata"].get("labels") or {}
        role, link = marks.get(labels.ROLE, ""), marks.get(labels.LINK, "")
        if link:
            if role == labels.ROLE_PREFILL:
                remote.setdefault(link, set()).update(_ready(piece))
        elif role in local and (marks.get(labels.KIND), marks.get(labels.CLUSTER)) == (_KIND, cluster):
            local[role].update(_ready(piece))
    return Pools(
        prefill=tuple(sorted(local[labels.ROLE_PREFILL])),
        decode=tuple(sorted(local[labels.ROLE_DECODE])),
        remote={link: tuple(sorted(found)) for link, found in sorted(remote.items())},
    )


def _ready(piece: Mapping[str, Any]) -> Iterable[Endpoint]:
    port = _http_port(piece.get("ports") or [])
    if port is None or piece.get("addressType") not in ("IPv4", "IPv6"):
        return
    key = piece["metadata"]["labels"].get(labels.COMPATIBILITY_KEY)
    for endpoint in piece.get("endpoints") or []:
        conditions = endpoint.get("conditions") or {}
        # Absent means true for ready, false for terminating (the API's rule).
        if conditions.get("ready") is False or conditions.get("terminating"):
            continue
        name = (endpoint.get("targetRef") or {}).get("name") or endpoint.get("hostname") or ""
        for address in endpoint.get("addresses", [])[:1]:
            yield Endpoint(address, port, name, key)


def _http_port(ports: list[Mapping[str, Any]]) -> int | None:
    """The port named `http`, or the only one."""
    named = next((port for port in ports if port.get("name") == "http"), ports[0] if len(ports) == 1 else None)
    return None if named is None else named.get("port")
