"""How much of vLLM's KV transfer the worker emulates: every entry is in the registry, every failure has a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.facts import facts

HERE = Path(__file__).parent
FACTS = facts("kv_transfer")
TESTS = {
    "handshake fails (hash, engine id, decode, 5 s timeout)": "params::a_handshake_that_fails_counts_once_for_all",
    "transfer set-up or transfer error": "damage::damaged_kv_fails_loudly",
    "completion notification cannot be sent": "reports::a_prefill_worker_that_cannot_be_told_frees",
    "lease expires on P": "leases::expired_kv_is_freed_counted_and_refused",
    "D completes a read after expiry": "leases::a_reader_that_finishes_after_the_lease_is_counted",
    "prefill finishes with abort or error": "reports::a_prefill_that_is_aborted_answers_without_parameters",
    "D request rejected before the engine (validation, admission, 404)": "leases::a_refused_decode_request_frees",
    "D aborts while still waiting to be scheduled": "reports::an_abort_before_scheduling_frees_the_prefill_side",
    "D request with do_remote_prefill true but empty or missing remote_block_ids and tokens to load": (
        "params::a_decode_leg_without_block_ids_kills_the_engine"
    ),
    "D request with remote_block_ids but a missing remote_* key": "params::a_decode_leg_without_where_to_read_waits",
    "same kv_transfer_params used twice": "damage::reused_kv_fails_loudly",
    "remote engine restarted on the same address": "reports::a_prefill_worker_may_be_replaced_at_the_same_address",
    "push: P to D handshake fails": "push::a_writer_that_cannot_shake_hands_keeps_its_blocks",
    "push: registration handshake or send fails before any rank": "push::a_registration_that_cannot_be_delivered",
    "push: watchdog fires": "push::nobody_writes_for_long_and_the_watchdog_says_so",
    "remote_engine_id unknown at the bootstrap server, or server unreachable after 3 tries": (
        "mooncake::an_engine_that_the_bootstrap_server_does_not_know"
    ),
    "transfer engine returns non-zero": "mooncake::a_transfer_that_breaks_fails_both_counts_and_frees",
    "P prefill not ready within 480 s of D asking": "mooncake::a_prefill_that_does_not_come_in_time",
    "P finished but D never came within 480 s": "mooncake::a_cache_that_nobody_comes_for_expires",
    "transfer_id missing on P": "mooncake::a_prefill_without_transfer_id_keeps_nothing",
    "D fields missing": "mooncake::a_decode_leg_without_a_field_waits_for_ever",
    "do_remote_prefill sent to a kv_producer": "mooncake::a_leg_at_the_wrong_side_kills_the_engine",
    "do_remote_decode sent to a kv_consumer": "mooncake::a_leg_at_the_wrong_side_kills_the_engine",
    "D aborted before scheduling": "mooncake::a_decode_leg_that_is_given_up_frees_the_prefill_side",
    "hybrid model load failure": "mooncake::a_transfer_that_breaks_fails_both_counts_and_frees",
}
"""Which test shows what becomes of a failure: module test_transfer_X, a beginning of the test's name."""


def named(fields: list[Any]) -> Iterator[str]:
    """The names in a list of fields, which have a type and more behind them, or a meaning in brackets."""
    for field in fields:
        name: str = field["field"] if isinstance(field, dict) else field
        yield name.split(" (")[0]


def entries() -> Iterator[str]:
    """What there is to emulate, as the registry calls it."""
    pull, push, mooncake = FACTS["nixl_pull"], FACTS["nixl_push"], FACTS["mooncake"]
    for connector, name in ((pull, "pull"), (push, "push"), (mooncake, "mooncake")):
        for leg in ("prefill_request", "prefill_response", "decode_request"):
            given = connector[f"leg_{leg}"]
            fields = given.get("fields", []) if leg != "decode_request" or name == "mooncake" else []
            for kind in ("read_fields", "required", "optional", "ignored"):
                fields = fields + given.get(kind, []) if leg == "decode_request" else fields
            yield from (f"{name} {leg.replace('_', ' ')}: {field}" for field in named(fields))
    yield from (f"push registration: {field['field']}" for field in push["registration_message"]["fields"])
    yield from (f"mooncake bootstrap register: {field}" for field in mooncake["bootstrap"]["register"])
    for message in ("D_to_P MooncakeXferMetadata", "P_to_D MooncakeXferResponse"):
        yield f"mooncake message: {message}"
    side = FACTS["nixl_side_channel"]
    yield from (
        f"side channel: {name}" for name in side if name not in ("sources", "listener_poll_ms", "NixlAgentMetadata")
    )
    yield "side channel: NixlAgentMetadata"
    yield from (f"handshake hash: {text.split(' (')[0]}" for text in FACTS["nixl_compat_hash"]["inputs"])
    yield "handshake hash: disable"
    yield from (f"lease: {name}" for name in FACTS["nixl_lease"] if name not in ("sources", "min_nixl_version"))
    for family in ("nixl_extra_config", "mooncake"):
        options = FACTS[family] if family == "nixl_extra_config" else mooncake["extra_config"]
        yield from (f"{family.split('_')[0]} option: {option['key']}" for option in options)
    yield from (f"mooncake timeout: {timeout['what']}" for timeout in mooncake["timeouts"])
    for family in ("nixl", "mooncake"):
        yield from (f"{family} failure: {failure['event']}" for failure in FACTS[f"{family}_failures"])
    yield from (f"failure policy: {policy}" for policy in ("fail", "recompute", "multi_group_models"))


def registry() -> dict[str, Any]:
    """What tests/worker/coverage says."""
    read: dict[str, Any] = yaml.safe_load((HERE / "coverage" / "kv_transfer.yaml").read_text())
    return read


def test_every_entry_of_the_facts_is_in_the_registry() -> None:
    assert list(registry()) == list(dict.fromkeys(entries()))


def test_most_is_emulated_and_the_rest_has_a_reason() -> None:
    states = list(registry().values())
    assert sum(state == "emulated" for state in states) / len(states) >= 0.8
    assert all(len(state["not emulated"]) > 20 for state in states if state != "emulated")


def test_every_failure_that_is_emulated_has_a_test() -> None:
    known = {
        name
        for module in HERE.glob("test_transfer*.py")
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in [f"{module.stem.removeprefix('test_transfer_')}::{node.name.removeprefix('test_')}"]
    }
    for entry, state in registry().items():
        _, failure, event = entry.partition(" failure: ")
        if failure and state == "emulated":
            assert any(name.startswith(TESTS[event]) for name in known), event
