"""The blocks that a prefill worker keeps for decode workers: granted, renewed, taken once, freed. No I/O, no clock.

As in vLLM 0.33 a lease starts when the prefill ends and lasts `kv_lease_duration`; a heartbeat, six of them per lease,
sets its end to two thirds of that from now if that is later; when it ends the blocks are freed and counted. Unlike
vLLM, which lets a late or second reader read reused blocks and answer 200, a lease can be taken once, and never after
its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.worker.faults import KVFault

EXTENSION = 2 / 3
_REMEMBERED = 4096


class LeaseError(Exception):
    """A lease cannot be taken; `reason` is one word for the wire and for tests."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(eq=False)
class Lease:
    """One prefilled KV cache that waits for its reader."""

    request_id: str
    state: bytes
    tokens: int
    blocks: str
    """Digest of the block ids, see params.blocks_digest."""
    deadline: float
    free: Callable[[], None]
    """Gives the blocks back."""
    fault: KVFault | None = None
    """What becomes of its transfer, on request."""
    taken: bool = False
    pinned: bool = False
    """Being written to its reader: does not end by time."""
    ended: bool = False


def heartbeat_seconds(lease: float) -> float:
    """How often a heartbeat is sent for a lease of so many seconds: a sixth, in whole seconds as vLLM divides.

    Below six seconds vLLM beats on every step of its engine; here it stays a sixth.
    """
    return lease // 6 if lease >= 6 else lease / 6


def extension_seconds(lease: float) -> float:
    """What a heartbeat gives a lease of so many seconds: two thirds, in whole seconds as vLLM divides."""
    return lease * 2 // 3 if lease >= 2 else lease * EXTENSION


class LeaseTable:
    """All leases of one engine. Times are seconds of the caller's clock, the durations already scaled.

    `extension`: what a heartbeat gives, two thirds of the duration by default.
    """

    def __init__(self, duration: float, extension: float | None = None) -> None:
        self.duration = duration
        self._extension = duration * EXTENSION if extension is None else extension
        self._leases: dict[str, Lease] = {}
        # How former leases ended, so that a second use and a late one are told apart.
        self._endings: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def has(self, request_id: str) -> bool:
        """Whether there is such a lease now."""
        return request_id in self._leases

    def grant(self, lease: Lease) -> None:
        """Keep the blocks of a finished prefill until its deadline."""
        self._leases[lease.request_id] = lease

    def renew(self, request_id: str, now: float) -> bool:
        """A heartbeat came; False if there is no such lease any more."""
        lease = self._leases.get(request_id)
        if lease is not None:
            lease.deadline = max(lease.deadline, now + self._extension)
        return lease is not None

    def take(self, request_id: str, blocks: object, tokens: object, now: float) -> Lease:
        """The lease, for the one transfer it is good for; LeaseError with the reason otherwise."""
        lease = self._leases.get(request_id)
        if lease is None:
            ending = self._endings.get(request_id, "unknown")
            raise LeaseError(ending, f"no KV for request {request_id}: {ending}")
        if lease.taken:
            raise LeaseError("used", f"KV of request {request_id} is being transferred already")
        if (blocks, tokens) != (lease.blocks, lease.tokens):
            raise LeaseError("mismatch", f"request {request_id} holds other blocks than those asked for")
        lease.taken = True
        self.renew(request_id, now)
        return lease

    def end(self, request_id: str, how: str) -> bool:
        """Free the blocks: `used` after a transfer, `released` without one; False if they are freed already."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return False
        lease.ended = True
        lease.free()
        self._endings[request_id] = how
        if len(self._endings) > _REMEMBERED:
            self._endings.popitem(last=False)
        return True

    def ending(self, request_id: str) -> str | None:
        """How a former lease ended; None if it is unknown or not over."""
        return self._endings.get(request_id)

    def expire(self, now: float) -> list[str]:
        """End every lease whose deadline has come; their request ids."""
        over = [lease.request_id for lease in self._leases.values() if lease.deadline <= now and not lease.pinned]
        for request_id in over:
            self.end(request_id, "expired")
        return over

    def next_deadline(self) -> float | None:
        """When the next lease ends; None without leases."""
        return min((lease.deadline for lease in self._leases.values() if not lease.pinned), default=None)
