"""The peers of all links: one reading task per link, started, changed and stopped as links and their Secrets are.

`ensure` and `remove` are called from reconciles and return at once; `snapshot` is what is known now. When it changes,
`on_change` is called with the link's key, which enqueues the link. Stopping waits for every task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from prfaas.api.conditions import Reason
from prfaas.api.inter_cluster_link import InterClusterLinkSpec
from prfaas.kube.client import KubeClient
from prfaas.kube.errors import BadCredentials
from prfaas.kube.informer import WatchTimes
from prfaas.kube.resources import Key
from prfaas.links.contact import NotConnected, NotProbed
from prfaas.links.peer import Peer, PeerConfig, PeerSnapshot, peer_config


@dataclass
class _Entry:
    peer: Peer
    task: asyncio.Task[None]


class PeerRegistry:
    """An async context manager; leaving it stops all reading."""

    def __init__(
        self,
        local_client: KubeClient,
        on_change: Callable[[Key], None],
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        watch_times: WatchTimes | None = None,
    ) -> None:
        """`local_client` reads the exchange of this API server, for links whose peer is local."""
        self._local_client = local_client
        self._on_change = on_change
        self._now = now
        self._watch_times = watch_times
        self._entries: dict[Key, _Entry] = {}
        self._idle: dict[Key, tuple[PeerSnapshot, PeerConfig | None]] = {}
        """Links whose peer cannot be tried: why, and what it was before."""
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> PeerRegistry:
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in [*self._entries]:
            self.remove(key)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def ensure(self, key: Key, spec: InterClusterLinkSpec, kubeconfig: bytes | None) -> PeerSnapshot:
        """Has the link's peer read as `spec` says, with the Secret's kubeconfig (None: there is no such Secret or key).

        Nothing happens when all is as before. New credentials take over with what the old ones had read.
        """
        if spec.peer.source.local is None and kubeconfig is None:
            reference = spec.peer.source.kube_config_secret_ref
            where = f"{reference.name}, key {reference.key}" if reference else ""
            return self._cannot(
                key, Reason.SECRET_NOT_FOUND, f"there is no Secret {where}, in the operator's namespace"
            )
        try:
            config = peer_config(spec, kubeconfig)
        except BadCredentials as error:
            return self._cannot(key, Reason.KUBE_CONFIG_INVALID, error.message)
        entry = self._entries.get(key)
        if entry is not None and entry.peer.config == config:
            return entry.peer.snapshot
        known = self._known(key, config)
        self._stop(key)
        self._idle.pop(key, None)
        peer = Peer(
            key,
            config,
            self._local_client,
            self._on_change,
            known=known,
            now=self._now,
            watch_times=self._watch_times,
        )
        self._entries[key] = _Entry(peer, asyncio.create_task(peer.run(), name=f"peer of {key}"))
        return peer.snapshot

    def remove(self, key: Key) -> None:
        """Stops reading; the link is gone. Unknown keys are fine."""
        self._stop(key)
        self._idle.pop(key, None)

    def snapshot(self, key: Key) -> PeerSnapshot:
        """What is known of a link's peer now; of an unknown link, nothing."""
        if key in self._entries:
            return self._entries[key].peer.snapshot
        return self._idle[key][0] if key in self._idle else PeerSnapshot()

    def credentials(self) -> Mapping[Key, datetime]:
        """When the credentials end of those links whose credentials say so."""
        ends = {key: self.snapshot(key).credentials_expire_at for key in self._entries}
        return {key: end for key, end in ends.items() if end is not None}

    def _cannot(self, key: Key, reason: Reason, message: str) -> PeerSnapshot:
        """The peer cannot be tried. What was known of it stays, and so does the time since when there is no contact."""
        entry = self._entries.get(key)
        config = entry.peer.config if entry else self._idle[key][1] if key in self._idle else None
        before = self.snapshot(key)
        since = before.contact.lost_since if isinstance(before.contact, NotConnected) else self._now()
        snapshot = PeerSnapshot(
            contact=NotConnected(reason, message, since), config_map=before.config_map, read=before.read
        )
        self._stop(key)
        self._idle[key] = (snapshot, config)
        return snapshot

    def _known(self, key: Key, config: PeerConfig) -> PeerSnapshot | None:
        """What was read of the same pool, for a task with other credentials or probes."""
        entry = self._entries.get(key)
        snapshot, before = (entry.peer.snapshot, entry.peer.config) if entry else self._idle.get(key, (None, None))
        if snapshot is None or before is None or before.subject != config.subject:
            return None
        # What kept us from trying is over, but only contact itself ends the loss of contact.
        contact = snapshot.contact
        return PeerSnapshot(NotProbed() if key in self._idle else contact, snapshot.config_map, snapshot.read)

    def _stop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry.task.cancel()
        self._ending.add(entry.task)
        entry.task.add_done_callback(self._ending.discard)
