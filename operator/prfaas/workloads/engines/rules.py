"""Specs that the schema accepts and that would not serve: refused with field, reason and remedy, or warned of.

A refusal is for what would part prefill and decode, or end the engine; a warning for what works and surprises.
"""

from __future__ import annotations

from collections.abc import Iterator

from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines import sglang_rules, template_rules, vllm_rules
from prfaas.workloads.engines.findings import Finding


def check(spec: PoolSpec) -> None:
    """Raises SpecError for the first thing that would not work."""
    for finding in findings(spec):
        if finding.refused:
            raise finding.error


def warnings(spec: PoolSpec) -> tuple[str, ...]:
    """What works and a person should know, a line each."""
    return tuple(str(finding) for finding in findings(spec) if not finding.refused)


def findings(spec: PoolSpec) -> Iterator[Finding]:
    """All that the rules say about a spec."""
    yield from _names(spec)
    yield from _routed(spec)
    yield from (vllm_rules if spec.engine.kind == "VLLM" else sglang_rules).findings(spec)
    yield from template_rules.findings(spec)


def _names(spec: PoolSpec) -> Iterator[Finding]:
    """Words of the command line that an engine would take for flags."""
    model = spec.model
    for field, value in (("name", model.name), ("servedName", model.served_name), ("revision", model.revision)):
        if value is not None and value.startswith("-"):
            yield Finding(f"spec.model.{field}", f"the engine would take {value!r} for a flag", "begin it otherwise")


def _routed(spec: PoolSpec) -> Iterator[Finding]:
    """The router of a PDCluster asks prefill first and decode after it, over plain HTTP."""
    if not isinstance(spec, PDClusterSpec) or spec.router.replicas == 0:
        return
    remedy = "or set spec.router.replicas to 0 and put a router of your own in front of the role Services"
    engine = spec.engine
    if engine.kind != "VLLM":
        yield Finding("spec.engine.kind", f"the router does not drive {engine.kind} yet", f"use VLLM, {remedy}")
    elif engine.connector != "Nixl":
        yield Finding(
            "spec.engine.connector",
            f"{engine.connector} wants prefill and decode at the same time, which the router does not do yet",
            f"use Nixl, {remedy}",
        )
    if engine.tls is not None:
        yield Finding("spec.engine.tls", "the router speaks plain HTTP to engines", f"leave it out, {remedy}")
