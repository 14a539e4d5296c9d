"""Which of vLLM's metrics an engine has: a table of all, and the conditions under which each exists.

`metrics.json` is made from tests/data by `python -m tests.worker.tables`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
_BY_CONNECTOR = {
    **dict.fromkeys(NIXL, "nixl"),
    "MooncakeConnector": "mooncake",
    "MooncakeStoreConnector": "mooncake_store",
    "SimpleCPUOffloadConnector": "simple_offload",
    "HF3FSKVConnector": "hf3fs",
    "HiSparseConnector": "hisparse",
    "UMBPStoreConnector": "umbp",
    "OffloadingConnector": "offload",
}
STORES = frozenset(_BY_CONNECTOR) - {*NIXL, "MooncakeConnector"}
"""Connectors to more memory, not to another engine."""


CACHE_ATTRIBUTES: dict[str, Any] = {
    # attributes of vLLM's CacheConfig and what they are unless this worker knows better
    "block_size": 16,
    "user_specified_block_size": False,
    "kv_cache_layout": None,
    "prefix_match_unit": None,
    "gpu_memory_utilization": 0.92,
    "cache_dtype": "auto",
    "is_attention_free": False,
    "num_gpu_blocks_override": None,
    "sliding_window": None,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": 0,
    "kv_cache_dtype_skip_layers": [],
    "mamba_page_size_padded": None,
    "skip_page_size_padded": None,
    "mamba_block_size": None,
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "enable_mamba_shared_prefix_checkpoint": False,
    "replayssm_buffer_len": 16,
    "use_replayssm": False,
    "use_kda_recoverssm": False,
    "num_gpu_blocks": None,
    "num_cpu_blocks": None,
    "simple_cpu_offload_num_blocks": None,
    "effective_attention_block_size": None,
    "kv_cache_size_tokens": None,
    "kv_cache_max_concurrency": None,
    "hash_block_size": None,
    "cache_hit_alignment_tokens": None,
    "kv_sharing_fast_prefill": False,
    "swa_bounded_replay": True,
    "kv_cache_memory_bytes": None,
    "kv_offloading_size": None,
    "kv_offloading_backend": "native",
}


@dataclass(frozen=True)
class Metric:
    """One family of the table."""

    name: str
    type: str
    when: str
    labels: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of labels that are there from the start."""
    family: str | None = None
    """Its bucket family, which `--custom-histogram-buckets` may replace."""
    buckets: tuple[float, ...] | None = None


@functools.cache
def table() -> tuple[Metric, ...]:
    """Read once."""
    text = importlib.resources.files("prfaas.worker").joinpath("metrics.json").read_text(encoding="utf-8")
    return tuple(_metric(entry) for entry in json.loads(text))


def _metric(entry: dict[str, Any]) -> Metric:
    buckets = entry.get("buckets")
    return Metric(
        name=entry["name"],
        type=entry["type"],
        when=entry["when"],
        labels=tuple(entry["labels"]),
        values={label: tuple(values) for label, values in entry.get("values", {}).items()},
        family=entry.get("family"),
        buckets=tuple(buckets) if buckets else None,
    )


@dataclass(frozen=True)
class Exposed:
    """What decides which metrics there are, besides P/D itself."""

    stats: bool = True
    """False with `--disable-log-stats`: nothing of the engine is shown."""
    conditions: frozenset[str] = frozenset()
    buckets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """`--custom-histogram-buckets`."""
    draft_tokens: int = 0
    """`num_speculative_tokens` of `--speculative-config`."""
    max_loras: int = 1
    residency_sample: float = 0.01
    """`--kv-cache-metrics-sample`: share of blocks whose life is measured."""


def read_exposed(args: argparse.Namespace, transfer: Mapping[str, Any], environment: Mapping[str, str]) -> Exposed:
    """From the parsed flags, `--kv-transfer-config` as the engine sees it, and the environment."""
    speculative: Mapping[str, Any] = args.speculative_config or {}
    found = set(_of_connectors(transfer))
    for condition, there in (
        ("nans", environment.get("VLLM_COMPUTE_NANS_IN_LOGITS", "0") == "1"),
        ("watermark", args.watermark_config is not None),
        ("residency", args.kv_cache_metrics),
        ("hisparse_residency", args.kv_cache_metrics and "hisparse" in found),
        ("lora", args.enable_lora),
        ("tool_parser", args.tool_call_parser),
        ("speculative", speculative),
        ("diffusion", (args.diffusion_config or {}).get("canvas_length")),
    ):
        if there:
            found.add(condition)
    buckets: Mapping[str, list[float]] = args.custom_histogram_buckets or {}
    return Exposed(
        stats=not args.disable_log_stats,
        conditions=frozenset(found),
        buckets={family: tuple(bounds) for family, bounds in buckets.items()},
        draft_tokens=int(speculative.get("num_speculative_tokens") or 0),
        max_loras=args.max_loras,
        residency_sample=args.kv_cache_metrics_sample,
    )


def _of_connectors(transfer: Mapping[str, Any]) -> Iterator[str]:
    """The conditions of a connector, or of the children of a MultiConnector."""
    name, extra = transfer.get("kv_connector"), transfer.get("kv_connector_extra_config") or {}
    if name == "MultiConnector":
        for child in extra.get("connectors", ()):
            yield from _of_connectors(child)
        return
    if name in _BY_CONNECTOR:
        yield _BY_CONNECTOR[name]
    if name == "OffloadingConnector":
        yield "offload_cpu"
        if extra.get("spec_name") == "TieringOffloadingSpec":
            yield "offload_tiers"
        elif int(extra.get("store_threshold", 0)) >= 2:
            yield "offload_threshold"
