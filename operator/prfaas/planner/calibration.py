"""From measured prefills and transfers to a profile: T(l), S(l), a link's rate, how sure they are, and what has moved.

    T(l | x) = max(floor, a + b (l-x)/1000 + c (l^2-x^2)/10^6)     a, b, c >= 0, so T never falls
    S(n)     = fixed + per token * n                               n = l - x, what crosses a link
    rate     = sum of bytes / sum of seconds

T is of one prompt alone on its instance: samples with others beside it are left out, as are stale ones and those far
off the rest. The profile holds points up to the longest kept prompt and not coefficients, so whoever computes with it
sees where the measurements end (`PrefillProfile.measured_tokens`). The fit itself is `calibration_fit.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from prfaas.api.profile import MAX_SECONDS, KVProfile, PrefillPoint, PrefillProfile, Profile
from prfaas.planner.calibration_fit import Fit, Measurement, Row, robust
from prfaas.planner.errors import PlanError

MIN_SAMPLES = 12
"""Uncensored samples that a fit needs at least, for its three coefficients and a spread."""
MIN_RANGE = 2.0
"""Longest over shortest length that a fit needs at least: below it b and c cannot be told apart."""
MAX_AGE = 7 * 86_400.0
"""Seconds after which a sample is stale: engines are upgraded more often than they are measured."""
TOLERANCE = 0.05
"""Relative difference from the profile in force that is worth a word."""
POINTS = 48


@dataclass(frozen=True)
class Sample:
    """One measured prefill, and the transfer of its KV cache where there was one."""

    tokens: int
    """Prompt length l, tokens."""
    cached: int
    """Its tokens x that a prefix cache held."""
    seconds: float
    """Time of the prefill; with `censored` only a lower bound of it (cut off, or still running)."""
    concurrency: float = 1.0
    """Prompts prefilled at once on the instance, this one included."""
    age_seconds: float = 0.0
    censored: bool = False
    kv_bytes: float | None = None
    """Bytes of KV cache that were transferred, for the tokens that were not cached."""
    transfer_seconds: float | None = None
    where: str = ""
    """File and line it was read from."""


@dataclass(frozen=True)
class LeftOut:
    """A sample that the fit does not rest on, and why."""

    sample: Sample
    reason: str


@dataclass(frozen=True)
class Bound:
    """T(l) at a length in tokens with its 95 % confidence bounds, seconds."""

    tokens: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Drift:
    """How far T(l) is from the profile in force, at the length where that is most; ratios: measured over in force."""

    tokens: int
    measured: float
    in_force: float
    ratio: float
    mean_ratio: float
    """Prefill seconds of all kept samples over what the profile in force says of them."""
    significant: bool
    """More than `TOLERANCE`, and the profile in force is outside the confidence bounds there."""


@dataclass(frozen=True)
class Calibration:
    """What the samples say."""

    fit: Fit
    shortest: int
    """Fewest uncached tokens of a kept sample."""
    longest: int
    """Length of the longest kept prompt, tokens: where knowledge ends."""
    kept: tuple[Sample, ...]
    left_out: tuple[LeftOut, ...]
    kv: KVProfile | None
    """None where fewer samples than a fit needs have bytes."""
    worst_octave: tuple[int, float]
    """Where the median sample is furthest off the curve: first length of the octave, tokens, and measured over fitted.

    Near 1 if T has the form that is fitted. Samples far off count here; octaves of fewer than five do not.
    """
    link_gbps: float | None
    """Gbit/s of one transfer, on average over bytes; None without transfer times."""

    def seconds(self, tokens: int, cached: int = 0) -> float:
        """T(l | x), seconds. Raises PlanError outside the lengths that were measured."""
        self._require_measured(tokens, cached)
        return self.fit.value(_row(tokens, cached))

    def bound(self, tokens: int) -> Bound:
        """T(l) with its 95 % confidence bounds. Raises PlanError outside the lengths that were measured."""
        self._require_measured(tokens)
        value, error = self.fit.value(_row(tokens)), self.fit.error(_row(tokens))
        wide = error * (1.96 + 2.4 / max(1, len(self.kept) - 3))
        return Bound(tokens, value, max(0.0, value - wide), value + wide)

    def lengths(self, count: int = POINTS) -> list[int]:
        """Up to `count` lengths from the shortest to the longest measured, closer together where they are short."""
        span = self.longest - self.shortest
        return sorted({self.shortest + round(span * (i / (count - 1)) ** 2) for i in range(count)})

    def prefill(self) -> PrefillProfile:
        """T(l) as points that end at the longest measured prompt; flat below the shortest."""
        points = tuple(
            PrefillPoint(tokens=n, seconds=min(MAX_SECONDS, float(f"{self.seconds(n):.6g}"))) for n in self.lengths()
        )
        return PrefillProfile(points=points)

    def profile(self, in_force: Profile) -> Profile:
        """The profile in force with what was measured in place of what it said; decode and startup stay."""
        changes = {"prefill": self.prefill(), "kv": self.kv or in_force.kv, "source": "measured"}
        return in_force.model_copy(update=changes)

    def drift(self, in_force: Profile) -> Drift:
        """Compare with the profile in force, within its measured lengths and ours; PlanError if none are in both."""
        end = in_force.prefill.measured_tokens or self.longest
        lengths = [n for n in self.lengths(16) if n <= end]
        if not lengths:
            raise PlanError("--against", f"measured up to {end:,} tokens only, the samples begin at {self.shortest:,}")
        pairs = [(n, self.seconds(n), in_force.prefill.seconds(n)) for n in lengths]
        tokens, measured, expected = max(pairs, key=lambda pair: abs(math.log(pair[1] / max(pair[2], 1e-9))))
        exact = [s for s in self.kept if not s.censored and s.tokens <= end]
        said = sum(in_force.prefill.remaining_seconds(s.tokens, s.cached) for s in exact)
        ratio = measured / max(expected, 1e-9)
        bound = self.bound(tokens)
        outside = not bound.low <= expected <= bound.high
        mean = sum(s.seconds for s in exact) / said if said > 0 else ratio
        return Drift(tokens, measured, expected, ratio, mean, outside and abs(ratio - 1) > TOLERANCE)

    def _require_measured(self, tokens: int, cached: int = 0) -> None:
        if tokens > self.longest or tokens - cached < self.shortest:
            raise PlanError(
                "tokens",
                f"{tokens:,} with {cached:,} cached: measured were at most {self.longest:,} tokens, "
                f"and at least {self.shortest:,} uncached ones",
            )


def calibrate(samples: Sequence[Sample], max_age: float = MAX_AGE) -> Calibration:
    """Fit T(l), S(l) and the rate of transfers to samples not older than `max_age` seconds.

    Values are as `read_samples` lets them through. Raises PlanError at `samples` if too few are usable, or their
    lengths are too much alike.
    """
    usable: list[Sample] = []
    left_out: list[LeftOut] = []
    for sample in samples:
        if sample.age_seconds > max_age:
            left_out.append(LeftOut(sample, f"older than {max_age:,.0f} s"))
        elif sample.concurrency > 1:
            left_out.append(LeftOut(sample, "others were prefilled beside it"))
        else:
            usable.append(sample)
    _require_enough(usable, left_out)
    fit = robust([_measurement(sample) for sample in usable], floor=True)
    if fit is None:
        raise PlanError("samples", "no curve that never falls goes through them")
    kept = [sample for sample, keep in zip(usable, fit.kept, strict=True) if keep]
    left_out += [
        LeftOut(s, f"{s.seconds / fit.value(_row(s.tokens, s.cached)):.2g} times what the others say of its length")
        for s, keep in zip(usable, fit.kept, strict=True)
        if not keep
    ]
    _require_enough(kept, left_out)
    exact = [sample for sample in kept if not sample.censored]
    longest = max(sample.tokens for sample in exact)
    shortest = min(sample.tokens - sample.cached for sample in exact)
    return Calibration(
        fit, shortest, longest, tuple(kept), tuple(left_out), _kv(samples), _worst(usable, fit), link_gbps(samples)
    )


def link_gbps(samples: Sequence[Sample]) -> float | None:
    """Gbit/s of the transfers that have both bytes and seconds: sum over sum, so long ones count as they should."""
    both = [(s.kv_bytes, s.transfer_seconds) for s in samples if s.kv_bytes and s.transfer_seconds]
    return sum(size for size, _ in both) * 8e-9 / sum(seconds for _, seconds in both) if both else None


def _require_enough(samples: Sequence[Sample], left_out: Sequence[LeftOut]) -> None:
    exact = [sample.tokens - sample.cached for sample in samples if not sample.censored]
    if len(exact) < MIN_SAMPLES:
        raise PlanError(
            "samples", f"{len(exact)} are usable, {MIN_SAMPLES} are needed ({len(left_out)} left out{_most(left_out)})"
        )
    if max(exact) < MIN_RANGE * min(exact):
        raise PlanError(
            "samples",
            f"all have {min(exact):,} to {max(exact):,} uncached tokens; the longest must be twice the shortest",
        )


def _most(left_out: Sequence[LeftOut]) -> str:
    reasons = [each.reason for each in left_out]
    return f", most: {max(reasons, key=reasons.count)}" if reasons else ""


def _worst(samples: Sequence[Sample], fit: Fit) -> tuple[int, float]:
    octaves: dict[int, list[float]] = {}
    for s in samples:
        if not s.censored:
            start = 2 ** ((s.tokens - s.cached).bit_length() - 1)
            octaves.setdefault(start, []).append(s.seconds / fit.value(_row(s.tokens, s.cached)))
    ratios = [(start, median(of)) for start, of in octaves.items() if len(of) >= 5]
    return max(ratios, key=lambda each: abs(each[1] - 1), default=(min(octaves), 1.0))


def _kv(samples: Sequence[Sample]) -> KVProfile | None:
    """S(n) of all transfers, however old or crowded: bytes depend on the model alone."""
    sized = [
        Measurement((1.0, float(s.tokens - s.cached)), s.kv_bytes, float(s.tokens - s.cached))
        for s in samples
        if s.kv_bytes and s.kv_bytes >= 1
    ]
    if len(sized) < MIN_SAMPLES or max(m.length for m in sized) < MIN_RANGE * min(m.length for m in sized):
        return None
    fit = robust(sized)
    if fit is None:
        return None
    fixed, each = fit.coefficients
    if fixed > 2.0**50 or each > 2.0**40:
        raise PlanError("samples", f"bytes: {each:.3g} a token is more than any model leaves")
    return KVProfile(fixed_bytes=round(fixed), bytes_per_token=round(each))


def _row(tokens: int, cached: int = 0) -> Row:
    kilo, there = tokens / 1000, cached / 1000
    return (1.0, kilo - there, kilo * kilo - there * there)


def _measurement(sample: Sample) -> Measurement:
    row = _row(sample.tokens, sample.cached)
    return Measurement(row, sample.seconds, float(sample.tokens - sample.cached), sample.censored)
