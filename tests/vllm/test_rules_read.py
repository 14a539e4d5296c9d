"""The rules about a user's arguments read them as vLLM's own parser does: no form of a flag gets past them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings

from e2e.vllm_source import VllmParser
from prfaas.workloads.engines import flags
from tests.vllm.test_flags import BY_DEST, FLAGS
from tests.vllm.test_worker_agrees import lines

pytestmark = pytest.mark.clients

FIRST_NAME = {flag["dest"]: flag["flags"][0] for flag in FLAGS}


@pytest.fixture(scope="module")
def usual(vllm: VllmParser) -> dict[str, Any]:
    """What the options are without any flag."""
    return vllm.parse(["org/model"]).values or {}


def changed(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The options that are not as usual."""
    return {dest: value for dest, value in values.items() if dest in BY_DEST and usual.get(dest) != value}


def seen_as(words: list[str], dest: str) -> Any:
    """The value that the rules see of an option; for a flag that was not given, None."""
    reading, name, flag = flags.read(words), FIRST_NAME[dest], BY_DEST[dest]
    if flag["kind"] == "bool":
        return reading.switch(name)
    if flag["json"]:
        return reading.json(name)
    return reading.text(name)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(words=lines())
@example(words=["--middleware", "a.b", "--middleware=c.d"])
def test_a_flag_that_vllm_sees_the_rules_see(words: list[str], vllm: VllmParser, usual: dict[str, Any]) -> None:
    parsed = vllm.parse(["org/model", *words])
    assume(parsed.values is not None)
    assert parsed.values is not None
    for dest, value in changed(parsed.values, usual).items():
        flag = BY_DEST[dest]
        seen = seen_as(words, dest)
        if isinstance(value, list) and flag["kind"] == "str":  # one that may be given again, such as --middleware
            assert seen == value[-1], dest
        elif flag["kind"] in ("bool", "str"):
            assert seen == value, dest
        elif isinstance(value, dict):
            assert isinstance(seen, dict), dest
            assert set(seen) <= set(value), dest
        else:
            assert seen is not None, dest


@pytest.mark.parametrize(
    "line",
    [
        "--kv-offloading-size 8",
        "--kv_offloading_size=8",
        "--kv-offloading-s 8",
        "--kv-transfer-config.kv_port 1",
        "--kv_transfer_config.kv_port=1",
        "--kv-transfer {}",
        "--no-enable-prefix-caching",
        "--disable-prefix-caching",
        "-tp 8",
        "-tp=8",
        "-dcp 2",
        "-cc.mode 3",
        "-O3",
        "-O 3",
        "--config=file",
        "--middleware a.b --middleware c.d",
    ],
)
def test_forms_in_which_flags_hide(line: str, vllm: VllmParser, usual: dict[str, Any]) -> None:
    words = line.split()
    values = vllm.parse(["org/model", *words]).values
    assert values is not None
    known = {each.flag for each in flags.read(words).given if each.known}
    assert known
    assert {FIRST_NAME[dest] for dest in changed(values, usual)} <= known
