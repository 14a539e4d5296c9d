"""The one error of the planner: an input it cannot compute with, and where that stands."""

from __future__ import annotations

import math


class PlanError(ValueError):
    """What is wrong with an input, with the path of the field; nothing else is raised for inputs of the right type."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def number(path: str, value: float, *, least: float = 0.0, most: float = math.inf, above: bool = False) -> float:
    """`value` if it is finite and in [least, most] (`above`: in (least, most]); PlanError at `path` otherwise."""
    fits = math.isfinite(value) and (value > least if above else value >= least) and value <= most
    if not fits:
        bounds = f"{'above' if above else 'at least'} {least:g}" + ("" if math.isinf(most) else f", at most {most:g}")
        raise PlanError(path, f"must be a finite number {bounds}, got {value!r}")
    return value
