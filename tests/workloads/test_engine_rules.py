"""Specs that would not serve are refused in the documented words; what serves and surprises is warned of.

The wrong specs and their refusals are in wrong_specs.yaml; run this file to write them into docs/engine.md.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.workloads import wanted
from prfaas.workloads.engine import check, warnings
from prfaas.workloads.engines import flags, vllm_rules
from prfaas.workloads.errors import SpecError
from prfaas.workloads.meta import Owner
from tests.workloads.pools import pd_pool, pool, prefill_pool

DOCS = Path(__file__).parents[2] / "docs" / "engine.md"
WRONG: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "wrong_specs.yaml").read_text(encoding="utf-8"))
BEGIN, END = "<!-- wrong specs: begin -->", "<!-- wrong specs: end -->"


def table() -> str:
    """The table of docs/engine.md."""
    rows = ["| Spec | Refusal |", "| --- | --- |"]
    for case in WRONG:
        path, _, said = case["says"].partition(": ")
        rows.append(f"| {case['title']} | `{path}`: {said.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


@pytest.mark.parametrize("case", WRONG, ids=[case["title"] for case in WRONG])
def test_a_wrong_spec_is_refused_in_the_documented_words(case: dict[str, Any]) -> None:
    wrong = pool(case.get("kind", "PrfaaSCluster"), case["spec"])

    with pytest.raises(SpecError) as caught:
        wanted.revisions(Owner.of(wrong), wrong.spec)

    assert str(caught.value) == case["says"]


def test_the_documentation_has_all_wrong_specs_and_says_what_they_are_told() -> None:
    documented = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]

    assert documented.strip() == table()
    assert len(WRONG) >= 20


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"engine": {"args": ["--api-key", "k"]}}, "spec.engine.args: whoever may read pods can read the key"),
        ({"engine": {"args": ["--config", "/etc/vllm.yaml"]}}, "what is in /etc/vllm.yaml is not looked into"),
        (
            {"engine": {"args": ["--disable-hybrid-kv-cache-manager"]}},
            "models with state space or linear layers do not start (vllm #42024)",
        ),
        ({"engine": {"args": ["--disable-log-stats"]}}, "there are no metrics of the engine"),
        ({"engine": {"args": ["--brand-new"]}}, "vLLM 0.33 has no --brand-new"),
        (
            {"engine": {"image": "r.example/vllm:v0.34.1"}},
            "the command line is that of vLLM 0.33, and the image is 0.34",
        ),
        (
            {"engine": {"image": "r.example/vllm:v0.34.1", "kvCacheDtype": "float7"}},
            "spec.engine.kvCacheDtype: vLLM 0.33 does not know float7",
        ),
        (
            {"engine": {"lanes": 1}},
            "spec.engine.lanes: one TCP connection does not fill a fast line (vllm #52607, #26382;",
        ),
        ({"engine": {"parallelism": {"pipeline": 2}}}, "vLLM refuses pipeline stages with NIXL for hybrid models"),
        (
            {"engine": {"env": [{"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": "5700"}]}},
            "spec.engine.env[0]: Services, and whatever counts or guards the line, know port 5600 only",
        ),
        (
            {"engine": {"env": [{"name": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "value": "9"}]}},
            "vLLM 0.33 does not read VLLM_NIXL_ABORT_REQUEST_TIMEOUT any more; set spec.engine.kvLease",
        ),
        ({"engine": {"env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]}}, "anyone who reaches the engine"),
        ({"engine": {"kind": "SGLang"}}, "each side's SGLang chooses by its GPU"),
        ({}, "spec.engine.attentionBackend: is not set: each side's vLLM chooses by its GPU"),
        (
            {"podTemplate": {"spec": {"containers": [{"name": "engine", "livenessProbe": None}]}}},
            "a dead engine would not be started anew",
        ),
        ({"podTemplate": {"spec": {"hostNetwork": True}}}, "spec.network.exposure is PodIP"),
        (
            {
                "engine": {
                    "args": [
                        "--kv-transfer-config",
                        json.dumps(
                            {
                                "kv_connector": "NixlPullConnector",
                                "kv_role": "kv_producer",
                                "kv_load_failure_policy": "recompute",
                            }
                        ),
                    ]
                }
            },
            "makes decode instances prefill long prompts",
        ),
    ],
)
def test_what_serves_and_surprises_is_warned_of_and_not_refused(spec: dict[str, Any], said: str) -> None:
    parsed = prefill_pool(spec).spec

    check(parsed)

    assert any(said in each for each in warnings(parsed))


@pytest.mark.parametrize("kind", ["PrfaaSCluster", "PDCluster"])
def test_a_spec_that_says_what_shapes_kv_cache_gets_no_warning(kind: str) -> None:
    spec = pool(kind, {"engine": {"attentionBackend": "FLASH_ATTN_MLA", "blockSize": 64}}).spec

    check(spec)

    assert warnings(spec) == ()


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"attentionBackend": "FLASHMLA", "args": ["--block-size", "64"]}},
        {"engine": {"kvCacheDtype": "fp8", "args": ["--kv-cache-dtype=fp8"]}},
        {"engine": {"args": ["--compilation-config.level", "3", "--max-num-seqs", "8"]}},
        {
            "engine": {
                "args": ["--enable-cumem-allocator"],
                "env": [{"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments:True"}],
            }
        },
        {"engine": {"env": [{"name": "VLLM_PORT", "value": "9100"}]}},
        {"engine": {"args": ["--host", "0.0.0.0"]}},
        {"engine": {"args": ["--enable-prefix-caching"]}},
        {
            "engine": {"kvLease": "1m"},
            "podTemplate": {"spec": {"containers": [{"name": "engine", "readinessProbe": {"periodSeconds": 10}}]}},
        },
        {
            "podTemplate": {
                "spec": {"containers": [{"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 30}}}}]}
            }
        },
        {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 70}}},
        {"engine": {"command": ["prfaas", "worker", "serve", "--profile", "H20x8"], "args": ["--time-scale", "5"]}},
        {"engine": {"command": ["nice", "-n", "5", "vllm", "serve"]}},
    ],
)
def test_what_is_right_is_let_through(spec: dict[str, Any]) -> None:
    check(prefill_pool(spec).spec)


@pytest.mark.parametrize(
    "command",
    [
        ["vllm", "serve", "--kv_transfer.kv_port=1"],
        ["vllm", "serve", "--kv-cache-dtype", "fp8"],
        ["python3", "-m", "vllm.entrypoints.openai.api_server", "--dtype=half"],
        ["prfaas", "worker", "serve", "--profile", "H20x8", "-tp", "2"],
    ],
)
def test_no_flag_hides_in_the_command(command: list[str]) -> None:
    with pytest.raises(SpecError, match=r"^spec\.engine\.command: .* write flags in spec\.engine\.args$"):
        check(prefill_pool({"engine": {"command": command}}).spec)


@pytest.mark.parametrize("field", ["name", "servedName", "revision"])
def test_no_name_is_taken_for_a_flag(field: str) -> None:
    with pytest.raises(SpecError, match=rf"^spec\.model\.{field}: "):
        check(prefill_pool({"model": {field: "--help"}}).spec)


@pytest.mark.parametrize("flag", sorted(flags.removed()))
def test_every_flag_that_is_gone_is_refused(flag: str) -> None:
    with pytest.raises(SpecError, match=r"vLLM 0\.33 has no"):
        check(prefill_pool({"engine": {"args": [flag, "1"]}}).spec)


@pytest.mark.parametrize("flag", sorted({*vllm_rules.FIELDS, *vllm_rules.BREAKS} - {"--enable-prefix-caching"}))
def test_every_flag_that_parts_prefill_and_decode_is_refused_under_all_its_names(flag: str) -> None:
    names = [name for name, option in flags._options().items() if option.flag == flag and not option.negated]
    assert names

    for name in (*names, *(name.replace("-", "_").replace("__", "--") for name in names if name.startswith("--"))):
        with pytest.raises(SpecError):
            check(prefill_pool({"engine": {"args": [name, "1"]}}).spec)


@pytest.mark.parametrize("engine", [{"kind": "SGLang"}, {"connector": "Mooncake"}, {"tls": {"secretName": "tls"}}])
def test_what_our_router_cannot_drive_runs_without_it(engine: dict[str, Any]) -> None:
    check(pd_pool({"engine": engine, "router": {"replicas": 0}}).spec)
    check(prefill_pool({"engine": engine}).spec)


def test_each_role_may_have_a_kv_transfer_config_of_its_own() -> None:
    roles = {
        role: {"args": ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": kv_role})]}
        for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    }

    check(pd_pool({"roles": roles}).spec)


NAMES = (
    *("containers", "name", "env", "value", "valueFrom", "lifecycle", "preStop", "sleep", "seconds", "exec", "args"),
    *("readinessProbe", "startupProbe", "periodSeconds", "failureThreshold", "resources", "limits", "nvidia.com/gpu"),
    *("terminationGracePeriodSeconds", "hostNetwork", "enableServiceLinks", "volumes", "$patch"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 100) | st.sampled_from(["engine", "delete", "", "8", "PYTHONPATH"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
containers = st.dictionaries(st.sampled_from(NAMES), json_values, max_size=5).map(
    lambda each: {**each, "name": "engine"}
)
words = st.text(max_size=8) | st.sampled_from(
    [
        *(
            "--kv-transfer-config",
            "--kv-events-config={}",
            "--kv-events-config",
            "[]",
            "{}",
            "-sc.a.b=1",
            "-sc.a",
            "--",
        ),
        *(
            "--block-size",
            "x",
            "-5",
            "--config",
            "--attention-config.backend",
            "--attention-config",
            "-ac",
            "--spec-model",
        ),
        *("--kv-transfer-config.a", "--attention-backend=", "--host", "--speculative-config", "null", "="),
    ]
)


@given(
    st.lists(words, max_size=6),
    st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4)
    | containers.map(lambda each: {"containers": [each]}),
    st.sampled_from(["VLLM", "SGLang"]),
)
@settings(deadline=None, max_examples=200)
def test_whatever_a_spec_says_the_rules_have_an_answer(args: list[str], template: dict[str, Any], engine: str) -> None:
    parsed = pd_pool(
        {"engine": {"args": args, "kind": engine}, "podTemplate": {"spec": template}, "router": {"replicas": 0}}
    )

    warnings(parsed.spec)
    with contextlib.suppress(SpecError):
        wanted.revisions(Owner.of(parsed), parsed.spec)


if __name__ == "__main__":
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
