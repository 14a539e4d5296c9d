"""The policy in force: one document, replaced only by one that comes after it.

Documents arrive from two sides, the ConfigMap and `PUT /v1/policy`, in any order. An invalid or older one changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.api.policy import RoutingPolicy, supersedes


class Offer(StrEnum):
    """What became of a document."""

    ACCEPTED = "Accepted"
    UNCHANGED = "Unchanged"
    """It is the one in force."""
    STALE = "Stale"
    """It is older than the one in force, or of another PDCluster than the API's."""


@dataclass
class PolicyStore:
    """Holds the policy; `on_change` is called with each new one."""

    on_change: Callable[[RoutingPolicy], None] = lambda _: None
    current: RoutingPolicy | None = None
    _uid_in_api: str | None = field(default=None)

    def from_api(self, policy: RoutingPolicy) -> Offer:
        """The ConfigMap as read from the API; its PDCluster is the one that exists."""
        self._uid_in_api = policy.pd_cluster_uid
        return self.offer(policy)

    def offer(self, policy: RoutingPolicy) -> Offer:
        """Take the document if it comes after the one in force."""
        if policy == self.current:
            return Offer.UNCHANGED
        if not supersedes(policy, self.current, self._uid_in_api):
            return Offer.STALE
        self.current = policy
        self.on_change(policy)
        return Offer.ACCEPTED
