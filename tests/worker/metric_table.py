"""What the worker's package keeps of vLLM's metrics: made from tests/data by `python -m tests.worker.tables`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.facts import facts

PACKAGE = Path(__file__).parents[2] / "operator" / "prfaas" / "worker" / "metrics.json"

CONDITIONS = {
    # as the facts say it: the condition's name in the worker
    "always (unless --disable-log-stats)": "stats",
    "always registered; moves only with --enable-mfu-metrics": "stats",
    "kv_transfer_config set and kv_role is kv_consumer or kv_both": "kv_consumer",
    "VLLM_COMPUTE_NANS_IN_LOGITS=1": "nans",
    "--watermark-config set": "watermark",
    "--kv-cache-metrics": "residency",
    "--enable-lora": "lora",
    "--tool-call-parser set": "tool_parser",
    "speculative decoding configured": "speculative",
    "diffusion model": "diffusion",
    "connector NixlConnector/NixlPullConnector/NixlPushConnector (or child of MultiConnector)": "nixl",
    "connector MooncakeConnector": "mooncake",
    "connector MooncakeStoreConnector": "mooncake_store",
    "connector SimpleCPUOffloadConnector": "simple_offload",
    "connector HF3FSKVConnector": "hf3fs",
    "connector HiSparseConnector": "hisparse",
    "connector HiSparseConnector; --kv-cache-metrics": "hisparse_residency",
    "UMBP store connector (not in the factory list)": "umbp",
    "connector OffloadingConnector": "offload",
    "OffloadingConnector with a CPU spec": "offload_cpu",
    "OffloadingConnector with a CPU spec; store_threshold >= 2": "offload_threshold",
    "OffloadingConnector with TieringOffloadingSpec": "offload_tiers",
    "VLLM_SERVER_DEV_MODE=1, after the first sleep/wake call": "sleep",
    "VLLM_SERVER_DEV_MODE=1, after the first weight call": "weights",
    "always; series appear after the first request of a handler": "http",
}
NOT_EMULATED = {
    "model with the realtime task": "speech over a WebSocket is a model of another kind; this worker generates text",
    "OffloadingConnector with a kvcr secondary tier": "their names are constants of a package that vLLM lacks",
}


def table() -> list[dict[str, Any]]:
    """One entry per metric that the worker has."""
    entries = []
    for metric in facts("metrics")["metrics"]:
        if metric["exists_when"] in NOT_EMULATED:
            continue
        labels = metric["labels"] if isinstance(metric["labels"], list) else ["engine"]
        entry = {"name": metric["name"], "type": metric["type"], "when": CONDITIONS[metric["exists_when"]]}
        entry["labels"] = [label for label in labels if not label.startswith("<")]
        values = metric.get("label_values", {})
        if values and metric["family"] != "http" and all(isinstance(each, list) for each in values.values()):
            entry["values"] = values
        if "bucket_family" in metric:
            entry["family"] = metric["bucket_family"]
        if isinstance(metric.get("buckets"), list):
            entry["buckets"] = metric["buckets"]
        entries.append(entry)
    return entries


def text() -> str:
    """The file: one line per metric."""
    lines = ",\n".join(json.dumps(entry) for entry in table())
    return f"[\n{lines}\n]\n"
