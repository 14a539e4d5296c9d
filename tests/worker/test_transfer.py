"""KV from a prefill to a decode worker, over HTTP and the KV port: the answer proves the transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.worker.config import Role
from prfaas.worker.oracle import answer, expected_text, last_token, prompt_state
from tests.facts import facts
from tests.worker.relay import flip, relaying
from tests.worker.rig import DECODE, MODEL, OTHER, PREFILL, PROMPT, config, failed, profile, serving, until


async def test_a_transferred_answer_is_the_expected_one() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv)
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert body["kv_transfer_params"] is None
        size = profile().kv.bytes(len(PROMPT) // 4)
        assert size < await west.metric("vllm:nixl_bytes_transferred_sum") < size + 1_000
        assert await west.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 430
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 0
        await until(lambda: east.worker.engine.pool.used == 0, "blocks freed by the notification")
        assert await east.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
        sent = await east.metric("prfaas_worker_kv_wire_bytes_total", direction="sent")
        assert sent <= await west.metric("prfaas_worker_kv_wire_bytes_total", direction="received")


async def test_computed_here_and_transferred_answers_are_equal() -> None:
    async with serving(PREFILL, config("kv_both")) as (east, west):
        _, here = await west.complete(PROMPT, 20)
        _, transferred = await west.complete(PROMPT, 20, kv_transfer_params=await east.prefill(PROMPT))
        assert here["choices"] == transferred["choices"]


async def test_chat_and_stop_strings_work_on_transferred_kv() -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30}
    async with serving(PREFILL, DECODE) as (east, west):
        _, whole = await east.post("/v1/chat/completions", body)
        text = whole["choices"][0]["message"]["content"]
        params = {"do_remote_decode": True}
        _, first = await east.post("/v1/chat/completions", {**body, "max_tokens": 1, "kv_transfer_params": params})
        stop = {"stop": text[40:44], "kv_transfer_params": first["kv_transfer_params"]}
        _, stopped = await west.post("/v1/chat/completions", body | stop)
        assert stopped["choices"][0]["message"]["content"] == text[: text.index(text[40:44])]
        assert stopped["choices"][0]["finish_reason"] == "stop"


async def test_the_prefill_answer_has_vllms_fields() -> None:
    vllm = facts("nixl_pull")
    async with serving(replace(PREFILL, tensor_parallel_size=8)) as (east,):
        _, body = await east.complete(PROMPT, 1, kv_transfer_params=dict.fromkeys(vllm["prefill_request"]))
        assert body["kv_transfer_params"] is None, "do_remote_decode is what asks for it"
        kv = await east.prefill(PROMPT)
    assert kv.keys() == vllm["prefill_response"].keys()
    assert kv["do_remote_prefill"] is True
    assert kv["do_remote_decode"] is False
    assert (kv["transfer_mode"], kv["remote_blocks_expiry_time"]) == ("pull", None)
    assert (kv["tp_size"], kv["dcp_size"], kv["pp_size"], kv["remote_registration_generation"]) == (8, 1, 1, 8)
    assert kv["remote_num_tokens"] == 430
    assert [len(group) for group in kv["remote_block_ids"]] == [27]
    assert kv["remote_port"] == east.worker.engine.transfers.port


async def test_the_answer_comes_from_the_bytes_and_not_from_the_prompt() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        _, body = await west.complete(OTHER, 20, kv_transfer_params=kv)
        assert body["choices"][0]["text"] == expected_text(PROMPT, 20, model=MODEL)
        assert body["choices"][0]["text"] != expected_text(OTHER, 20, model=MODEL)


async def test_the_answer_depends_on_the_last_prompt_token() -> None:
    changed = PROMPT[:-4] + "end!"
    async with serving(PREFILL, DECODE) as (east, west):
        _, body = await west.complete(changed, 20, kv_transfer_params=await east.prefill(PROMPT))
        mixed = answer(prompt_state(MODEL, PROMPT.encode()), last_token(changed.encode()), 20).text
        assert body["choices"][0]["text"] == mixed != expected_text(changed, 20, model=MODEL)


async def test_kv_of_another_length_is_refused() -> None:
    async with serving(PREFILL, DECODE) as (east, west):
        kv = await east.prefill(PROMPT)
        assert failed(await west.complete(PROMPT + "more", kv_transfer_params=kv))


ROLES: tuple[Role, ...] = ("kv_producer", "kv_consumer")


# Compatibility, roles, policies.


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "org/another"},
        {"kv_byte_scale": 0.5},
        {"kv_cache_dtype": "fp8"},
        {"attention_backend": "FLASHMLA"},
        {"dtype": "float16"},
        {"profile": profile(kv={"fixedBytes": 1, "bytesPerToken": 1})},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_workers_that_differ_in_what_must_be_equal_do_not_transfer(changes: dict[str, Any]) -> None:
    async with serving(PREFILL, replace(DECODE, **changes)) as (east, west):
        assert failed(await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))
        (lease,) = east.worker.engine.transfers.leases._leases.values()
        assert not lease.taken, "a failed handshake costs no lease"


async def test_tensor_parallelism_block_size_and_time_scale_may_differ() -> None:
    other = replace(DECODE, tensor_parallel_size=4, block_size=64, time_scale=500)
    async with serving(PREFILL, other) as (east, west):
        assert (await west.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))[0] == 200


async def test_a_prefill_worker_pulls_nothing_and_a_decode_worker_leases_nothing() -> None:
    async with serving(PREFILL, PREFILL, DECODE) as (east, more, west):
        assert failed(await more.complete(PROMPT, kv_transfer_params=await east.prefill(PROMPT)))
        assert failed(await west.complete(PROMPT, 1, kv_transfer_params={"do_remote_decode": True}))


async def test_without_a_connector_the_parameters_mean_nothing() -> None:
    async with serving(config()) as (plain,):
        status, body = await plain.complete(PROMPT, 1, kv_transfer_params={"do_remote_decode": True})
        assert (status, body["kv_transfer_params"]) == (200, None)


async def test_the_policy_recompute_prefills_here() -> None:
    west_config = config("kv_consumer", transfer={"recompute_on_failure": True})
    async with serving(PREFILL, west_config) as (east, west):
        kv = await east.prefill(PROMPT)
        async with relaying(kv["remote_port"], to_decode=flip) as relay:
            status, body = await west.complete(PROMPT, 20, kv_transfer_params=kv | {"remote_port": relay.port})
        assert (status, body["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert await west.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 430


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_the_last_token_of_a_hybrid_model_is_computed_by_the_decode_worker(mode: str) -> None:
    pair = [replace(config(role, transfer={"mode": mode}), attention="hybrid") for role in ROLES]
    asked = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    async with serving(*pair) as (east, west):
        _, first = await east.post("/v1/completions", asked, **{"X-Request-Id": "r"})
        kv = first["kv_transfer_params"]
        assert kv["remote_num_tokens"] == 429
        body = {"prompt": PROMPT, "max_tokens": 20, "kv_transfer_params": kv}
        status, answered = await west.post("/v1/completions", body, **{"X-Request-Id": "r"})
        assert (status, answered["choices"][0]["text"]) == (200, expected_text(PROMPT, 20, model=MODEL))
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 429
        assert await west.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 1
