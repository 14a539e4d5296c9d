"""Metrics are vLLM's: every name, type, label and bucket is in its list, and is there when it would be."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from prfaas.worker.blocks import BlockPool
from prfaas.worker.commandline.parser import parse
from prfaas.worker.engine import AdmissionError, Engine
from prfaas.worker.exposed import Exposed, read_exposed, table
from prfaas.worker.generation import Ask, Parent
from prfaas.worker.metrics import Metrics, token_buckets
from prfaas.worker.residency import Residency
from tests.facts import facts
from tests.worker import metric_table
from tests.worker.rig import ManualClock, config, profile, serving, until

LISTED = {metric["name"]: metric for metric in facts("metrics")["metrics"]}
EVERYTHING = frozenset(metric_table.CONDITIONS.values())
PROMPT, OTHER = "word" * 1_000, "else" * 1_000


def shown(metrics: Metrics) -> dict[str, Metric]:
    """The families of an exposition, without the `_created` ones; a counter under its name in the facts."""
    families = {}
    for family in text_string_to_metric_families(exposition.generate_latest(metrics.registry).decode()):
        if not family.name.endswith("_created") and not family.name.startswith("prfaas_worker_"):
            total = family.type == "counter" and family.name not in LISTED
            families[f"{family.name}_total" if total else family.name] = family
    return families


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """One series of the engine."""
    found = metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0"} | labels)
    assert found is not None, name
    return found


def metrics(*conditions: str, **exposed: Any) -> Metrics:
    """The metrics of an engine."""
    return Metrics("m", 131_072, conditions, Exposed(**exposed))


def expected(*conditions: str) -> set[str]:
    """What the facts say is there."""
    there = {"stats", "http", *conditions} - {"sleep", "weights"}
    return {name for name, entry in LISTED.items() if metric_table.CONDITIONS.get(entry["exists_when"]) in there}


def complete(made: Metrics) -> Metrics:
    """With what the engine adds to them."""
    made.cache_config({"block_size": "16"})
    made.adapters(lambda: ["a"], lambda: ["b", "c"])
    return made


def test_the_packages_table_is_made_of_the_facts() -> None:
    assert metric_table.PACKAGE.read_text() == metric_table.text()
    assert {entry["exists_when"] for entry in LISTED.values()} == {*metric_table.CONDITIONS, *metric_table.NOT_EMULATED}


def test_the_coverage_lists_every_metric() -> None:
    covered = yaml.safe_load((Path(__file__).parent / "coverage" / "metrics.yaml").read_text())
    assert set(covered) == set(LISTED)
    emulated = {name for name, how in covered.items() if how == "emulated"}
    assert emulated == {metric.name for metric in table()}
    assert len(emulated) >= 0.95 * len(LISTED)


@pytest.mark.parametrize("condition", [None, *sorted(EVERYTHING - {"stats", "http", "sleep", "weights"})])
def test_a_metric_is_there_under_its_condition_and_only_then(condition: str | None) -> None:
    conditions = (condition,) if condition else ()
    assert set(shown(complete(metrics(*conditions, draft_tokens=2)))) == expected(*conditions)


def test_types_labels_and_buckets_are_vllms() -> None:
    made = complete(metrics(*EVERYTHING - {"sleep", "weights"}, draft_tokens=2))
    for name, operation in (("sleep", "wake"), ("weights", "update")):
        with made.operation(name, operation):
            pass
    made.http("/v1/completions", "POST", 200, 10, 20, 0.1)
    seen = shown(made)
    assert set(seen) == expected(*EVERYTHING) | {
        name for name, entry in LISTED.items() if "after the first" in entry["exists_when"]
    }
    for name, family in seen.items():
        fact = LISTED[name]
        assert family.type == fact["type"], name
        bounds = set()
        for sample in family.samples:
            labels = set(sample.labels) - {"le", "quantile"}
            if isinstance(fact["labels"], list):
                assert labels == {label for label in fact["labels"] if not label.startswith("<")}, sample
            for label, values in fact.get("label_values", {}).items():
                assert not isinstance(values, list) or sample.labels[label] in values
            if "le" in sample.labels:
                bounds.add(float(sample.labels["le"]))
        if isinstance(fact.get("buckets"), list) and bounds:
            assert bounds == {*map(float, fact["buckets"]), float("inf")}, name
        if fact.get("bucket_family") == "request_tokens":
            assert bounds == {*token_buckets(131_072), float("inf")}, name
        if fact["family"] == "core" and fact["type"] != "gauge":
            assert family.samples, f"{name} is there from the start, at 0"


@pytest.mark.fact("README 19")
def test_histograms_of_transfers_and_created_gauges() -> None:
    """Times end at 5 s and bytes begin at 2 KiB: sums are exact, quantiles of slow lines are not."""
    made = metrics("nixl")
    made.of("nixl_xfer_time_seconds").observe(60)
    assert value(made, "vllm:nixl_xfer_time_seconds_bucket", le="5.0") == 0
    assert value(made, "vllm:nixl_xfer_time_seconds_sum") == 60
    bounds = [
        float(sample.labels["le"])
        for sample in shown(made)["vllm:nixl_bytes_transferred"].samples
        if sample.name.endswith("_bucket")
    ]
    assert bounds == [2048 * 4**power for power in range(12)] + [float("inf")]
    text = exposition.generate_latest(made.registry).decode()
    assert "# TYPE vllm:prompt_tokens_created gauge" in text
    assert "# TYPE vllm:iteration_tokens_total histogram" in text


def test_token_buckets_are_a_1_2_5_series() -> None:
    assert token_buckets(131_072) == (
        *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000),
        *(10_000, 20_000, 50_000, 100_000),
    )


def read(*words: str, transfer: dict[str, Any] | None = None, **environment: str) -> Exposed:
    """What a command line makes of it."""
    return read_exposed(parse(["m", *words], "vllm serve", lambda _: None, lambda _: None), transfer or {}, environment)


def connector(name: str, **extra: Any) -> dict[str, Any]:
    """A --kv-transfer-config."""
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def conditions() -> Iterator[tuple[Exposed, set[str]]]:
    """Command lines, and the conditions that they bring about."""
    yield read(), set()
    yield read("--kv-cache-metrics"), {"residency"}
    yield read("--enable-lora"), {"lora"}
    yield read("--tool-call-parser", "hermes"), {"tool_parser"}
    yield read("--watermark-config", '{"method": "gumbel"}'), {"watermark"}
    yield read("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'), {"speculative"}
    yield read("--diffusion-config", '{"canvas_length": 32}'), {"diffusion"}
    yield read(VLLM_COMPUTE_NANS_IN_LOGITS="1"), {"nans"}
    for name in ("NixlConnector", "NixlPullConnector", "NixlPushConnector"):
        yield read(transfer=connector(name)), {"nixl"}
    yield read(transfer=connector("MooncakeConnector")), {"mooncake"}
    yield read(transfer=connector("OffloadingConnector")), {"offload", "offload_cpu"}
    yield (
        read(transfer=connector("OffloadingConnector", store_threshold=2)),
        {"offload", "offload_cpu", "offload_threshold"},
    )
    yield (
        read(transfer=connector("OffloadingConnector", spec_name="TieringOffloadingSpec")),
        {"offload", "offload_cpu", "offload_tiers"},
    )
    yield (
        read("--kv-cache-metrics", transfer=connector("HiSparseConnector")),
        {"residency", "hisparse", "hisparse_residency"},
    )
    both = [connector("NixlConnector"), connector("MooncakeStoreConnector")]
    yield read(transfer=connector("MultiConnector", connectors=both)), {"nixl", "mooncake_store"}


@pytest.mark.parametrize(("exposed", "found"), list(conditions()))
def test_conditions_come_from_the_command_line(exposed: Exposed, found: set[str]) -> None:
    assert exposed.conditions == found


def test_settings_of_metrics_come_from_the_command_line() -> None:
    speculative = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    buckets = json.dumps({"time_to_first_token": [1, 2]})
    read_all = read(
        *("--speculative-config", speculative, "--custom-histogram-buckets", buckets, "--max-loras", "4"),
        *("--kv-cache-metrics-sample", "0.5", "--disable-log-stats"),
    )
    assert (read_all.draft_tokens, read_all.max_loras, read_all.residency_sample) == (3, 4, 0.5)
    assert read_all.buckets == {"time_to_first_token": (1, 2)}
    assert not read_all.stats


def test_without_stats_only_the_server_is_measured() -> None:
    made = complete(metrics("nixl", stats=False))
    made.finished("stop")
    made.rejected("max_num_queued_reqs")
    made.of("nixl_xfer_time_seconds").observe(1)
    assert set(shown(made)) == {name for name in LISTED if name.startswith("http_")}


def test_bucket_families_can_be_replaced() -> None:
    made = metrics(buckets={"time_to_first_token": (1.0, 2.0)})
    made.ttft.observe(1.5)
    assert value(made, "vllm:time_to_first_token_seconds_bucket", le="2.0") == 1
    assert made.registry.get_sample_value("vllm:time_to_first_token_seconds_bucket", {"le": "0.001"}) is None
    assert value(made, "vllm:e2e_request_latency_seconds_bucket", le="0.3") == 0


def test_requests_to_the_server_are_counted_as_the_instrumentator_does() -> None:
    made = metrics()
    made.http("/v1/completions", "POST", 200, 100, 1_000, 0.2)
    made.http("/v1/completions", "POST", 404, 50, 0, 0.7)
    for handler in ("/metrics", "/health", "/v1/load_lora_adapter"):
        made.http(handler, "GET", 200, 0, 0, 0)
    found = {
        name: made.registry.get_sample_value(name, labels)
        for name, labels in (
            ("http_requests_total", {"handler": "/v1/completions", "method": "POST", "status": "4xx"}),
            ("http_request_size_bytes_sum", {"handler": "/v1/completions"}),
            ("http_response_size_bytes_count", {"handler": "/v1/completions"}),
            ("http_request_duration_highr_seconds_count", {}),
            ("http_request_duration_seconds_bucket", {"handler": "/v1/completions", "method": "POST", "le": "0.5"}),
        )
    }
    assert list(found.values()) == [1, 150, 2, 2, 1]


def test_sleep_and_weights_appear_with_their_first_call() -> None:
    made = metrics()
    assert not any("sleep_mode" in name or "rl_weight" in name for name in shown(made))
    with made.operation("sleep", "wake"):
        name = "vllm:sleep_mode_operations_in_flight"
        assert made.registry.get_sample_value(name, {"operation": "wake"}) == 1
    labels = {"operation": "wake"}
    assert made.registry.get_sample_value("vllm:sleep_mode_operation_duration_seconds_count", labels) == 1
    made.set_sleeping(1)
    assert value(made, "vllm:engine_sleep_state", sleep_state="weights_offloaded") == 1
    assert value(made, "vllm:engine_sleep_state", sleep_state="awake") == 0


def test_adapters_in_use_are_labels() -> None:
    (sample,) = shown(complete(metrics("lora", max_loras=4)))["vllm:lora_requests_info"].samples
    assert sample.labels == {"max_lora": "4", "waiting_lora_adapters": "a", "running_lora_adapters": "b,c"}


def test_the_life_of_blocks_is_measured() -> None:
    """Taken at 0, found at 3 and 5, taken again at 9."""
    now, seen = [0.0], dict[str, list[float]](life=[], idle=[], gap=[])
    pool = BlockPool(1, 16)
    observers = tuple(seen[name].append for name in ("life", "idle", "gap"))
    pool.watcher = Residency(lambda: now[0], random.Random(1), 1.0, observers)  # type: ignore[arg-type]  # three
    blocks = pool.take(1)
    assert blocks is not None
    pool.register(blocks[0], 7)
    pool.give_back(blocks)
    for now[0] in (3.0, 5.0):
        pool.share(blocks)
        pool.give_back(blocks)
    now[0] = 9.0
    pool.take(1)
    assert seen == {"life": [9], "idle": [4], "gap": [2]}
    pool.give_back(blocks)
    assert pool.forget_all()
    pool.take(1)
    assert seen["life"] == [9], "a reset ends no life"


async def test_speculation_is_counted_by_position() -> None:
    """2.5 tokens a step with three drafts: of 9 tokens the first is no step's; steps make 2, 3, 2 and 1."""
    decode = {"steps": [{"batch": 1, "seconds": 0.1}], "maxBatch": 4, "tokensPerStep": 2.5}
    exposed = Exposed(conditions=frozenset({"speculative"}), draft_tokens=3)
    clock = ManualClock()
    engine = Engine(config(profile=profile(decode=decode), exposed=exposed, time_scale=1), clock)
    engine.submit(Ask("r", b"word" * 20, 20, 9))
    for _ in range(40):
        clock.advance(0.05)
        engine.turn(clock.now())
    counted = {
        name: engine.metrics.registry.get_sample_value(
            f"vllm:spec_decode_num_{name}_total", {"model_name": "org/model", "engine": "0"}
        )
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert counted == {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 4}
    by_position = [
        engine.metrics.of("spec_decode_num_accepted_tokens_per_pos", str(at))._value.get() for at in range(3)
    ]
    assert by_position == [3, 1, 0]


async def test_a_request_of_several_answers_is_counted_once() -> None:
    clock = ManualClock()
    engine = Engine(config(time_scale=1), clock)
    parent = Parent(2, 2)
    for number, limit in enumerate((3, 5)):
        engine.submit(Ask(f"r{number}", b"word" * 20, 20, limit, parent=parent), admitted=True)
    clock.advance(60)
    engine.turn(clock.now())
    sums = {
        name: engine.metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "org/model", "engine": "0"})
        for name in ("request_params_n_sum", "request_params_n_count", "request_max_num_generation_tokens_sum")
    }
    assert list(sums.values()) == [2, 1, 5]


@pytest.mark.fact("README 6")
async def test_requests_in_flight_are_limited_running_ones_included() -> None:
    clock = ManualClock()
    engine = Engine(config(max_queued_requests=2, time_scale=1), clock)
    engine.submit(Ask("running", b"word" * 20, 20, 50))
    clock.advance(2)
    engine.turn(clock.now())
    assert engine.scheduler.running == 1
    with pytest.raises(AdmissionError):
        engine.check_admission(2)
    engine.submit(Ask("waiting", b"word" * 20, 20, 1))
    with pytest.raises(AdmissionError, match="busy") as refused:
        engine.submit(Ask("refused", b"word" * 20, 20, 1))
    assert refused.value.reason == "max_num_queued_reqs"
    rejected = "vllm:admission_rejections_total"
    labels = {"model_name": "org/model", "reason": "max_num_queued_reqs"}
    assert engine.metrics.registry.get_sample_value(rejected, labels) == 2


@pytest.mark.fact("README 6")
async def test_the_request_that_crosses_the_token_limit_is_admitted() -> None:
    """Whole prompts count until their first token, whatever of them is computed or cached."""
    clock = ManualClock()
    engine = Engine(config(max_queued_tokens=100, time_scale=1), clock)
    engine.submit(Ask("below", b"word" * 99, 99, 2))
    engine.check_admission()
    engine.submit(Ask("reaches", b"word", 1, 2))
    with pytest.raises(AdmissionError, match="prefill token backlog"):
        engine.submit(Ask("refused", b"a", 1, 1))
    clock.advance(1.2)  # the first has its first token
    engine.turn(clock.now())
    engine.submit(Ask("crosses", b"word" * 150, 150, 2))
    with pytest.raises(AdmissionError, match="prefill token backlog"):
        engine.submit(Ask("refused", b"a", 1, 1))
    clock.advance(60)
    engine.turn(clock.now())
    engine.submit(Ask("fits again", b"a", 1, 1))


async def test_times_of_one_request() -> None:
    """rig.profile at time scale 10: prefill of 1,000 tokens 0.2 s, steps of 0.01 s."""
    clock = ManualClock()
    async with serving(replace(config(), time_scale=10), clock=clock) as (client,):
        first = asyncio.create_task(client.complete(PROMPT, 3))
        await until(lambda: client.worker.engine.scheduler.running == 1, "prefilling")
        second = asyncio.create_task(client.complete(OTHER, 1))
        await until(lambda: client.worker.engine.scheduler.waiting == 1, "queued")
        assert await client.metric("vllm:num_requests_running") == 1
        assert await client.metric("vllm:num_requests_waiting") == 1
        assert await client.metric("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
        assert await client.metric("vllm:kv_cache_usage_perc") > 0
        clock.advance(0.5)
        await asyncio.gather(first, second)
        sums = {
            "vllm:request_queue_time_seconds_sum": 0.2,  # the second waited for the first
            "vllm:request_prefill_time_seconds_sum": 0.4,
            "vllm:request_decode_time_seconds_sum": 0.02,
            "vllm:request_inference_time_seconds_sum": 0.42,
            "vllm:inter_token_latency_seconds_sum": 0.02,
            "vllm:inter_token_latency_seconds_count": 2,
            "vllm:request_time_per_output_token_seconds_sum": 0.01,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:prompt_tokens_total": 2_000,
            "vllm:generation_tokens_total": 4,
            "vllm:request_prompt_tokens_sum": 2_000,
            "vllm:request_generation_tokens_sum": 4,
            "vllm:request_params_max_tokens_sum": 4,
            "vllm:request_prefill_kv_computed_tokens_sum": 2_000,
        }
        for name, value in sums.items():
            assert await client.metric(name) == pytest.approx(value), name
        assert await client.metric("vllm:request_success_total", finished_reason="length") == 2
        assert await client.metric("vllm:kv_cache_usage_perc") == 0
