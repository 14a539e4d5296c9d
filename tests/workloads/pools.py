"""Small pools for tests of what is made of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster

IMAGE = "registry.example/vllm-openai:v0.33.0"


def prefill_pool(spec: Mapping[str, Any] | None = None) -> PrfaaSCluster:
    """A PrfaaSCluster of eight GPUs an instance, with a spec merged over it."""
    return PrfaaSCluster.model_validate(_document("PrfaaSCluster", {}, spec or {}))


def pd_pool(spec: Mapping[str, Any] | None = None) -> PDCluster:
    """A PDCluster of two instances, with a spec merged over it."""
    return PDCluster.model_validate(_document("PDCluster", {"pool": {"instances": 2}}, spec or {}))


def pool(kind: str, spec: Mapping[str, Any]) -> PrfaaSCluster | PDCluster:
    """A pool of a kind."""
    return pd_pool(spec) if kind == "PDCluster" else prefill_pool(spec)


def _document(kind: str, more: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    base = {"model": {"name": "example/model"}, "gpusPerInstance": 8, "engine": {"image": IMAGE}, **more}
    return {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": "east", "namespace": "llm", "uid": "u"},
        "spec": _merged(base, spec),
    }


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        inner = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[name] = _merged(inner, value) if both and isinstance(inner, Mapping) else value
    return merged
