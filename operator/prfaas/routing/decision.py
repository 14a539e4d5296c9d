"""The routing decision: where a prompt is prefilled, by which instance, and who decodes it.

    uncached length above the threshold of a link that has a ready instance -> remote, over that link
    above a threshold, but no link can take it                              -> the policy's fallback
    otherwise                                                               -> local prefill
    more than one sequence                                                  -> the decode instance alone, no KV transfer

"Not needed" and "not available" are two reasons, never one. Among instances the one with the least in flight is taken;
equals are told apart by a hash of the request's key and the address, so that the choice is a function of its inputs and
still spreads. Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from prfaas.api.policy import Fallback, RoutingPolicy
from prfaas.routing.prompt import Prompt
from prfaas.routing.world import Endpoint, Load, Pools


class Reason(StrEnum):
    """Why a request was routed, or refused, as it was. A metric label and part of `x-prfaas-decision`."""

    SHORT = "Short"
    """Local: at or below every link's threshold, or no link is in the policy."""
    LONG = "Long"
    """Remote: above the link's threshold."""
    REMOTE_UNAVAILABLE = "RemoteUnavailable"
    """Above a threshold but no remote instance can take it: local under LocalPrefill, refused (503) under Reject."""
    LOCAL_UNAVAILABLE = "LocalUnavailable"
    """Remote although short: the pool has no ready prefill instance of its own."""
    MULTIPLE_SEQUENCES = "MultipleSequences"
    """n > 1, a batch or beam search: one KV descriptor cannot serve several sequences, the decode instance prefills."""
    MULTIPLE_SEQUENCES_TOO_LONG = "MultipleSequencesTooLong"
    """Refused (400): the same above a threshold, under Reject."""
    NO_PREFILL = "NoPrefillInstance"
    """Refused (503): no prefill instance, local or remote, can take it."""
    NO_DECODE = "NoDecodeInstance"
    """Refused (503): no decode instance can take it."""


@dataclass(frozen=True)
class Decision:
    """Where one attempt of a request goes."""

    reason: Reason
    decode: Endpoint
    prefill: Endpoint | None
    """None: no prefill leg, the decode instance computes the prompt itself."""
    link: str | None = None
    """Name of the link over which `prefill` is reached; None: local."""

    def __str__(self) -> str:
        where = "local" if self.link is None else f"remote; link={self.link}"
        return f"{where}; reason={self.reason}"


@dataclass(frozen=True)
class Refusal:
    """A request that is not routed, as the client will see it."""

    reason: Reason
    status: int
    message: str

    def __str__(self) -> str:
        return f"refused; reason={self.reason}"


def decide(
    prompt: Prompt,
    policy: RoutingPolicy,
    pools: Pools,
    load: Load,
    *,
    key: str,
    exclude: frozenset[str] = frozenset(),
    prefer: str | None = None,
) -> Decision | Refusal:
    """Route one attempt.

    `key` names the request and breaks ties. `exclude` are addresses that failed this very request; they are not chosen,
    even when nothing else is left. `prefer` is the prefill address that an earlier attempt used: its prefix cache still
    holds the prompt, so it is taken if it is a candidate.
    """
    decode = _least(pools.decode, load, key, exclude, last_resort=True)
    if decode is None:
        return Refusal(Reason.NO_DECODE, 503, "No decode instance is ready to take the request. Try again later.")

    above = [cut.link for cut in policy.thresholds if prompt.tokens > cut.tokens]
    if prompt.sequences > 1:
        if above and policy.fallback is Fallback.REJECT:
            lowest = min(cut.tokens for cut in policy.thresholds)
            message = (
                f"A request for several sequences (n, best_of, a batch of prompts) may have at most {lowest} prompt "
                f"tokens here; this one has about {prompt.tokens}. Send one sequence per request."
            )
            return Refusal(Reason.MULTIPLE_SEQUENCES_TOO_LONG, 400, message)
        return Decision(Reason.MULTIPLE_SEQUENCES, decode, None)

    def readable(link: str) -> list[Endpoint]:
        keys = {None, policy.compatibility_key}
        found = pools.remote.get(link, ())
        return [endpoint for endpoint in found if len(keys) == 1 or endpoint.compatibility_key in keys]

    # No last resort on a link: a line that does not answer is not tried again while its instances are skipped.
    def remote(links: Iterable[str]) -> tuple[str, Endpoint] | None:
        best = [
            (link, endpoint)
            for link in links
            if (endpoint := _least(readable(link), load, key, exclude, prefer=prefer)) is not None
        ]
        return min(best, key=lambda found: load.in_flight.get(found[1].address, 0), default=None)

    if above and (found := remote(above)) is not None:
        return Decision(Reason.LONG, decode, found[1], found[0])
    if above and policy.fallback is Fallback.REJECT:
        message = f"No remote prefill instance can take a prompt of about {prompt.tokens} tokens now. Try again later."
        return Refusal(Reason.REMOTE_UNAVAILABLE, 503, message)

    local = _least(pools.prefill, load, key, exclude, prefer=prefer, last_resort=True)
    if local is not None:
        return Decision(Reason.REMOTE_UNAVAILABLE if above else Reason.SHORT, decode, local)
    if not above and (found := remote(cut.link for cut in policy.thresholds)) is not None:
        return Decision(Reason.LOCAL_UNAVAILABLE, decode, found[1], found[0])
    return Refusal(Reason.NO_PREFILL, 503, "No prefill instance, local or remote, is ready to take the request.")


def choose_decode(pools: Pools, load: Load, *, key: str, exclude: frozenset[str] = frozenset()) -> Endpoint | None:
    """A decode instance for a request that has no prompt, such as `GET /v1/models`."""
    return _least(pools.decode, load, key, exclude, last_resort=True)


def _least(
    candidates: Iterable[Endpoint],
    load: Load,
    key: str,
    exclude: frozenset[str],
    *,
    prefer: str | None = None,
    last_resort: bool = False,
) -> Endpoint | None:
    allowed = [endpoint for endpoint in candidates if endpoint.address not in exclude]
    fit = [endpoint for endpoint in allowed if endpoint.address not in load.skipped]
    if not fit and last_resort:
        fit = allowed
    preferred = next((endpoint for endpoint in fit if endpoint.address == prefer), None)
    if preferred is not None:
        return preferred

    def rank(endpoint: Endpoint) -> tuple[int, int, str]:
        tie = zlib.crc32(f"{key} {endpoint.address}".encode("utf-8", "surrogateescape"))
        return (load.in_flight.get(endpoint.address, 0), tie, endpoint.address)

    return min(fit, key=rank, default=None)
