"""The engines that instances can run, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines import sglang, vllm
from prfaas.workloads.engines.base import Engine

ENGINES: Mapping[str, Engine] = {"VLLM": vllm, "SGLang": sglang}
"""`engine.kind` -> its module."""


def engine_for(spec: PoolSpec) -> Engine:
    """The engine of a pool."""
    return ENGINES[spec.engine.kind]
