"""How fast an instance that only prefills makes KV cache, Phi(l) = S(l) / T(l), where only that was published.

Enough to say what line a pool would fill (Eq. 2 of arXiv:2604.15039), not enough to plan with: for that S and T are
needed apart. Ships: the six models of Table 3. Rates are Gbit/s (10^9 bit/s), lengths tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Self

import yaml
from pydantic import Field, model_validator

from prfaas.api.base import ApiModel


class KVThroughput(ApiModel):
    """Phi(l) of one model on one kind of instance, by measured points."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the model."""
    gpus: Annotated[int, Field(ge=1, le=1024)]
    """GPUs of the instance."""
    points: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]], ...], Field(min_length=2)
    ]
    """(tokens, Gbit/s), in rising order of tokens."""

    @model_validator(mode="after")
    def _rising(self) -> Self:
        for index in range(1, len(self.points)):
            if self.points[index][0] <= self.points[index - 1][0]:
                raise ValueError(f"points[{index}]: {self.points[index][0]} must be above the point before it")
        return self

    def gbps(self, tokens: int) -> float:
        """Phi(l) of one instance, on straight lines between points. Raises ValueError outside of what was measured."""
        known = [length for length, _ in self.points]
        if not known[0] <= tokens <= known[-1]:
            raise ValueError(f"{self.model} was measured from {known[0]} to {known[-1]} tokens, not at {tokens}")
        right = min(bisect_right(known, tokens), len(known) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    def cluster_gbps(self, gpus: int, tokens: int) -> float:
        """What a cluster of `gpus` GPUs that prefills prompts of one length sends at most (Eq. 2), Gbit/s."""
        return gpus / self.gpus * self.gbps(tokens)


def published() -> Mapping[str, KVThroughput]:
    """The models of Table 3, by name."""
    text = resources.files("prfaas.api").joinpath("kv_throughput.yaml").read_text(encoding="utf-8")
    found = (KVThroughput.model_validate(each) for each in yaml.safe_load(text))
    return {each.model: each for each in found}
