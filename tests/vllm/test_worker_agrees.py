"""The worker's parser against vLLM's own: both accept or both refuse, with the same exit status and the same values.

The corpus: every flag in every form with a good value and with bad ones, lines of the matrix of rendered specs,
what vLLM is known to do with odd words, and lines that hypothesis puts together.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2e.vllm_source import Parsed, VllmParser
from prfaas.worker.commandline.checks import check
from prfaas.worker.commandline.own import add_own
from prfaas.worker.commandline.parser import parse
from prfaas.worker.commandline.rewrite import CommandLineError
from prfaas.worker.flags import read_config
from tests.vllm.test_flags import BY_DEST, FLAGS, MODELS_AND_FILES, TABLE, forms, sample
from tests.vllm.test_rendered import MATRIX, ROLES, containers, engines, environment_in, in_a_pod, spec_of

pytestmark = pytest.mark.clients

ORDINARY = [flag for flag in FLAGS if flag["dest"] not in MODELS_AND_FILES]
BAD = {
    "int": ("x", "1.5", ""),
    "float": ("x", ""),
    "list": (),
    "json_dict": ("{", "nothing"),
    "json_list": ("[",),
    "config_object": ("{", '{"no_such_field":1}', "nothing", "[]"),
}
"""Words that are no value of a flag of that kind."""
ODD = (
    "--kv-transfer-config.kv_port 1",
    '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"} --kv-transfer-config.kv_port 1',
    '--kv-transfer-config {"kv_connector":"NixlConnector"}',
    '--kv-transfer-config {"kv_rank":1}',
    '--kv-transfer-config {"kv_role":"both"}',
    '--kv-transfer-config {"kv_port":"15000"}',
    '--kv-transfer-config {"kv_port":15K}',
    '--kv-transfer-config={"kv_connector_extra_config":{"kv_lease_duration":30}}',
    "--kv-transfer-config.kv-connector X",
    "--kv_transfer_config {}",
    "--kv-transfer {}",
    "--kv-events-config.topic 5",
    "--kv-events-config.topic a --kv-events-config.topic=b",
    "--kv-events-config.enable_kv_cache_events true",
    "--compilation-config.cudagraph_capture_sizes+ 1,2 -cc.mode 3",
    "-cc.mode=3",
    '-cc {"mode":3}',
    "--max-num-batched-tokens 8K",
    "--max-num-batched-tokens 1.5K",
    "--max-num-queued-tokens 1.5k",
    "--max-model-len auto",
    "--max-model-len -1",
    "--max-num-batched 4096",
    "--max-num 1",
    "--port 1 --port 2",
    "--api-key a b",
    "--api-key",
    "--hf-token",
    "--hf-token x",
    "--served-model-name a b --port 1",
    "-O3",
    "-O 2",
    "-O=1",
    "-O9",
    "-O",
    "-tp 8",
    "-tp=8",
    "-tp8",
    "-x",
    "--",
    "another",
    "--enable-auto-tool-choice --tool-call-parser hermes",
    "--enable-log-outputs --enable-log-requests",
    "--reasoning-parser none",
    "--max-num-seqs 10000 --max-num-batched-tokens 8192",
    "--max-num-seqs 10000",
    "--max-num-seqs 10 --max-num-active-seqs 20",
    "--max-num-active-seqs 2000",
    "--max-num-active-seqs 200 --max-num-batched-tokens 100",
    "--nnodes 2",
    "--nnodes 2 --tensor-parallel-size 2 --node-rank 2",
    "--nnodes 2 --tensor-parallel-size 2 --node-rank 1 --headless",
    "--nnodes 2 --tensor-parallel-size 2 --data-parallel-backend ray",
    "--nnodes 4 --data-parallel-size 4 --node-rank 3 --data-parallel-external-lb",
    "--nnodes 3 --data-parallel-size 3 --tensor-parallel-size 2 --data-parallel-hybrid-lb",
    "--nnodes 2 --data-parallel-size 4 --node-rank 1 --data-parallel-external-lb",
    "--data-parallel-size 2 --data-parallel-rank 1",
    "--data-parallel-size 2 --data-parallel-rank 2",
    "--data-parallel-size 2 --data-parallel-rank 1 --data-parallel-size-local 2",
    "--data-parallel-size 2 --data-parallel-size-local 4",
    "--data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-hybrid-lb",
    "--data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-start-rank 2",
    "--data-parallel-size 2 --data-parallel-rank 1 --enable-fault-tolerance",
    "--enable-fault-tolerance",
    "--enable-eplb --enable-expert-parallel",
    "--enable-eplb --enable-expert-parallel --tensor-parallel-size 2",
    "--enable-eplb --enable-expert-parallel -tp 2 --enable-elastic-ep",
    '--eplb-config {"num_redundant_experts":2}',
    "-tp 4 -dcp 2",
    "-tp 4 -dcp 3",
    "-tp 4 -dcp 8 -pcp 2",
    "-tp 4 -dcp 4 -pcp 2",
    "--numa-bind --numa-bind-cpus 0-3,8 4",
    "--numa-bind --numa-bind-cpus 3-0",
    "--numa-bind --numa-bind-nodes 0 1",
    "--numa-bind --numa-bind-nodes -1",
    "--distributed-executor-backend mp --ray-workers-use-nsight",
    "--nnodes 2 -tp 2 --distributed-executor-backend ray",
    "--max-num-batched-tokens 1024 --max-num-seqs 8 --no-enable-chunked-prefill --max-model-len 2048",
    "--gpu-memory-utilization 1.5",
    "--gpu-memory-utilization 0",
    "--kv-cache-dtype foo",
    "--kv-cache-dtype fp8",
    "--attention-backend NOPE",
    "--attention-backend flash_attn",
    "--attention-backend auto",
    "--prefix-caching-hash-algo md5",
    "--data-parallel-rank 1",
    "--data-parallel-size 2 --data-parallel-external-lb",
    "--data-parallel-multi-port-external-lb",
    "--data-parallel-multi-port-external-lb --data-parallel-size 2 --data-parallel-size-local 2",
    "--grpc-port 1",
    "--task embed",
    '--reasoning-effort-map {"a":"b"}',
    '--reasoning-effort-map {"low":1}',
    '--reasoning-effort-map {"low":"b"}',
    '--custom-histogram-buckets {"a":[1]}',
    '--custom-histogram-buckets {"request_latency":[]}',
    '--custom-histogram-buckets {"request_latency":[2,1]}',
    '--custom-histogram-buckets {"request_latency":[0,1]}',
    '--custom-histogram-buckets {"request_latency":[true]}',
    '--custom-histogram-buckets {"request_latency":[0.5,1],"iteration_tokens":[1,8]}',
    "--show-hidden-metrics-for-version 0.32",
    "--show-hidden-metrics-for-version v0.32rc1",
    "--show-hidden-metrics-for-version old",
    "--collect-detailed-traces all",
    "--collect-detailed-traces all --otlp-traces-endpoint http://collector:4317",
    "--config nowhere.yaml",
    "--config nowhere.json",
)


LAYOUT = "how GPUs and nodes share the work, of which the worker has none"
WEIGHTS = "how weights and adapters are loaded"
NOT_CHECKED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("cp_kv_cache_interleave_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
            *("dcp_kv_cache_interleave_size", "device_ids", "distributed_executor_backend", "elastic_ep_max_dp_size"),
            *("enable_dbo", "ubatch_size"),
        ),
        LAYOUT,
    ),
    **dict.fromkeys(
        (*("default_mm_loras", "offload_backend", "offload_group_size", "pt_load_map_location"), "lora_target_modules"),
        WEIGHTS,
    ),
    **dict.fromkeys(("diffusion_config", "watermark_config"), "kinds of models that the worker does not stand for"),
    "mamba_ssu_algorithm": "kernels",
    "mamba_backend": "kernels",
    "chat_template": "the worker has no templates",
    "log_config_file": "the worker logs in its own way",
    "logging_config": "the worker logs in its own way",
    "grpc": "needs a package that vLLM does not bring",
    "performance_mode": "kernels",
}
"""Options of which vLLM's configuration refuses some values, after its parser, and the worker takes them: why."""
WITH_THE_MODEL = ("block_size", "mm_encoder_attn_backend")
"""Options of which vLLM refuses some values only with the model at hand, where its parser's process does not come."""


class Worker:
    """The worker's parser and checks, with none of its own flags."""

    def parse(self, words: list[str], environment: Mapping[str, str] | None = None) -> Parsed:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                args = parse(words, "vllm", without_own_flags, lambda _: None)
            values = dict(vars(args))
            check(args, environment or {}, lambda _: None)
        except SystemExit as error:
            return Parsed(error=said.getvalue().rpartition("error: ")[2].strip(), status=int(str(error.code)))
        except CommandLineError as error:
            return Parsed(error=str(error), status=1)
        return Parsed(values)


def without_own_flags(_parser: argparse.ArgumentParser) -> None: ...


def same(dest: str, ours: Any, real: Any) -> bool:
    """Whether two values are equal. Of a configuration object the worker keeps only the fields that were given, and an
    enumeration's member it keeps as it was written."""
    if dest == "optimization_level":  # vLLM's default is a member of an enumeration, and a value that is given is text
        return str(ours).removeprefix("O") == str(real).removeprefix("O")
    if isinstance(real, dict) and isinstance(ours, dict):
        return all(key in real and same(dest, value, real[key]) for key, value in ours.items())
    if isinstance(real, list) and isinstance(ours, (list, tuple)):
        return len(real) == len(ours) and all(same(dest, *pair) for pair in zip(ours, real, strict=True))
    if isinstance(real, dict) and ours is None:
        return True  # an object with nothing but defaults
    if dest in ENUMERATIONS and isinstance(ours, int) and isinstance(real, str):
        return True  # a member by its number
    if isinstance(real, str) and isinstance(ours, str):
        return ours == real or (dest in ENUMERATIONS and ours.lower() == real.lower())
    return bool(ours == real)


ENUMERATIONS = {flag["dest"] for flag in FLAGS if flag.get("enum_members")} | {"compilation_config", "attention_config"}


def disagreement(words: list[str], vllm: VllmParser) -> str:
    """How the two differ about a line; empty where they agree."""
    line = ["org/model", *words]
    ours, real = Worker().parse(line), vllm.parse(line)
    if ours.status != real.status and not known(ours, real):
        return f"{words}: status {ours.status} ({ours.error[:150]!r}), vLLM has {real.status} ({real.error[:300]!r})"
    if real.status or ours.values is None or real.values is None:
        return ""
    for dest, value in real.values.items():
        if dest in ("subparser", "dispatch_function", "model"):
            continue
        if dest not in ours.values or not same(dest, ours.values[dest], value):
            return f"{words}: {dest} is {ours.values.get(dest)!r}, vLLM has {value!r}"
    return ""


def known(ours: Parsed, real: Parsed) -> bool:
    """Whether a difference is one of those listed: both parsers accept, and a later check refuses."""
    if {ours.status, real.status} != {0, 1}:
        return False
    values = real.values or {}
    listed: tuple[str, ...] = tuple(NOT_CHECKED) if real.status else WITH_THE_MODEL
    return any(dest in listed and value != BY_DEST[dest]["default"] for dest, value in values.items())


@pytest.mark.parametrize("flag", ORDINARY, ids=lambda flag: flag["dest"])
def test_a_flag(flag: dict[str, Any], vllm: VllmParser) -> None:
    words, _ = sample(flag)
    lines = [[form, *words] for form in flag["flags"]]
    lines += [[f"{form}={words[0]}"] for form in flag["flags"] if len(words) == 1 and form.startswith("--")]
    lines += [[form.replace("-", "_").replace("__", "--", 1), *words] for form in flag["flags"]]
    lines += [[form] for form in sorted(forms(flag) - set(flag["flags"]))]
    lines += [[flag["flags"][0], bad] for bad in BAD.get(flag["kind"], ())]
    lines += [[flag["flags"][0], "no-such-choice"]] if flag.get("choices") else []
    lines += [[flag["flags"][0]]] if words else []
    wrong = [said for line in lines if (said := disagreement(line, vllm))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("line", ODD)
def test_odd_words(line: str, vllm: VllmParser) -> None:
    assert disagreement(line.split(), vllm) == ""


def test_no_words_at_all(vllm: VllmParser) -> None:
    ours, real = Worker().parse([]), vllm.parse([])
    assert (ours.status, ours["model_tag"]) == (real.status, real["model_tag"]) == (0, None)


NIXL = '--kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
MOVING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"VLLM_PORT": "tcp://10.96.0.1:8000"}, []),
        ({"VLLM_PORT": "eight"}, []),
        ({"VLLM_PORT": "8123"}, []),
        ({"VLLM_NONSENSE": "1"}, []),
        ({"VLLM_NONSENSE": "1"}, ["--fail-on-environ-validation"]),
        ({"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}, ["--fail-on-environ-validation"]),
        (MOVING, []),
        (MOVING, [NIXL]),
        (MOVING, [NIXL, "--enable-cumem-allocator"]),
        (MOVING, [NIXL, "--enable-sleep-mode"]),
        (MOVING, ["--kv-offloading-size", "1"]),
        ({}, ["--grpc-port", "50051"]),
    ],
)
def test_variables(environment: dict[str, str], words: list[str], vllm: VllmParser) -> None:
    line = ["org/model", *words]
    ours, real = Worker().parse(line, environment), vllm.parse(line, environment)
    assert ours.status == real.status, (ours.error, real.error)


@pytest.mark.parametrize("gone", TABLE["flag_names_not_accepted_in_0_33"])
def test_a_flag_of_earlier_releases(gone: str, vllm: VllmParser) -> None:
    assert disagreement([gone, "1"], vllm) == ""


def test_rendered_lines(vllm: VllmParser) -> None:
    wrong = []
    for parameters in MATRIX[::3]:  # every value of every dimension is among them
        kind, spec = parameters.values
        for _, _, words in engines(spec_of(kind, **spec)):
            if said := disagreement(words[1:], vllm):
                wrong.append(said)
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize(("kind", "spec"), MATRIX[::5])
def test_the_worker_serves_with_a_rendered_line(kind: str, spec: dict[str, Any]) -> None:
    """A pool runs with the worker in vLLM's place when nothing changes but image and command."""
    for role, _, container in containers(spec_of(kind, **spec)):
        words = [*map(in_a_pod, container["args"]), "--profile", "H20x8"]
        args = parse(words, "worker", add_own, lambda _: None)
        variables = environment_in(container)
        check(args, variables, lambda _: None)
        config = read_config(args, variables)
        assert config.kv_transfer is not None
        assert config.kv_transfer.role == ROLES[role]


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """Several flags in any form with good and bad values, doubled, shortened, dotted, with stray words."""
    words: list[str] = []
    for flag in draw(st.lists(st.sampled_from(ORDINARY), min_size=1, max_size=6)):
        form = draw(st.sampled_from(sorted(forms(flag))))
        good, _ = sample(flag)
        values = draw(st.sampled_from([good, good, good, *([bad] for bad in BAD.get(flag["kind"], ()))]))
        if flag.get("fields") and draw(st.booleans()):
            field = draw(st.sampled_from([each["name"] for each in flag["fields"]]))
            words += [f"{form}.{field}", draw(st.sampled_from(["1", "true", "text", "null", "{}", "8K", "[1]"]))]
        elif form not in flag["flags"]:
            words.append(form)
        else:
            words += [form, *values]
    return words


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(words=lines())
def test_any_line(words: list[str], vllm: VllmParser) -> None:
    assert disagreement(words, vllm) == ""
