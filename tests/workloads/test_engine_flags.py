"""A user's flag is recognised in every form in which vLLM's own parser takes it."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.workloads.engines import flags
from tests.facts import facts

FACTS = facts("cli_flags")


def names(entry: dict[str, Any]) -> list[str]:
    """All option strings of a flag; none of the model, which has no dash."""
    found = [*entry["flags"], *entry.get("negative_flags", ()), *entry.get("inverse_flags", ())]
    return [name for name in found if name.startswith("-")]


def test_the_table_is_vllms_own() -> None:
    for entry in FACTS["flags"]:
        for name in names(entry):
            option = flags.find(name)
            assert option is not None, name
            assert option.flag == entry["flags"][0]
            assert option.negated == (name not in entry["flags"])
            assert option.takes == ("0" if entry["kind"] == "bool" else entry.get("nargs") or "1"), name
    assert flags.removed() == frozenset(FACTS["flag_names_not_accepted_in_0_33"])


def test_the_values_that_are_checked_are_vllms_own() -> None:
    found = {entry["flags"][0]: entry for entry in FACTS["flags"]}

    assert flags.values("--kv-cache-dtype") == frozenset(found["--kv-cache-dtype"]["known_values"])
    assert flags.values("--attention-backend") == frozenset(found["--attention-backend"]["enum_members"])


def test_every_flag_of_vllm_is_in_the_table_and_no_other() -> None:
    known = {name for entry in FACTS["flags"] for name in names(entry)}

    assert set(flags._options()) == known


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-cache-dtype", "fp8"],
        ["--kv-cache-dtype=fp8"],
        ["--kv_cache_dtype", "fp8"],
        ["--kv_cache_dtype=fp8"],
        ["--kv-cache-dtype", "auto", "--x", "--kv-cache-dtype", "fp8"],
    ],
)
def test_all_forms_of_a_flag_are_one(words: list[str]) -> None:
    assert flags.read(words).text("--kv-cache-dtype") == "fp8"


@pytest.mark.parametrize(
    ("word", "on"),
    [
        ("--enable-prefix-caching", True),
        ("--no-enable-prefix-caching", False),
        ("--disable-prefix-caching", False),
        ("--enable-hybrid-kv-cache-manager", None),
    ],
)
def test_negated_forms_are_the_flag_switched_off(word: str, on: bool | None) -> None:
    assert flags.read([word]).switch("--enable-prefix-caching") is on


def test_a_beginning_counts_where_only_one_flag_has_it() -> None:
    assert flags.find("--kv-transfer") == flags.find("--kv-transfer-config")
    assert flags.find("--max-num") is None


@pytest.mark.fact("README 1")
def test_dotted_flags_replace_the_json_beside_them() -> None:
    reading = flags.read(
        ["--kv-transfer-config.kv_port", "1", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}']
    )

    assert reading.json("--kv-transfer-config") == {"kv_port": 1}


@pytest.mark.fact("README 3")
def test_dotted_values_that_look_like_numbers_are_numbers_and_keys_are_as_written() -> None:
    reading = flags.read(["--kv-events-config.topic", "5", "--kv_events_config.buffer-steps=7"])

    assert reading.json("--kv-events-config") == {"topic": 5, "buffer-steps": 7}


def test_dotted_paths_build_nested_objects() -> None:
    reading = flags.read(["-cc.pass_config.fuse", "true", "-cc.pass_config.level=x", "-cc.mode=3"])

    assert reading.json("--compilation-config") == {"pass_config": {"fuse": True, "level": "x"}, "mode": 3}


@pytest.mark.fact("README 4")
def test_list_flags_take_all_words_up_to_the_next_flag() -> None:
    reading = flags.read(["--api-key", "a", "b", "MODEL", "--seed", "1", "stray"])

    assert reading.given[0].values == ("a", "b", "MODEL")
    assert reading.stray == ("stray",)


def test_words_behind_an_unknown_flag_belong_to_it() -> None:
    reading = flags.read(["--kv-byte-scale", "0.1", "--time-scale", "5"])

    assert [(each.written, each.values, each.known) for each in reading.given] == [
        ("--kv-byte-scale", ("0.1",), False),
        ("--time-scale", ("5",), False),
    ]


@pytest.mark.parametrize("value", ["-1", "-0.5", "-", "- a text"])
def test_a_number_or_a_text_with_a_dash_is_a_value(value: str) -> None:
    assert flags.read(["--seed", value]).text("--seed") == value


def test_json_that_is_none_stays_a_text() -> None:
    assert flags.read(["--hf-overrides", "{broken"]).json("--hf-overrides") == "{broken"
    assert flags.read([]).json("--hf-overrides") is None
