"""Synthetic samples of a known profile, for the tests of calibration."""

from __future__ import annotations

import math
import random

from prfaas.api.profile import Profile
from prfaas.planner.calibration import Sample


def samples(
    profile: Profile, *, seed: int = 0, count: int = 400, noise: float = 0.03, wrong: float = 0.0, most: int = 131_072
) -> list[Sample]:
    """Prompts from 600 tokens on, evenly in log l, a fifth with a cached prefix; a share `wrong` is nonsense."""
    chance = random.Random(seed)
    found = []
    for index in range(count):
        tokens = round(math.exp(chance.uniform(math.log(600), math.log(most))))
        cached = round(tokens * chance.uniform(0, 0.8)) if chance.random() < 0.2 else 0
        seconds = profile.prefill.remaining_seconds(tokens, cached) * math.exp(chance.gauss(0, noise))
        if chance.random() < wrong:
            seconds *= chance.choice((0.05, 3.0, 8.0))
        found.append(Sample(tokens, cached, seconds, where=f"samples.csv:{index + 2}"))
    return found
