"""A live copy of one kind's objects: list once, then watch, for as long as the process runs.

Whatever happens to the connection, the copy heals and says so: an expired version lists again, a silent stream is taken
for dead, every other failure is retried with capped, jittered waits. Objects stay in the copy while the server is away
(`error` tells why): who needs the last known state has it. Callbacks run between two awaits, so they must be quick:
they enqueue a key or set an event. What a callback raises ends `run`: a bug must not leave a blind informer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType

from prfaas.kube.backoff import Backoff
from prfaas.kube.client import KubeClient
from prfaas.kube.errors import Gone, KubeError
from prfaas.kube.resources import Object, Resource

Name = tuple[str, str]
"""(namespace, name); the namespace is empty for kinds that have none."""


@dataclass(frozen=True)
class Change:
    """One object appeared (`old` None), changed, or went (`new` None)."""

    name: Name
    old: Object | None
    new: Object | None


@dataclass(frozen=True)
class WatchTimes:
    """Seconds. Servers send a bookmark about once a minute: keep `inactivity` above that."""

    server: float = 300.0
    inactivity: float = 70.0
    first_retry: float = 0.5
    longest_retry: float = 30.0


class Informer:
    """List and watch of one kind, in one namespace or all. Run it in a TaskGroup; it ends only by cancellation."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        fields: str | None = None,
        times: WatchTimes | None = None,
        backoff: Backoff | None = None,
        keep: Callable[[Object], Object] | None = None,
    ) -> None:
        """`keep` reduces each object to what is needed before it is stored (memory); managedFields always go."""
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._times = times or WatchTimes()
        self._backoff = backoff or Backoff(self._times.first_retry, self._times.longest_retry)
        self._keep = keep
        self._store: dict[Name, Object] = {}
        self._version: str | None = None
        self._on_change: list[Callable[[Change], None]] = []
        self._on_state: list[Callable[[], None]] = []
        self.synced = asyncio.Event()
        """Set once the first list is in; it stays set."""
        self.error: KubeError | None = None
        """Why the server is not being read now; None while it is."""
        self.last_contact: float | None = None
        """The event loop's time (monotonic seconds) of the last answer, event or bookmark."""

    @property
    def items(self) -> Mapping[Name, Object]:
        """The copy, read-only."""
        return MappingProxyType(self._store)

    def get(self, name: str, namespace: str = "") -> Object | None:
        return self._store.get((namespace, name))

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Called for every change of the copy, those of the first list included."""
        self._on_change.append(callback)

    def on_state(self, callback: Callable[[], None]) -> None:
        """Called when `synced` or `error` has changed."""
        self._on_state.append(callback)

    async def run(self) -> None:
        """Keeps the copy current until cancelled."""
        while True:
            wait: float | None = None
            try:
                if self._version is None:
                    await self._list()
                await self._follow()
            except Gone as error:
                # The server has forgotten our version: list again. That is healing, not losing the server; but a
                # server that says so time after time is waited for like any other trouble.
                self._version = None
                wait = self._backoff.next(error.retry_after)
            except KubeError as error:
                self._set_error(error)
                wait = self._backoff.next(error.retry_after)
            if wait is not None:
                await asyncio.sleep(wait)

    async def _list(self) -> None:
        answer = await self._client.list(self._resource, self._namespace, labels=self._labels, fields=self._fields)
        fresh = {_name(obj): self._reduced(obj) for obj in answer.items}
        self._version = answer.resource_version
        self._contact()
        for name in [name for name in self._store if name not in fresh]:
            self._put(name, None)
        for name, obj in fresh.items():
            self._put(name, obj)
        if not self.synced.is_set():
            self.synced.set()
            self._tell_state()

    async def _follow(self) -> None:
        """One watch, until the server ends it. What it brought is kept, so the next one goes on from there."""
        assert self._version is not None
        events = self._client.watch(
            self._resource,
            self._namespace,
            resource_version=self._version,
            labels=self._labels,
            fields=self._fields,
            server_timeout=self._times.server,
            inactivity=self._times.inactivity,
        )
        opened = asyncio.get_running_loop().time()
        brought = False
        async with aclosing(events):
            async for event in events:
                brought = True
                self._contact()
                self._backoff.reset()
                self._version = event.object["metadata"]["resourceVersion"]
                if event.type == "BOOKMARK":
                    continue
                obj = event.object
                self._put(_name(obj), None if event.type == "DELETED" else self._reduced(obj))
        self._contact()
        if not brought and asyncio.get_running_loop().time() - opened < self._backoff.base:
            # A server that closes every watch at once would otherwise be asked without a pause.
            await asyncio.sleep(self._backoff.next())

    def _reduced(self, obj: Object) -> Object:
        obj["metadata"].pop("managedFields", None)
        return self._keep(obj) if self._keep else obj

    def _put(self, name: Name, obj: Object | None) -> None:
        old = self._store.get(name)
        if obj is None:
            self._store.pop(name, None)
        else:
            self._store[name] = obj
        if old is obj is None or (old and obj and _version(old) == _version(obj)):
            return
        for callback in self._on_change:
            callback(Change(name, old, obj))

    def _contact(self) -> None:
        self.last_contact = asyncio.get_running_loop().time()
        if self.error is not None:
            self.error = None
            self._tell_state()

    def _set_error(self, error: KubeError) -> None:
        changed = self.error is None or (type(self.error), self.error.message) != (type(error), error.message)
        self.error = error
        if changed:
            self._tell_state()

    def _tell_state(self) -> None:
        for callback in self._on_state:
            callback()


def log_transitions(informer: Informer, log: logging.Logger, what: str) -> None:
    """One line when `what` (a noun in the plural) can no longer be watched, and one when it can again."""
    failing = False

    def told() -> None:
        nonlocal failing
        if informer.error is not None and not failing:
            log.warning("%s cannot be watched now, what is known of them stays: %s", what, informer.error)
        elif informer.error is None and failing:
            log.info("%s are watched again", what)
        failing = informer.error is not None

    informer.on_state(told)


def _name(obj: Object) -> Name:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(obj: Object) -> tuple[str, str]:
    """What tells two states of an object of one name apart: a re-created one has a new uid."""
    metadata = obj["metadata"]
    return metadata.get("uid", ""), metadata.get("resourceVersion", "")
