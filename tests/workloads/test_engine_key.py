"""Instances whose engines would refuse each other in the handshake never have equal compatibility keys.

What vLLM's handshake hashes is in tests/data/vllm-0.33/kv_transfer.json. It is computed here from the rendered command
line as the GPU-less worker's parser reads it, which is a parser of its own (and is compared with vLLM's elsewhere).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prfaas.cli.main import build_parser
from prfaas.workloads.engine import check_roles_agree, command_line, compatibility_key
from prfaas.workloads.errors import SpecError
from tests.facts import facts
from tests.workloads.pools import IMAGE, pd_pool, pool

FACTS = facts("kv_transfer")
PARSER = build_parser()
OF_THE_MODEL = ("num_kv_heads (total)", "head_size", "num_hidden_layers")
"""Inputs that follow from the model, its revision and what overrides its configuration."""
TYPES = {"half": "float16", "float": "float32"}

SHAPES: Sequence[Sequence[str]] = (
    ["--kv-cache-dtype", "fp8"],
    ["--kv_cache_dtype=fp8"],
    ["--kv-cache-dtype=fp8_e5m2"],
    ["--kv-cache-dtype", "auto"],
    ["--dtype", "half"],
    ["--dtyp=float16"],
    ["--dtype", "bfloat16"],
    ["--attention-backend", "FLASHMLA"],
    ["--attention-back=flashmla"],
    ["--attention_backend", "TRITON_MLA"],
    ["--disable-hybrid-kv-cache-manager"],
    ["--no-disable-hybrid-kv-cache-manager"],
    ["--enable-hybrid-kv-cache-manager"],
    ["--speculative-config", '{"method": "eagle3", "model": "example/draft", "num_speculative_tokens": 2}'],
    ["--speculative-config", '{"model": "example/draft", "num_speculative_tokens": 4, "method": "eagle3"}'],
    ["--speculative-config.method", "eagle3", "--speculative-config.model", "example/draft"],
    ["-sc.method=eagle3", "-sc.model=example/other"],
    ["--spec-method", "eagle3", "--spec-model", "example/draft"],
    ["--hf-overrides", '{"num_hidden_layers": 2}'],
    ["--hf-overrides.num_hidden_layers", "2"],
    ["--quantization", "fp8"],
    ["--code-revision", "v2"],
)
TUNING: Sequence[Sequence[str]] = (
    ["--max-num-seqs", "8"],
    ["--gpu-memory-utilization=0.9"],
    ["--max-num-batched-tokens", "8K"],
    ["--enable-expert-parallel"],
    ["--trust-remote-code"],
    ["--seed", "7"],
)
SETTINGS: Sequence[Mapping[str, Any]] = (
    {},
    {"model": {"name": "example/other"}},
    {"model": {"revision": "v2"}},
    {"engine": {"image": "registry.example/vllm-openai:v0.34.0"}},
    {"engine": {"image": "mirror.example/a/vllm-openai:v0.33.0"}},
    {"engine": {"connector": "Mooncake"}},
    {"engine": {"kvCacheDtype": "fp8"}},
    {"engine": {"dtype": "float16"}},
    {"engine": {"attentionBackend": "FLASHMLA"}},
    {"engine": {"attentionBackend": "TRITON_MLA"}},
    {"engine": {"lanes": 4, "kvLease": "1m", "maxQueuedRequests": 9}},
    {"engine": {"transport": "RDMA"}, "network": {"exposure": "HostNetwork"}},
)
TUNED = (SETTINGS[4], *SETTINGS[-2:], {"nodePool": {"accelerator": "H20"}}, {"gpusPerInstance": 4})


def handshake(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Every input of the handshake's hash, of the side that meets a peer."""
    parsed = pool(kind, spec).spec
    words = command_line(parsed, "decode" if kind == "PDCluster" else "prefill")
    args = PARSER.parse_args(["worker", "serve", *words[2:], "--profile", "H20x8"])
    transfer = args.kv_transfer_config
    draft = dict(args.speculative_config or {})
    draft |= {
        name: value for name, value in (("method", args.spec_method), ("model", args.spec_model)) if value is not None
    }
    backend = args.attention_backend
    model = (args.model, args.revision, args.code_revision, args.hf_overrides, args.quantization)
    return {
        "vllm_version": parsed.engine.image.rpartition(":")[2],
        "nixl_connector_version (15)": 15,
        "model (path or name string as given)": args.model,
        "dtype": (TYPES.get(args.dtype, args.dtype), model if args.dtype == "auto" else None),
        **dict.fromkeys(OF_THE_MODEL, model),
        "attn_backend_name": None if backend is None else str(backend).upper(),
        "cache_dtype": args.kv_cache_dtype,
        "is_hma_enabled": args.disable_hybrid_kv_cache_manager,
        SPECULATIVE: {name: value for name, value in draft.items() if name in ("method", "model")},
        "transfer_mode": read(transfer)["kv_connector"],
    }


SPECULATIVE = next(name for name in FACTS["nixl_compat_hash"]["inputs"] if name.startswith("speculative_config"))


def read(value: Any) -> Mapping[str, Any]:
    """A JSON flag as the parser leaves it: text or what was read from it."""
    parsed: Mapping[str, Any] = json.loads(value) if isinstance(value, str) else value
    return parsed


def with_args(setting: Mapping[str, Any], args: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A setting with arguments."""
    words = [word for each in args for word in each]
    return {**setting, "engine": {"image": IMAGE, **setting.get("engine", {}), "args": words}}


sides = st.tuples(
    st.sampled_from(["PrfaaSCluster", "PDCluster"]),
    st.builds(with_args, st.sampled_from(SETTINGS), st.lists(st.sampled_from([*SHAPES, *TUNING]), max_size=2)),
)


def test_the_oracle_has_every_input_of_the_handshake() -> None:
    assert set(handshake("PrfaaSCluster", {})) == set(FACTS["nixl_compat_hash"]["inputs"])


@given(sides, sides)
@settings(max_examples=300, deadline=None)
@example(
    ("PDCluster", with_args({}, [["--speculative-config.method", "eagle3"]])),
    ("PrfaaSCluster", with_args({}, [["--spec-method", "eagle3"]])),
)
def test_sides_that_would_fail_the_handshake_never_have_equal_keys(
    one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]
) -> None:
    keys = [compatibility_key(pool(kind, spec).spec) for kind, spec in (one, other)]

    if keys[0] == keys[1]:
        assert handshake(*one) == handshake(*other)


@given(
    st.sampled_from(["PrfaaSCluster", "PDCluster"]),
    st.sampled_from(TUNED),
    st.lists(st.sampled_from(TUNING), max_size=3),
)
@settings(deadline=None)
def test_what_only_tunes_an_engine_leaves_its_key_alone(
    kind: str, setting: Mapping[str, Any], args: Sequence[Sequence[str]]
) -> None:
    assert compatibility_key(pool(kind, with_args(setting, args)).spec) == compatibility_key(pool(kind, {}).spec)


@given(st.sampled_from(SHAPES), st.sampled_from(SHAPES))
@settings(deadline=None)
def test_both_ends_may_write_a_flag_as_they_like(one: Sequence[str], other: Sequence[str]) -> None:
    """The other direction: no flag is so strict that two ways to write it part a link."""
    specs = [with_args({}, [each]) for each in (one, other)]
    meant = [handshake("PrfaaSCluster", spec) for spec in specs]

    if meant[0] == meant[1]:
        keys = [compatibility_key(pool("PrfaaSCluster", spec).spec) for spec in specs]
        assert keys[0] == keys[1]


@given(st.sampled_from(SHAPES), st.sampled_from(SHAPES))
@settings(deadline=None)
def test_roles_agree_exactly_where_their_keys_would_be_equal(one: Sequence[str], other: Sequence[str]) -> None:
    roles = {"prefill": {"args": list(one)}, "decode": {"args": list(other)}}
    alone = [compatibility_key(pool("PrfaaSCluster", with_args({}, [args])).spec) for args in (one, other)]

    try:
        check_roles_agree(pd_pool({"roles": roles}).spec)
        agreed = True
    except SpecError:
        agreed = False

    assert agreed == (alone[0] == alone[1])


def test_images_are_compared_by_their_last_part() -> None:
    def key(image: str) -> str:
        return compatibility_key(pool("PrfaaSCluster", {"engine": {"image": image}}).spec)

    digest = "sha256:" + "a" * 64
    assert key("a.example/vllm:v0.33.0") == key("b.example:5000/mirror/vllm:v0.33.0")
    assert key(f"a.example/vllm@{digest}") == key(f"b.example/x/vllm@{digest}")
    assert len({key("a/vllm:v0.33.0"), key("a/vllm:v0.33.1"), key(f"a/vllm@{digest}"), key("a/other:v0.33.0")}) == 4


def test_another_engine_another_scheme_and_another_layout_are_other_keys() -> None:
    layout = [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "NHD"}]
    settings: list[dict[str, Any]] = [
        {},
        {"kind": "SGLang"},
        {"tls": {"secretName": "tls"}},
        {"env": layout},
        {"blockSize": 64},
    ]

    keys = {compatibility_key(pool("PrfaaSCluster", {"engine": each}).spec) for each in settings}

    assert len(keys) == len(settings)


@pytest.mark.parametrize("more", [["-dcp", "2"], ["--decode_context_parallel_size=2"]])
def test_what_hybrid_models_check_after_the_hash_counts_too(more: list[str]) -> None:
    """vLLM ends the handshake of a hybrid model whose sides differ in decode context parallelism."""
    keys = [compatibility_key(pool("PrfaaSCluster", with_args({}, [args])).spec) for args in ([], ["-dcp", "1"], more)]

    assert keys[0] == keys[1] != keys[2]


def test_a_variable_in_the_pod_template_counts_too() -> None:
    layout = [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "NHD"}]
    in_template = {"podTemplate": {"spec": {"containers": [{"name": "engine", "env": layout}]}}}

    keys = [compatibility_key(pool("PrfaaSCluster", each).spec) for each in (in_template, {"engine": {"env": layout}})]

    assert keys[0] == keys[1] != compatibility_key(pool("PrfaaSCluster", {}).spec)


def test_a_variable_from_elsewhere_is_equal_to_itself_alone() -> None:
    def key(name: str) -> str:
        source = {"configMapKeyRef": {"name": name, "key": "layout"}}
        env = [{"name": "VLLM_KV_CACHE_LAYOUT", "valueFrom": source}]
        return compatibility_key(pool("PrfaaSCluster", {"engine": {"env": env}}).spec)

    assert key("a") == key("a")
    assert len({key("a"), key("b"), compatibility_key(pool("PrfaaSCluster", {}).spec)}) == 3
