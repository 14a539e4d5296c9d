"""vLLM 0.33's metrics: names, labels and buckets are vLLM's, checked by a test against its list.

Durations are real seconds, so modelled seconds over the time scale; bytes are bytes on the wire, scaled like the wire.
Two names are our own, `prfaas_worker_*`: what crossed the KV port in each direction, framing and failures included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

T = TypeVar("T", Gauge, Counter)

ENGINE = "0"
_LABELS = ("model_name", "engine")
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_NIXL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_NIXL_BYTES = tuple(2048 * 4**power for power in range(12))
_NIXL_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_ITERATION = (1, *(2**power for power in range(3, 15)))


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """vLLM's 1-2-5 series up to the longest request."""
    return tuple(
        value
        for power in range(len(str(max_model_len)))
        for digit in (1, 2, 5)
        if (value := digit * 10**power) <= max_model_len
    )


def _nth(values: Callable[[], tuple[int, int, int]], index: int) -> int:
    return values()[index]


class Metrics:
    """Every series of one engine, in a registry of its own."""

    def __init__(self, model_name: str, max_model_len: int, *, nixl: bool, kv_consumer: bool) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        tokens = token_buckets(max_model_len)

        self._running = self._gauge("num_requests_running", "Requests that hold a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._by_reason = self._family(Gauge, "num_requests_waiting_by_reason", "Waiting requests.", "reason")
        self._fetching = (
            self._family(Gauge, "num_requests_kv_fetch_by_stage", "Requests whose KV is fetched.", "stage")
            if kv_consumer
            else None
        )
        sleep = self._family(Gauge, "engine_sleep_state", "1 for the state the engine is in.", "sleep_state")
        for state in ("awake", "weights_offloaded", "discard_all"):
            sleep.labels(model_name, ENGINE, state).set(state == "awake")

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        by_source = self._family(
            Counter, "prompt_tokens_by_source", "Prompt tokens by where their KV is from.", "source"
        )
        self.computed, self.cached, self.external = (
            by_source.labels(model_name, ENGINE, source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        )
        self.prompt_cached = self._counter("prompt_tokens_cached", "Prompt tokens that were not computed here.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Tokens looked for in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.preempted = self._counter("num_preemptions", "Requests that gave up their blocks for others.")
        for name in ("mm_cache_queries", "mm_cache_hits"):
            self._counter(name, "Zero: this worker reads text only.")
        self.external_queries = self._counter("external_prefix_cache_queries", "Tokens looked for at a peer.")
        self.external_hits = self._counter("external_prefix_cache_hits", "Tokens found at a peer.")
        success = self._family(Counter, "request_success", "Finished requests.", "finished_reason")
        self._success = {
            reason: success.labels(model_name, ENGINE, reason)
            for reason in ("stop", "length", "abort", "error", "repetition")
        }
        rejections = Counter(
            "vllm:admission_rejections", "Requests refused.", ("model_name", "reason"), registry=self.registry
        )
        self._rejections = {
            reason: rejections.labels(model_name, reason) for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        }

        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between tokens.", _INTER_TOKEN)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _INTER_TOKEN
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to slot.", _REQUEST)
        self.inference_time = self._histogram("request_inference_time_seconds", "Slot to last token.", _REQUEST)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Slot to first token.", _REQUEST)
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token.", _REQUEST)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens per request.", tokens)
        self.request_generation = self._histogram("request_generation_tokens", "Tokens per answer.", tokens)
        self.request_max_generation = self._histogram(
            "request_max_num_generation_tokens", "Most tokens of one answer of a request.", tokens
        )
        self.params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", tokens)
        self.params_n = self._histogram("request_params_n", "n asked for.", (1, 2, 5, 10, 20))
        self.preemptions = self._histogram(
            "request_num_preemptions", "Preemptions per request.", (1, 2, 3, 4, 5, 10, 20)
        )
        self.prefill_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens whose KV was computed here.", tokens
        )
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step.", _ITERATION)

        self.kv_wire = Counter(
            "prfaas_worker_kv_wire_bytes",
            "Bytes that crossed the KV port, framing and failed transfers included.",
            ("direction",),
            registry=self.registry,
        )
        if nixl:
            self.xfer_time = self._histogram("nixl_xfer_time_seconds", "Transfer times.", _NIXL_SECONDS)
            self.xfer_bytes = self._histogram("nixl_bytes_transferred", "Bytes per transfer.", _NIXL_BYTES)
            self._histogram("nixl_post_time_seconds", "Empty: nothing is posted here.", (0.001, *_NIXL_SECONDS))
            self.descriptors = self._histogram("nixl_num_descriptors", "Chunks per transfer.", _NIXL_DESCRIPTORS)
            self.failed_transfers = self._counter("nixl_num_failed_transfers", "Transfers that failed.")
            self.failed_notifications = self._counter("nixl_num_failed_notifications", "Releases not delivered.")
            self.expired = self._counter("nixl_num_kv_expired_reqs", "Leases that ended unread.")
            self.after_expiry = self._counter("nixl_num_notifications_after_expiry", "Reads that ended too late.")

    def cache_config(self, labels: Mapping[str, str]) -> None:
        """The constant series whose labels say how the KV cache is set up."""
        names = (*labels, "engine")
        gauge = Gauge("vllm:cache_config_info", "Labels of the cache configuration.", names, registry=self.registry)
        gauge.labels(*labels.values(), ENGINE).set(1)

    def watch(
        self,
        running: Callable[[], int],
        queued: Callable[[], int],
        deferred: Callable[[], int],
        stages: Callable[[], tuple[int, int, int]],
        usage: Callable[[], float],
    ) -> None:
        """Read the gauges from the engine when they are asked for, rather than at every step."""
        self._running.set_function(running)
        self._waiting.set_function(lambda: queued() + deferred())
        self._usage.set_function(usage)
        self._by_reason.labels(self._model_name, ENGINE, "capacity").set_function(queued)
        self._by_reason.labels(self._model_name, ENGINE, "deferred").set_function(deferred)
        if self._fetching is not None:
            for index, stage in enumerate(("waiting_to_start", "in_progress", "completed_waiting")):
                child = self._fetching.labels(self._model_name, ENGINE, stage)
                child.set_function(partial(_nth, stages, index))

    def finished(self, reason: str) -> None:
        """A request ended."""
        self._success[reason].inc()

    def rejected(self, reason: str) -> None:
        """A request was refused at a queue limit."""
        self._rejections[reason].inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(self._model_name, ENGINE)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(self._model_name, ENGINE)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return family.labels(self._model_name, ENGINE)

    def _family(self, kind: type[T], name: str, text: str, label: str) -> T:
        return kind(f"vllm:{name}", text, (*_LABELS, label), registry=self.registry)
