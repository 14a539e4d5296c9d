"""What vLLM demands of the flags for metrics, traces and reasoning before it starts."""

from __future__ import annotations

import argparse
import math
import re
from itertools import pairwise
from typing import Any

from prfaas.worker.commandline.rewrite import CommandLineError

FAMILIES = (
    "inter_token_latency",
    "iteration_tokens",
    "kv_cache_residency",
    "request_latency",
    "request_num_preemptions",
    "request_params_n",
    "request_tokens",
    "time_to_first_token",
)
"""Families of buckets that `--custom-histogram-buckets` may replace."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_VERSION = re.compile(
    r"v?(\d+!)?\d+(\.\d+)*([-_.]?(a|b|c|rc|alpha|beta|pre|preview|post|dev)[-_.]?\d*)*(\+[\w.]+)?", re.IGNORECASE
)


def check_observed(args: argparse.Namespace) -> None:
    """Raises CommandLineError for a value that vLLM refuses."""
    _check_efforts(args.reasoning_effort_map)
    version = args.show_hidden_metrics_for_version
    _need(version is None or _VERSION.fullmatch(version.strip()), f"Invalid version: '{version}'")
    for family, bounds in (args.custom_histogram_buckets or {}).items():
        _check_buckets(family, bounds)
    _need(
        not args.collect_detailed_traces or args.otlp_traces_endpoint,
        "collect_detailed_traces requires `--otlp-traces-endpoint` to be set.",
    )


def _check_efforts(efforts: Any) -> None:
    if efforts is None:
        return
    texts = isinstance(efforts, dict) and all(isinstance(value, str) for value in efforts.values())
    _need(texts, "Error: --reasoning-effort-map must be a JSON object mapping reasoning efforts to strings.")
    unknown = sorted(set(efforts) - set(EFFORTS))
    _need(
        not unknown,
        f"Error: --reasoning-effort-map has unknown efforts {unknown}; keys must be one of {list(EFFORTS)}.",
    )


def _check_buckets(family: str, bounds: Any) -> None:
    where = f"custom_histogram_buckets[{family!r}]"
    numbers = isinstance(bounds, list) and all(isinstance(bound, int | float) for bound in bounds)
    _need(
        numbers and not any(isinstance(bound, bool) for bound in bounds), f"{where}: Input should be a list of numbers"
    )
    _need(
        family in FAMILIES,
        f"custom_histogram_buckets: unknown bucket family {family!r}; known families: {list(FAMILIES)}",
    )
    _need(bounds, f"{where}: bucket list must not be empty")
    for bound in bounds:
        _need(math.isfinite(bound) and bound > 0, f"{where}: bound {bound!r} must be finite and greater than 0")
    _need(
        all(lower < upper for lower, upper in pairwise(bounds)), f"{where}: bounds {bounds} must be strictly increasing"
    )


def _need(condition: object, message: str) -> None:
    if not condition:
        raise CommandLineError(message)
