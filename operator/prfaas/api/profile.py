"""What one instance kind can do: how long a prefill takes, how many bytes of KV it leaves, how fast it decodes.

The planner computes with a Profile, `spec.profile` of a cluster names one, the fake worker sleeps by one, and
calibration writes one: one format for all four. Lengths are tokens (19.4K is 19,400), times seconds, sizes bytes.

    T(l)       = max(floor, a + b * l/1000 + c * (l/1000)^2)   or a line through measured points
    S(l)       = scale * (fixedBytes + bytesPerToken * l)      the state of the linear layers is there at any length
    step(n, x) = a line through measured (batch, seconds) points + n * x * secondsPerContextToken

The symbols are those of arXiv:2604.15039, section 3; the constant part of S(l) is what hybrid models add to it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from prfaas.api.base import API_VERSION, ApiModel

MAX_SECONDS = 86_400.0
MAX_TOKENS = 10_000_000

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]


class PrefillCoefficients(ApiModel):
    """T(l) as a quadratic in the prompt's length, batch 1."""

    a: Seconds
    """Seconds that every prefill takes, whatever its length."""
    b: Annotated[float, Field(ge=0, le=MAX_SECONDS)]
    """Seconds per thousand tokens."""
    c: Annotated[float, Field(ge=0, le=MAX_SECONDS)]
    """Seconds per squared thousand tokens: what attention adds to long prompts."""
    floor: Seconds = 0.0
    """Seconds below which no prefill goes, where the quadratic is too optimistic for short prompts."""


class PrefillPoint(ApiModel):
    """One measured prefill."""

    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Prompt length, tokens."""
    seconds: Seconds
    """Time of one prefill of that length at batch 1, seconds."""


class PrefillProfile(ApiModel):
    """Prefill time of one instance: either coefficients or measured points."""

    coefficients: PrefillCoefficients | None = None
    """The fitted quadratic; exactly one of coefficients and points."""
    points: Annotated[tuple[PrefillPoint, ...], Field(min_length=2, max_length=64)] | None = None
    """Measured points in rising order of tokens, joined by straight lines; exactly one of coefficients and points."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.coefficients is None) == (self.points is None):
            raise ValueError("exactly one of coefficients and points must be set")
        if self.points is not None:
            _require_rising([(p.tokens, p.seconds) for p in self.points], "points", "tokens")
        return self

    def seconds(self, tokens: int) -> float:
        """T(l) for a prompt of `tokens` tokens, seconds; never falls as the prompt grows."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        if self.coefficients is not None:
            f, kilo = self.coefficients, tokens / 1000
            return max(f.floor, f.a + f.b * kilo + f.c * kilo * kilo)
        assert self.points is not None
        return _interpolate([(p.tokens, p.seconds) for p in self.points], tokens)

    @property
    def measured_tokens(self) -> int | None:
        """The longest prompt that was measured; beyond it T(l) is a guess. None: coefficients, no such end."""
        return None if self.points is None else self.points[-1].tokens

    def remaining_seconds(self, tokens: int, cached: int) -> float:
        """T(l|x): the prefill of `tokens` tokens of which the first `cached` are there already, seconds.

        With coefficients max(floor, a + b * (l-x)/1000 + c * (l^2-x^2)/10^6): what every prefill costs is not saved,
        and the new tokens attend to all before them. With points T(l) - T(x) + T(0), which is the same without a floor.
        """
        if not cached:
            return self.seconds(tokens)
        if self.coefficients is not None:
            f, kilo, there = self.coefficients, tokens / 1000, cached / 1000
            return max(f.floor, f.a + f.b * (kilo - there) + f.c * (kilo * kilo - there * there))
        return self.seconds(tokens) - self.seconds(cached) + self.seconds(0)


class KVProfile(ApiModel):
    """Size of the KV cache that a prompt leaves, over all GPUs of the instance."""

    fixed_bytes: Annotated[int, Field(ge=0, le=2**50)]
    """Bytes that do not depend on the length: recurrent state of linear-attention layers."""
    bytes_per_token: Annotated[int, Field(ge=0, le=2**40)]
    """Bytes that each prompt token adds."""
    scale: Annotated[float, Field(gt=0, le=16)] = 1.0
    """Factor on both: 0.5 where the cache is kept in 8 bits and the figures are for 16, or for compression."""

    def bytes(self, tokens: int) -> int:
        """S(l) for a prompt of `tokens` tokens, bytes."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        return round(self.scale * (self.fixed_bytes + self.bytes_per_token * tokens))


class DecodeStep(ApiModel):
    """One measured decode step."""

    batch: Annotated[int, Field(ge=1, le=65_536)]
    """Sequences decoded together."""
    seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS)]
    """Time of one step at that batch, seconds."""


class DecodeProfile(ApiModel):
    """Decode speed of one instance."""

    steps: Annotated[tuple[DecodeStep, ...], Field(min_length=1, max_length=64)]
    """Step time by batch, in rising order of batch, joined by straight lines; one point means a constant step."""
    max_batch: Annotated[int, Field(ge=1, le=65_536)]
    """Sequences that one instance decodes together at most, within its latency target."""
    tokens_per_step: Annotated[float, Field(ge=1, le=64)] = 1.0
    """Tokens that a sequence gains per step; above 1 with speculative decoding."""
    seconds_per_context_token: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Seconds that each token of context of each sequence adds to a step; `steps` are then those without context."""

    @model_validator(mode="after")
    def _rising(self) -> Self:
        _require_rising([(s.batch, s.seconds) for s in self.steps], "steps", "batch")
        return self

    def step_seconds(self, batch: int, context: float = 0) -> float:
        """Time of one step with `batch` sequences of `context` tokens each, seconds; never falls as either grows."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        seconds = _interpolate([(s.batch, s.seconds) for s in self.steps], batch)
        return seconds + batch * context * self.seconds_per_context_token

    def batch_within(self, tokens_per_second: float, context: float = 0) -> int:
        """Largest batch in which each sequence still gains `tokens_per_second`; 0 if not even a batch of one does."""
        low, high = 0, self.max_batch
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.tokens_per_step >= tokens_per_second * self.step_seconds(middle, context) * (1 - 1e-9)
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


class Profile(ApiModel):
    """What one kind of instance (an accelerator, a GPU count, a model) was measured or assumed to do."""

    api_version: Literal["prfaas.io/v1alpha1"] = API_VERSION  # type: ignore[assignment]  # a str constant, checked by a test
    """Version of this document's format."""
    kind: Literal["Profile"] = "Profile"
    """Always Profile."""
    accelerator: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the accelerator, such as H200."""
    gpus: Annotated[int, Field(ge=1, le=1024)]
    """GPUs of one instance."""
    prefill: PrefillProfile
    """Prefill time by prompt length."""
    kv: KVProfile
    """KV bytes by prompt length."""
    decode: DecodeProfile
    """Decode step time by batch."""
    startup_seconds: Seconds
    """From the container's start until the engine answers, with its weights on the node, seconds."""
    source: Literal["measured", "fitted", "assumed"]
    """Where the figures come from: measured on this hardware, fitted to published figures, or assumed."""

    def kv_gbps(self, tokens: int) -> float:
        """Phi(l) = S(l) / T(l): KV cache that an instance makes of prompts of one length (Eq. 1), Gbit/s."""
        return self.kv.bytes(tokens) * 8 / 1e9 / self.prefill.seconds(tokens)


def kv_byte_scale(line_gbps: float, capacity_gbps: float, time_scale: float) -> float:
    """Factor on S(l) with which a slow line stands in for a fast one: line / (capacity * time_scale).

    A transfer of S bytes takes S/capacity seconds in the modelled datacenter, 1/time_scale of that on the clock of an
    emulation; moving S * scale bytes over the real line takes just that, so bytes over capacity stay the profile's.

    Args: the real line's rate and the modelled capacity, both Gbit/s (10^9 bit/s); modelled seconds per real second.
    Raises ValueError where an argument is not finite and above 0: a scale of 0 would move no bytes at all.
    """
    for name, value in (("line_gbps", line_gbps), ("capacity_gbps", capacity_gbps), ("time_scale", time_scale)):
        positive(name, value)
    return positive("line_gbps / (capacity_gbps * time_scale)", line_gbps / (capacity_gbps * time_scale))


def positive(name: str, value: float) -> float:
    """`value`, if it is a finite number above 0; ValueError with `name` otherwise."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return value


def _require_rising(points: Sequence[tuple[int, float]], field: str, key: str) -> None:
    for index in range(1, len(points)):
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        if x1 <= x0:
            raise ValueError(f"{field}[{index}].{key}: {x1} must be above {x0}, the point before it")
        if y1 < y0:
            raise ValueError(f"{field}[{index}].seconds: {y1} must not be below {y0}, the point before it")


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    """Straight lines between points; flat before the first, the last slope after the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_right([p[0] for p in points], x), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
