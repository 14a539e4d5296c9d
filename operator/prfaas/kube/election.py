"""One leader per datacenter, by a Lease: at any moment at most one process believes that it leads.

Time is only ever measured on our own monotonic clock, from our own observations:

* A leader's term ends `renew_deadline` after it *sent* its last successful renewal. A renewal is a replace under
  resourceVersion; anything but its success (refusal, conflict, hang, a bug in the client) counts as not renewed.
* A candidate takes a Lease over only when it has watched it unchanged for a whole `lease_duration`, which is longer
  than `renew_deadline`. Since a renewal is sent before any candidate can see it, the old term has ended by then.
* The difference of the two is the time in which the loser's work must end. The caller ends the process then.

Each term has an epoch, the Lease's `leaseTransitions`: it grows with every change of hands, and what a leader writes
carries it, so that a reader can refuse what a process wrote that was frozen through the end of its term.

One case is outside of this: a Lease deleted by hand. Its leader puts it back at the next renewal and candidates that
know it wait as ever, but a process that starts in between finds none, makes one and leads, until then beside the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from prfaas.kube.errors import Conflict, KubeError, NotFound
from prfaas.kube.resources import LEASE, Object, Resource

log = logging.getLogger(__name__)


class LeadershipLost(Exception):  # noqa: N818  # it is news, not an error
    """The term ended by itself. Its work has been cancelled; the process must end, for what it holds is stale."""


class LeaseApi(Protocol):
    """What the elector needs of a client."""

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object: ...
    async def create(self, obj: Object) -> Object: ...
    async def replace(self, obj: Object) -> Object: ...


@dataclass(frozen=True)
class ElectionTimes:
    """Seconds, as other controllers use them."""

    lease_duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_period < self.renew_deadline < self.lease_duration:
            raise ValueError("an election needs 0 < retry_period < renew_deadline < lease_duration")

    @property
    def request_timeout(self) -> float:
        """Half the deadline, so that one hanging request leaves time for another try."""
        return self.renew_deadline / 2


@dataclass(frozen=True)
class Observation:
    """A Lease as we last saw it change, and when (our monotonic seconds)."""

    holder: str
    version: str
    duration: float
    transitions: int
    since: float

    def free_at(self, identity: str, at_least: float) -> float:
        """From when on `identity` may take the Lease: at once if nobody else holds it, else when it has run out."""
        if self.holder in ("", identity):
            return self.since
        return self.since + max(self.duration, at_least)


def observe(lease: Object, now: float, before: Observation | None) -> Observation:
    """What a fresh reading tells: a Lease that did not change keeps the time at which we first saw it so."""
    spec = lease.get("spec") or {}
    version = lease["metadata"]["resourceVersion"]
    since = before.since if before is not None and before.version == version else now
    return Observation(
        holder=spec.get("holderIdentity") or "",
        version=version,
        duration=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        since=since,
    )


class Elector:
    """Runs `lead` when this process holds the Lease. One per process; `identity` is unique per process start.

    `api` is a client of its own: its writes must not pass the gate that `require` makes for the others'.
    """

    def __init__(
        self,
        api: LeaseApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: ElectionTimes | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times or ElectionTimes()
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sleep = sleep
        self._utc = utc
        self._jitter = jitter
        self._seen: Observation | None = None
        self._lease: Object | None = None
        self._term_ends = float("-inf")
        self.epoch: int | None = None
        """Of the current term; None while not leading."""

    @property
    def leading(self) -> bool:
        """Whether the term is running at this very moment; a process that was frozen finds out here."""
        return self.epoch is not None and self._clock() < self._term_ends

    def require(self) -> None:
        """Raises LeadershipLost unless leading; a client's `write_gate`."""
        if not self.leading:
            raise LeadershipLost(f"{self._identity} does not lead")

    async def run(self, lead: Callable[[int], Awaitable[None]]) -> None:
        """Waits for the Lease, then runs `lead(epoch)` once; returns when `lead` returns, having given the Lease up.

        Cancelled: `lead` is cancelled and awaited, then the Lease is given up. Raises LeadershipLost when the term
        ends by itself, after `lead` was cancelled and had until the Lease's end to finish; and what `lead` raises.
        """
        epoch = await self._acquire()
        work = asyncio.ensure_future(lead(epoch))
        keep = asyncio.ensure_future(self._keep())
        try:
            await asyncio.wait({work, keep}, return_when=asyncio.FIRST_COMPLETED)
            graceful = work.done()
        finally:
            failure = await self._end(work, keep)
            # Only when the work has really ended may another begin at once; otherwise it waits for the Lease's end.
            if work.done() and self.leading:
                await self._release()
            self.epoch = None
        if not graceful:
            raise LeadershipLost(f"{self._identity} lost the lease {self._namespace}/{self._name}") from failure
        if failure is not None:
            raise failure

    async def _end(self, work: asyncio.Future[None], keep: asyncio.Future[None]) -> BaseException | None:
        """Ends the work within what is left of the Lease, then the renewal; returns what the work raised."""
        work.cancel()
        try:
            # Renewal goes on meanwhile, if it still can, so that slow work ends under the Lease.
            spare = self._times.lease_duration - self._times.renew_deadline
            await asyncio.wait({work}, timeout=max(0.0, self._term_ends + spare - self._clock()))
        finally:
            keep.cancel()
        await asyncio.wait({keep})
        return work.exception() if work.done() and not work.cancelled() else None

    async def _acquire(self) -> int:
        failing = False
        while True:
            try:
                sent = self._clock()
                async with asyncio.timeout(self._times.request_timeout):
                    epoch = await self._try_to_take(sent)
                failing = False
            except (KubeError, TimeoutError) as error:
                # The first of a row: a server that is away is asked every few seconds.
                if not failing:
                    log.info("lease %s/%s: not acquired: %s", self._namespace, self._name, _text(error))
                failing = True
                epoch = None
            if epoch is not None:
                self.epoch = epoch
                log.info("leading as %s, epoch %d", self._identity, epoch)
                return epoch
            await self._sleep(self._times.retry_period * (1 + 0.2 * self._jitter()))

    async def _try_to_take(self, sent: float) -> int | None:
        try:
            lease = await self._api.get(LEASE, self._name, self._namespace)
        except NotFound:
            # Deleted under a leader that we saw: that leader's term runs on until its next renewal fails.
            if self._seen is not None and self._clock() < self._free_at(self._seen):
                return None
            return await self._take(self._api.create, None, 1 + (self._seen.transitions if self._seen else 0), sent)
        self._seen = observe(lease, self._clock(), self._seen)
        if self._clock() < self._free_at(self._seen):
            return None
        return await self._take(self._api.replace, self._seen.version, self._seen.transitions + 1, sent)

    def _free_at(self, seen: Observation) -> float:
        return seen.free_at(self._identity, self._times.lease_duration)

    async def _take(
        self, write: Callable[[Object], Awaitable[Object]], version: str | None, epoch: int, sent: float
    ) -> int:
        now = self._now()
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._times.lease_duration),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": epoch,
        }
        self._lease = await write(self._lease_with(spec, version))
        self._term_ends = sent + self._times.renew_deadline
        return epoch

    async def _keep(self) -> None:
        """Renews until the term has ended; returns then."""
        while True:
            await self._sleep(min(self._times.retry_period, max(0.0, self._term_ends - self._clock())))
            sent = self._clock()
            if sent >= self._term_ends:
                return
            try:
                async with asyncio.timeout(min(self._times.request_timeout, self._term_ends - sent)):
                    await self._renew(sent)
            except Exception as error:  # noqa: BLE001  # a client's bug must count as "not renewed", never as leading on
                log.warning("lease %s/%s: not renewed: %s", self._namespace, self._name, _text(error))

    async def _renew(self, sent: float) -> None:
        now = self._now()
        wanted = {"renewTime": now}
        try:
            await self._replace_ours(wanted)
        except NotFound:
            assert self._lease is not None
            spec = {**self._lease["spec"], **wanted}
            self._lease = await self._api.create(self._lease_with(spec))
        self._term_ends = sent + self._times.renew_deadline

    async def _release(self) -> None:
        log.info("giving up the lease %s/%s", self._namespace, self._name)
        self._term_ends = float("-inf")
        try:
            async with asyncio.timeout(self._times.request_timeout):
                await self._replace_ours({"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._now()})
        except (KubeError, TimeoutError) as error:
            log.warning("lease %s/%s: not given up: %s", self._namespace, self._name, _text(error))

    async def _replace_ours(self, changes: Object) -> None:
        """Changes the Lease while it is ours. Raises Conflict, and ends the term, when it is another's by now."""
        assert self._lease is not None
        while True:
            spec = {**self._lease["spec"], **changes}
            try:
                self._lease = await self._api.replace(
                    self._lease_with(spec, self._lease["metadata"]["resourceVersion"])
                )
                return
            except Conflict:
                # It is another's, or somebody touched it, or an earlier renewal was stored and its answer lost.
                self._lease = await self._api.get(LEASE, self._name, self._namespace)
                spec = self._lease.get("spec") or {}
                if (spec.get("holderIdentity"), spec.get("leaseTransitions")) != (self._identity, self.epoch):
                    self._term_ends = float("-inf")
                    raise

    def _now(self) -> str:
        """For people who read the Lease; nothing here reads it."""
        return self._utc().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _lease_with(self, spec: Object, version: str | None = None) -> Object:
        metadata = {"name": self._name, "namespace": self._namespace}
        if version is not None:
            metadata["resourceVersion"] = version
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}


def _text(error: BaseException) -> str:
    return str(error) or "no answer in time"
