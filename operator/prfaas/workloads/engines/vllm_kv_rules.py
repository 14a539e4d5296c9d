"""What a user's own `--kv-transfer-config` and `--kv-events-config` must say: each replaces the operator's whole.

A KV transfer that vLLM would do otherwise than the other side expects ends in wrong text with status 200, or in none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from prfaas.api.engine import LEAST_LEASE_SECONDS
from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines import vllm
from prfaas.workloads.engines.findings import Arguments, Finding, warning
from prfaas.workloads.engines.flags import Given

_SAME_CONNECTOR = {"NixlConnector": ("NixlPullConnector",)}
CONNECTORS = {kind: (name, *_SAME_CONNECTOR.get(name, ())) for kind, name in vllm.CONNECTORS.items()}


def transfer(spec: PoolSpec, arguments: Arguments, given: Given) -> Iterator[Finding]:
    """A user's own `--kv-transfer-config`."""
    where = arguments.path
    if given.key is not None:
        yield Finding(
            where,
            f"{given.written} replaces the whole of --kv-transfer-config, connector and role with it: vLLM does not "
            "merge dotted flags with JSON",
            "leave it out; spec.engine has connector, transport, lanes and kvLease",
        )
        return
    config = _object(given)
    if config is None:
        yield Finding(where, f"{given.written} is not a JSON object", "leave it out, or write one")
        return
    for role in arguments.roles:
        yield from _transfer_value(spec, where, role, config)


def _transfer_value(spec: PoolSpec, where: str, role: str, config: dict[str, Any]) -> Iterator[Finding]:
    allowed = CONNECTORS[spec.engine.connector]
    connector = config.get("kv_connector")
    if connector not in allowed:
        reports = " (vllm #52617)" if "LMCache" in str(connector) else ""
        yield Finding(
            where,
            f"kv_connector is {connector!r}, and spec.engine.connector {spec.engine.connector} means {allowed[0]}: "
            f"other connectors have no part in prefill and decode here, or lose hybrid models{reports}",
            "leave --kv-transfer-config out",
        )
    if config.get("kv_role") != vllm.KV_ROLES[role]:
        yield Finding(
            where,
            f"kv_role is {config.get('kv_role')!r}, and for {role} it is {vllm.KV_ROLES[role]!r} (vllm #33702)",
            "write it under spec.roles, each role with its own, or leave --kv-transfer-config out",
        )
    extra = config.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    if extra.get("enforce_handshake_compat") is False:
        yield Finding(
            where,
            "enforce_handshake_compat is false: instances that differ would read each other's KV cache, and answer "
            "with wrong text and status 200 (vllm #53912, local-inference-lab/vllm #402)",
            "leave it out",
        )
    lease = extra.get("kv_lease_duration", vllm.KV_LEASE_SECONDS)
    if not isinstance(lease, int) or lease < LEAST_LEASE_SECONDS:
        yield Finding(
            where,
            f"kv_lease_duration is {lease!r}: KV cache could be freed and used again while a decode instance still "
            "reads it, which answers with wrong text and status 200 (aws-do-eks #84)",
            f"at least {LEAST_LEASE_SECONDS}; spec.engine.kvLease sets it",
        )
    if config.get("kv_load_failure_policy", "fail") != "fail":
        yield warning(
            where,
            "kv_load_failure_policy recompute makes decode instances prefill long prompts whose KV cache was lost",
            "leave it out: the router tries again where that helps",
        )


def events(where: str, given: Given) -> Iterator[Finding]:
    """A user's own `--kv-events-config`."""
    if given.key is not None:
        yield Finding(
            where,
            f"{given.written} replaces the whole of --kv-events-config, and vLLM reads a value such as 5 as a number",
            "write --kv-events-config as one JSON value, with spec.engine.kvEvents false",
        )
        return
    config = _object(given)
    if config is None:
        yield Finding(where, f"{given.written} is not a JSON object", "leave it out, or write one")
        return
    endpoint = str(config.get("endpoint", "tcp://*:5557"))
    if "*" not in endpoint and "::" not in endpoint and not endpoint.startswith(("ipc://", "inproc://")):
        yield Finding(
            where,
            f"the endpoint {endpoint} has neither * nor ::, so the engine connects to it instead of listening",
            "write tcp://*:PORT",
        )


def _object(given: Given) -> dict[str, Any] | None:
    try:
        found = json.loads(given.value or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
