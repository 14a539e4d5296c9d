"""Bring the policy to the routers at once, and learn which of them use it.

Routers watch the ConfigMap themselves: this is the fast way and the acknowledgement, not the only way. A router that
does not answer is no error of the reconcile; it just has not acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.api import labels, router_pod
from prfaas.api.policy import RoutingPolicy

TIMEOUT_SECONDS = 3.0


class Routers:
    """HTTP to the admin port of router pods, with the operator's token. Close it."""

    def __init__(self, token: Path | None, *, port: int = labels.PORT_ROUTER_ADMIN) -> None:
        self._token = token
        self._port = port
        self._session: aiohttp.ClientSession | None = None
        self._newest: dict[str, tuple[int, int]] = {}

    def newest(self, pd_cluster_uid: str) -> tuple[int, int]:
        """The newest (epoch, version) that a router of that PDCluster ever said it uses, as far as we remember."""
        return self._newest.get(pd_cluster_uid, (0, 0))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def synchronise(self, policy: RoutingPolicy, addresses: Sequence[str], *, put: bool = True) -> frozenset[str]:
        """Addresses of the routers that use `policy`; with `put`, once it has been put to those that did not."""
        answers = await asyncio.gather(*(self._synchronise(policy, address, put) for address in addresses))
        return frozenset(address for address, uses in zip(addresses, answers, strict=True) if uses)

    async def _synchronise(self, policy: RoutingPolicy, address: str, put: bool) -> bool:
        if self._token is None:
            return False
        try:
            answer = await self._ask("GET", address)
            if _uses(answer, policy):
                return True
            self._remember(answer, policy.pd_cluster_uid)
            return put and _uses(await self._ask("PUT", address, policy.to_wire()), policy)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False

    def _remember(self, answer: Any, uid: str) -> None:
        if isinstance(answer, dict) and answer.get("pdClusterUID") == uid:
            order = answer.get("epoch"), answer.get("version")
            if all(isinstance(each, int) for each in order):
                self._newest[uid] = max(self.newest(uid), (int(answer["epoch"]), int(answer["version"])))

    async def _ask(self, method: str, address: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a router answers, whatever the status."""
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        assert self._token is not None
        host = f"[{address}]" if ":" in address else address
        async with self._session.request(
            method,
            f"http://{host}:{self._port}{router_pod.POLICY_PATH}",
            json=body,
            # Read anew each time: kubelet renews the token in its file.
            headers={"Authorization": f"Bearer {self._token.read_text().strip()}"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            allow_redirects=False,
        ) as response:
            return await response.json(content_type=None)


def _uses(answer: Any, policy: RoutingPolicy) -> bool:
    """Whether an answer says that exactly this document is in force."""
    wire = policy.to_wire()
    members = ("pdClusterUID", "epoch", "version", "hash")
    return isinstance(answer, dict) and all(answer.get(member) == wire[member] for member in members)
