"""The routing decision: where a prompt is prefilled, by which instance, and who decodes it.

    uncached length above the threshold of a link that has a ready instance -> remote, over that link
    above a threshold, but no link can take it                              -> the policy's fallback
    otherwise                                                               -> local prefill
    short, and no ready prefill instance here                               -> remote, over any link
    no prefill instance at all, here or remote                              -> the decode instance alone
    more than one sequence                                                  -> the decode instance alone, no KV transfer

Prefill and decode instance always have one compatibility key: KV cache of one cannot be read by another. Instances of
one key are a group, and a line of the table holds as soon as some group can do it. Where several can, the pair is
taken that has the least in flight together, so that each group gets about what its instances can take. A decode
instance prefills alone only if its group has no prefill instance at all, as between two steps of a rollout. Where there
are some that merely fail, it does not: that would hide the fault, and long prompts would stall the answers under way.

"Not needed" and "not available" are two reasons, never one. Among instances the one with the least in flight is taken;
equals are told apart by a hash of the request's key and the address, so that the choice is a function of its inputs and
still spreads. Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
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
    DECODE_ALONE = "DecodeAlone"
    """Local, without KV transfer: the decode instance's group has no prefill instance, local or remote."""
    NO_PREFILL = "NoPrefillInstance"
    """Refused (503): there are prefill instances, local or remote, but none can take it."""
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

    @property
    def key(self) -> str | None:
        """Compatibility key of the group that serves the request; None: its instances say none."""
        return self.decode.compatibility_key

    def __str__(self) -> str:
        where = "local" if self.link is None else f"remote; link={self.link}"
        group = "" if self.key is None else f"; key={self.key}"
        return f"{where}{group}; reason={self.reason}"


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
    choice = _Choice(load, key, exclude, prefer)
    decode = choice.by_group(pools.decode), choice.by_group(pools.decode, last_resort=True)
    if not decode[1]:
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
        return Decision(Reason.MULTIPLE_SEQUENCES, choice.least((decode[0] or decode[1]).values()), None)

    # No last resort on a link: a line that does not answer is not tried again while its instances are skipped.
    def remote(links: Sequence[str]) -> tuple[Endpoint, Endpoint, str] | None:
        prefill = {link: choice.by_group(pools.remote.get(link, ())) for link in links}
        for some in decode:
            pairs = [(*pair, link) for link in links if (pair := choice.pair(some, prefill[link])) is not None]
            if pairs:
                return min(pairs, key=lambda each: choice.together(each[0], each[1]))
        return None

    if above and (found := remote(above)) is not None:
        return Decision(Reason.LONG, *found)
    if above and policy.fallback is Fallback.REJECT:
        message = f"No remote prefill instance can take a prompt of about {prompt.tokens} tokens now. Try again later."
        return Refusal(Reason.REMOTE_UNAVAILABLE, 503, message)

    local = choice.by_group(pools.prefill), choice.by_group(pools.prefill, last_resort=True)
    for some_decode, some_prefill in zip(decode, local, strict=True):
        if (pair := choice.pair(some_decode, some_prefill)) is not None:
            return Decision(Reason.REMOTE_UNAVAILABLE if above else Reason.SHORT, *pair)
    links = [cut.link for cut in policy.thresholds]
    if not above and (found := remote(links)) is not None:
        return Decision(Reason.LOCAL_UNAVAILABLE, *found)
    others = [*pools.prefill, *(endpoint for link in links for endpoint in pools.remote.get(link, ()))]
    keys = {endpoint.compatibility_key for endpoint in others}
    for some in decode:
        if lone := [endpoint for group, endpoint in some.items() if group not in keys]:
            return Decision(Reason.DECODE_ALONE, choice.least(lone), None)
    return Refusal(Reason.NO_PREFILL, 503, "No prefill instance, local or remote, is ready to take the request.")


def choose_decode(pools: Pools, load: Load, *, key: str, exclude: frozenset[str] = frozenset()) -> Endpoint | None:
    """A decode instance for a request that has no prompt, such as `GET /v1/models`."""
    choice = _Choice(load, key, exclude)
    found = choice.by_group(pools.decode) or choice.by_group(pools.decode, last_resort=True)
    return choice.least(found.values()) if found else None


Group = str | None
"""A compatibility key; None: of endpoints that say none."""


@dataclass(frozen=True)
class _Choice:
    """How one attempt chooses among endpoints: its load, its name, and what it keeps away from or comes back to."""

    load: Load
    key: str
    exclude: frozenset[str]
    prefer: str | None = None

    def by_group(self, endpoints: Iterable[Endpoint], *, last_resort: bool = False) -> dict[Group, Endpoint]:
        """Of each group the endpoint to take. `last_resort`: one that is skipped, in a group that has no other."""
        groups: dict[Group, list[Endpoint]] = {}
        for endpoint in endpoints:
            if endpoint.address not in self.exclude:
                groups.setdefault(endpoint.compatibility_key, []).append(endpoint)
        found = {}
        for group, members in groups.items():
            fit = [endpoint for endpoint in members if endpoint.address not in self.load.skipped]
            if fit or last_resort:
                found[group] = self.least(fit or members)
        return found

    def least(self, endpoints: Iterable[Endpoint]) -> Endpoint:
        """The one to take of some that are equally good otherwise. Raises ValueError for none."""
        return min(endpoints, key=self._rank)

    def pair(self, decode: Mapping[Group, Endpoint], prefill: Mapping[Group, Endpoint]) -> _Pair | None:
        """The pair to take among the groups that have both."""
        pairs = [(endpoint, prefill[group]) for group, endpoint in decode.items() if group in prefill]
        return min(pairs, key=lambda pair: (self.together(*pair), self._rank(pair[0])), default=None)

    def together(self, decode: Endpoint, prefill: Endpoint) -> tuple[bool, int]:
        """Sort key of a pair: where the prompt is cached already, then the least in flight on both."""
        return prefill.address != self.prefer, self._busy(decode) + self._busy(prefill)

    def _rank(self, endpoint: Endpoint) -> tuple[bool, int, int, str]:
        tie = zlib.crc32(f"{self.key} {endpoint.address}".encode("utf-8", "surrogateescape"))
        return endpoint.address != self.prefer, self._busy(endpoint), tie, endpoint.address

    def _busy(self, endpoint: Endpoint) -> int:
        return self.load.in_flight.get(endpoint.address, 0)


_Pair = tuple[Endpoint, Endpoint]
"""Decode and prefill instance, of one key."""
