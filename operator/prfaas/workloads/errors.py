"""A spec that passed the schema and still cannot be built: where, what is wrong, and what would be right."""

from __future__ import annotations


class SpecError(ValueError):
    """`path` is the field (`spec.podTemplate.spec`), `problem` what is wrong there, `remedy` what would be right."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy
