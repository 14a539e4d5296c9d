"""vLLM 0.33's metrics: names, labels, buckets and when they exist are vLLM's, from a table (`exposed`).

Durations are real seconds, so modelled seconds over the time scale; bytes are bytes on the wire, scaled like the wire.
Two names are our own, `prfaas_worker_*`: what crossed the KV port in each direction, framing and failures included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from prfaas.worker.exposed import Exposed, Metric, table

ENGINE = "0"
_KINDS: dict[str, type[MetricWrapperBase]] = {
    "gauge": Gauge,
    "counter": Counter,
    "histogram": Histogram,
    "summary": Summary,
}
_CACHE_INFO, _LORA_INFO = "vllm:cache_config_info", "vllm:lora_requests_info"
EXCLUDED_HANDLERS = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
"""Requests whose handler contains one of these are not measured: so neither is `/v1/load_lora_adapter`."""


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """vLLM's 1-2-5 series up to the longest request."""
    return tuple(
        value
        for power in range(len(str(max_model_len)))
        for digit in (1, 2, 5)
        if (value := digit * 10**power) <= max_model_len
    )


class Absent:
    """A metric that this engine does not have: takes every value, shows none."""

    def labels(self, *_: object, **__: object) -> Absent:
        """Itself."""
        return self

    def inc(self, _: float = 1) -> None:
        """Nothing."""

    def dec(self, _: float = 1) -> None:
        """Nothing."""

    def set(self, _: float) -> None:
        """Nothing."""

    def observe(self, _: float) -> None:
        """Nothing."""

    def set_function(self, _: Callable[[], float]) -> None:
        """Nothing."""


ABSENT = Absent()


class Metrics:
    """Every series of one engine and its server, in a registry of its own."""

    def __init__(
        self, model_name: str, max_model_len: int, conditions: Iterable[str] = (), exposed: Exposed | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self.model_name, self._exposed = model_name, exposed or Exposed()
        self._max_model_len = max_model_len
        self._conditions = {"http"}
        if self._exposed.stats:
            self._conditions |= {"stats", *self._exposed.conditions, *conditions}
        self._families: dict[str, MetricWrapperBase] = {}
        for metric in table():
            if metric.when in self._conditions and metric.name not in (_CACHE_INFO, _LORA_INFO):
                self._register(metric)

        self.set_sleeping(0)
        self.prompt_tokens, self.generation_tokens = self.of("prompt_tokens"), self.of("generation_tokens")
        self.computed, self.cached, self.external = (
            self.of("prompt_tokens_by_source", source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        )
        self.prompt_cached = self.of("prompt_tokens_cached")
        self.hits_here, self.hits_at_peers = (
            self.of("prompt_tokens_cached_by_source", source) for source in ("device", "p2p")
        )
        self.prefix_queries, self.prefix_hits = self.of("prefix_cache_queries"), self.of("prefix_cache_hits")
        self.external_queries = self.of("external_prefix_cache_queries")
        self.external_hits = self.of("external_prefix_cache_hits")
        self.preempted = self.of("num_preemptions")
        self._success = {
            reason: self.of("request_success", reason) for reason in ("stop", "length", "abort", "error", "repetition")
        }

        self.ttft = self.of("time_to_first_token_seconds")
        self.inter_token = self.of("inter_token_latency_seconds")
        self.per_token = self.of("request_time_per_output_token_seconds")
        self.e2e, self.queue_time = self.of("e2e_request_latency_seconds"), self.of("request_queue_time_seconds")
        self.inference_time = self.of("request_inference_time_seconds")
        self.prefill_time, self.decode_time = (
            self.of(f"request_{phase}_time_seconds") for phase in ("prefill", "decode")
        )
        self.request_prompt, self.request_generation = (
            self.of(f"request_{what}_tokens") for what in ("prompt", "generation")
        )
        self.request_max_generation = self.of("request_max_num_generation_tokens")
        self.params_max_tokens, self.params_n = self.of("request_params_max_tokens"), self.of("request_params_n")
        self.preemptions = self.of("request_num_preemptions")
        self.prefill_computed = self.of("request_prefill_kv_computed_tokens")
        self.iteration_tokens = self.of("iteration_tokens_total")
        self.block_lifetime, self.block_idle, self.block_gap = (
            self.of(f"kv_block_{what}_seconds") for what in ("lifetime", "idle_before_evict", "reuse_gap")
        )

        self.kv_wire = Counter(
            "prfaas_worker_kv_wire_bytes",
            "Bytes that crossed the KV port, framing and failed transfers included.",
            ("direction",),
            registry=self.registry,
        )
        connector = "mooncake" if "mooncake" in self._conditions else "nixl"
        self.failed_transfers = self.of(f"{connector}_num_failed_transfers")

        self._http: tuple[Any, ...] = tuple(
            self._families[f"http_{name}"]
            for name in (
                *("requests_total", "request_size_bytes", "response_size_bytes"),
                *("request_duration_highr_seconds", "request_duration_seconds"),
            )
        )

    def of(self, name: str, *values: str) -> Any:
        """A series by its family's name, without `vllm:`, and the values of its labels after model and engine.

        Something that ignores every call where this engine has no such family.
        """
        family = self._families.get(f"vllm:{name}")
        if family is None:
            return ABSENT
        names = family._labelnames  # the library has no public name for it
        leading = [value for label, value in (("model_name", self.model_name), ("engine", ENGINE)) if label in names]
        return family.labels(*leading, *values) if names else family

    def cache_config(self, labels: Mapping[str, str]) -> None:
        """The constant series whose labels say how the KV cache is set up."""
        if "stats" not in self._conditions:
            return
        gauge = Gauge(
            _CACHE_INFO, "Information of the LLMEngine CacheConfig", (*labels, "engine"), registry=self.registry
        )
        gauge.labels(*labels.values(), ENGINE).set(1)

    def adapters(self, waiting: Callable[[], Iterable[str]], running: Callable[[], Iterable[str]]) -> None:
        """Which LoRA adapters requests use, read when asked for."""
        if "lora" in self._conditions:
            self.registry.register(_Adapters(self._exposed.max_loras, waiting, running))

    def watch(
        self,
        running: Callable[[], int],
        queued: Callable[[], int],
        deferred: Callable[[], int],
        stages: Callable[[], tuple[int, int, int]],
        usage: Callable[[], float],
    ) -> None:
        """Read the gauges from the engine when they are asked for, rather than at every step."""
        self.of("num_requests_running").set_function(running)
        self.of("num_requests_waiting").set_function(lambda: queued() + deferred())
        self.of("kv_cache_usage_perc").set_function(usage)
        self.of("num_requests_waiting_by_reason", "capacity").set_function(queued)
        self.of("num_requests_waiting_by_reason", "deferred").set_function(deferred)
        for index, stage in enumerate(("waiting_to_start", "in_progress", "completed_waiting")):
            self.of("num_requests_kv_fetch_by_stage", stage).set_function(partial(_nth, stages, index))

    def finished(self, reason: str) -> None:
        """A request ended."""
        self._success[reason].inc()
        self.of("watermark_requests", "not_watermarked").inc()

    def rejected(self, reason: str) -> None:
        """A request was refused at a queue limit."""
        self.of("admission_rejections", reason).inc()

    def drafted(self, sequences: int, accepted: float) -> None:
        """A decode step of so many sequences with speculation; `accepted`: drafts accepted in it, of all sequences."""
        tokens = self._exposed.draft_tokens
        self.of("spec_decode_num_drafts").inc(sequences)
        self.of("spec_decode_num_draft_tokens").inc(sequences * tokens)
        self.of("spec_decode_num_accepted_tokens").inc(accepted)
        for position in range(tokens):
            taken = min(max(accepted - position * sequences, 0), sequences)
            self.of("spec_decode_num_accepted_tokens_per_pos", str(position)).inc(taken)

    def set_sleeping(self, level: int) -> None:
        """The sleep state: 0 awake, 1 weights offloaded, 2 all discarded."""
        for state, at in (("awake", 0), ("weights_offloaded", 1), ("discard_all", 2)):
            self.of("engine_sleep_state", state).set(level == at)

    @contextmanager
    def operation(self, family: str, operation: str) -> Iterator[None]:
        """Measure a call of a route for development: of `sleep` (sleep, wake, ...) or `weights` (init, update, ...)."""
        names = {"sleep": "sleep_mode_operation", "weights": "rl_weight_update_operation"}
        if family not in self._conditions:
            self._conditions.add(family)
            for metric in table():
                if metric.when == family:
                    self._register(metric)
        in_flight, began = self.of(f"{names[family]}s_in_flight", operation), time.perf_counter()
        in_flight.inc()
        try:
            yield
        finally:
            in_flight.dec()
            self.of(f"{names[family]}_duration_seconds", operation).observe(time.perf_counter() - began)

    def http(self, handler: str, method: str, status: int, request: int, response: int, seconds: float) -> None:
        """One HTTP request, as the FastAPI instrumentator counts it. Sizes are those of the Content-Length headers."""
        if any(excluded in handler for excluded in EXCLUDED_HANDLERS):
            return
        requests, request_size, response_size, fine, coarse = self._http
        requests.labels(handler, method, f"{status // 100}xx").inc()
        request_size.labels(handler).observe(request)
        response_size.labels(handler).observe(response)
        fine.observe(seconds)
        coarse.labels(handler, method).observe(seconds)

    def _register(self, metric: Metric) -> None:
        more: dict[str, Any] = {}
        if metric.type == "histogram":
            more["buckets"] = self._buckets(metric)
        text = metric.name.removeprefix("vllm:").replace("_", " ")
        family = _KINDS[metric.type](metric.name, text, metric.labels, registry=self.registry, **more)
        self._families[metric.name] = family
        values = dict(metric.values)
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            values["position"] = tuple(map(str, range(self._exposed.draft_tokens)))
        common = {"model_name": (self.model_name,), "engine": (ENGINE,)} | values
        if metric.labels and all(label in common for label in metric.labels) and metric.when not in _SEEN_ON_USE:
            for each in product(*(common[label] for label in metric.labels)):
                family.labels(*each)

    def _buckets(self, metric: Metric) -> tuple[float, ...]:
        if metric.family is not None and metric.family in self._exposed.buckets:
            return self._exposed.buckets[metric.family]
        return metric.buckets or token_buckets(self._max_model_len)


_SEEN_ON_USE = ("sleep", "weights", "tool_parser", "http")
"""Conditions whose series begin with their first use, not at the start."""


class _Adapters(Collector):
    """`vllm:lora_requests_info`: the adapters are its labels, the time is its value."""

    def __init__(self, most: int, waiting: Callable[[], Iterable[str]], running: Callable[[], Iterable[str]]) -> None:
        self._most, self._waiting, self._running = most, waiting, running

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See Collector."""
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily(_LORA_INFO, "Running stats on lora requests.", labels=labels)
        family.add_metric((str(self._most), ",".join(self._waiting()), ",".join(self._running())), time.time())
        yield family


def _nth(values: Callable[[], tuple[int, int, int]], index: int) -> int:
    return values()[index]
