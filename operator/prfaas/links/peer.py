"""One peer, read by one task of its own: connect, list and watch its exchange, probe, and say when something changed.

The task survives everything that a peer can do to it: refuse, hang, send nonsense, come back. While the peer is away,
the document read last stays in the snapshot, since what is mirrored from it stays too. Losing contact also throws the
connection away: a new one is probed instead of waiting for a dead one to time out. Nothing here is shared with other
peers but the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from prfaas.api.common import duration_seconds
from prfaas.api.conditions import Reason
from prfaas.api.exchange import document_name
from prfaas.api.inter_cluster_link import InterClusterLinkSpec, Probe, RemotePool
from prfaas.kube.backoff import Backoff
from prfaas.kube.client import KubeClient, Timeouts
from prfaas.kube.errors import BadCredentials, Forbidden, KubeError, Unauthorized, Unreachable
from prfaas.kube.informer import Informer, WatchTimes
from prfaas.kube.kubeconfig import Credentials, parse_kubeconfig
from prfaas.kube.resources import CONFIG_MAP, Key, Object
from prfaas.links.contact import NOT_PROBED, Connected, Contact, NotConnected, Tracker

log = logging.getLogger("prfaas.links")

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Largest answer that is read from a peer."""


@dataclass(frozen=True)
class PeerConfig:
    """All that decides how a peer is read. Another config means another task."""

    exchange_namespace: str
    remote: RemotePool
    cluster_id: str
    probe: Probe
    credentials: Credentials | None
    """None: the peer is this API server."""

    @property
    def subject(self) -> tuple[str, str, RemotePool]:
        """What is read; while it stays the same, what was read is worth keeping."""
        return self.cluster_id, self.exchange_namespace, self.remote


@dataclass(frozen=True)
class PeerSnapshot:
    """What is known of a peer now."""

    contact: Contact = NOT_PROBED
    config_map: Object | None = None
    """The remote pool's ConfigMap as read last; None: it is not there."""
    read: bool = False
    """Whether the exchange was ever read: before that, `config_map` None means nothing."""
    local: bool = False
    """Whether the peer is this API server."""
    credentials_expire_at: datetime | None = None


class Peer:
    """Reads one link's peer. `run` ends only by cancellation."""

    def __init__(
        self,
        key: Key,
        config: PeerConfig,
        local_client: KubeClient,
        on_change: Callable[[Key], None],
        *,
        known: PeerSnapshot | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        watch_times: WatchTimes | None = None,
    ) -> None:
        """`known`: what a task before this one knew of the same pool. `on_change` gets `key` after each change."""
        self.key = key
        self.config = config
        self._local_client = local_client
        self._on_change = on_change
        self._now = now
        self._period = float(duration_seconds(config.probe.period))
        self._timeout = float(duration_seconds(config.probe.timeout))
        self._watch_times = watch_times or WatchTimes(longest_retry=max(1.0, self._period))
        known = known or PeerSnapshot()
        self._tracker = Tracker(config.probe.failure_threshold, config.probe.success_threshold, known.contact)
        self._snapshot = replace(
            known,
            local=config.credentials is None,
            credentials_expire_at=config.credentials.expires_at if config.credentials else None,
        )

    @property
    def snapshot(self) -> PeerSnapshot:
        return self._snapshot

    async def run(self) -> None:
        """Reads the peer until cancelled, starting over with a new connection whenever contact is lost."""
        backoff = Backoff(1.0, max(1.0, self._period))
        while True:
            try:
                await self._session()
            except BadCredentials as error:
                self._update(self._tracker.failed(Reason.KUBE_CONFIG_INVALID, error.message, self._now()))
            except Exception:
                # A bug that this peer's data brings to light must not end the reading of other peers, or the operator.
                log.exception("bug in reading a peer", extra=self._names())
                self._update(self._tracker.failed(Reason.UNREACHABLE, "its answers cannot be processed", self._now()))
            await asyncio.sleep(backoff.next())

    async def _session(self) -> None:
        """One connection; returns when contact has been lost over it."""
        async with self._client() as client:
            informer = Informer(
                client,
                CONFIG_MAP,
                namespace=self.config.exchange_namespace,
                fields=f"metadata.name={self._document_name}",
                times=self._watch_times,
            )
            informer.on_change(lambda change: self._read(informer))
            informer.on_state(lambda: self._read(informer))
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(informer.run())
                await self._probe_until_lost(client, informer)
                reading.cancel()

    async def _probe_until_lost(self, client: KubeClient, informer: Informer) -> None:
        # The first verdict should not have to wait a period for the first list to come in.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await informer.synced.wait()
        while True:
            was_connected = not isinstance(self._tracker.contact, NotConnected)
            self._update(await self._probe(client, informer))
            if was_connected and isinstance(self._tracker.contact, NotConnected):
                return
            await asyncio.sleep(self._period)

    async def _probe(self, client: KubeClient, informer: Informer) -> Tracker:
        """The peer must answer now, and its exchange must be being read."""
        try:
            version = await self._version(client)
            if informer.error is not None:
                raise informer.error
            if not informer.synced.is_set():
                raise Unreachable("its exchange namespace has not been read yet")
        except KubeError as error:
            return self._tracker.failed(_reason(error), _message(error, self.config.exchange_namespace), self._now())
        return self._tracker.answered(version)

    async def _version(self, client: KubeClient) -> str:
        try:
            return await client.version()
        except Forbidden:  # it answers, though not this; what matters is whether the exchange may be read
            return ""

    def _read(self, informer: Informer) -> None:
        """Takes over what the informer has. Before its first list is in, what was known before stands."""
        if not informer.synced.is_set():
            return
        config_map = informer.get(self._document_name, self.config.exchange_namespace)
        self._publish(replace(self._snapshot, config_map=config_map, read=True))

    def _update(self, tracker: Tracker) -> None:
        before, self._tracker = self._tracker.contact, tracker
        if type(before) is not type(tracker.contact):
            text = {Connected: "peer connected", NotConnected: "peer lost"}.get(type(tracker.contact))
            if text is not None:
                detail = tracker.contact.message if isinstance(tracker.contact, NotConnected) else ""
                log.info("%s%s", text, f": {detail}" if detail else "", extra=self._names())
        self._publish(replace(self._snapshot, contact=tracker.contact))

    def _publish(self, snapshot: PeerSnapshot) -> None:
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._on_change(self.key)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[KubeClient]:
        if self.config.credentials is None:
            yield self._local_client
            return
        timeouts = Timeouts(connect=self._timeout, call=self._timeout)
        async with KubeClient.from_credentials(
            self.config.credentials, timeouts=timeouts, max_bytes=MAX_ANSWER_BYTES
        ) as client:
            yield client

    @property
    def _document_name(self) -> str:
        remote = self.config.remote
        return document_name(remote.kind, remote.namespace, remote.name)

    def _names(self) -> dict[str, str]:
        return {
            "kind": self.key.kind,
            "namespace": self.key.namespace,
            "object": self.key.name,
            "peer": self.config.cluster_id,
        }


def peer_config(spec: InterClusterLinkSpec, kubeconfig: bytes | None) -> PeerConfig:
    """How a link's peer is read; `kubeconfig` is the Secret's content. Raises BadCredentials."""
    peer = spec.peer
    credentials = None
    if peer.source.local is None:
        if kubeconfig is None:
            raise BadCredentials("there is no kubeconfig")
        credentials = parse_kubeconfig(kubeconfig)
    return PeerConfig(peer.exchange_namespace, spec.remote, peer.cluster_id, spec.probe, credentials)


def _reason(error: KubeError) -> Reason:
    if isinstance(error, Unauthorized):
        return Reason.UNAUTHORIZED
    if isinstance(error, Forbidden):
        return Reason.FORBIDDEN
    return Reason.UNREACHABLE


def _message(error: KubeError, namespace: str) -> str:
    if isinstance(error, Unauthorized):
        return "the peer does not accept the credentials of the kubeconfig; make new ones with `prfaas link offer`"
    if isinstance(error, Forbidden):
        return f"the kubeconfig may not read ConfigMaps in the peer's namespace {namespace}: {error.message}"
    return f"the peer's API server: {error.message}"
