"""Every fact of tests/data/facts.yaml is pinned down by a test that names it, and no test names another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).parents[1]
SCENARIOS = TESTS.parent / "e2e" / "scenarios"
FACTS: dict[str, str] = yaml.safe_load((TESTS / "data" / "facts.yaml").read_text())


def names_in(source: str) -> Iterator[str]:
    """What `pytest.mark.fact("...")` says in a module, on a test, a class, a parameter or the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.mark.fact", "mark.fact"):
            assert [type(each) for each in node.args] == [ast.Constant], f"line {node.lineno}: one literal name"
            yield ast.literal_eval(node.args[0])


@pytest.fixture(scope="module")
def marked() -> dict[str, list[str]]:
    """Name of a fact -> test modules that name it. Collected without running or importing them."""
    found: dict[str, list[str]] = {}
    for folder in (TESTS, SCENARIOS):
        for module in sorted(folder.rglob("test_*.py")):
            for name in names_in(module.read_text()):
                found.setdefault(name, []).append(str(module.relative_to(TESTS.parent)))
    return found


@pytest.mark.parametrize("fact", FACTS)
def test_a_test_pins_down(fact: str, marked: dict[str, list[str]]) -> None:
    assert marked.get(fact), f'no test is marked @pytest.mark.fact("{fact}"): {FACTS[fact]}'


def test_no_test_names_a_fact_that_is_none(marked: dict[str, list[str]]) -> None:
    assert {name: modules for name, modules in marked.items() if name not in FACTS} == {}


def test_marks_are_found_wherever_they_stand() -> None:
    source = 'pytestmark = [pytest.mark.fact("one")]\n@pytest.mark.fact("two")\nclass A:\n    """fact("three")"""\n'
    assert sorted(names_in(source)) == ["one", "two"]
