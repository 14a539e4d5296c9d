"""Batch limits that nobody set: vLLM's tiers."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.worker.batching import Batch, batch
from tests.facts import facts


def limits(accelerator: str = "H20", **fields: Any) -> Batch:
    """The limits of an engine with a context of 131,072 tokens."""
    given: dict[str, Any] = {
        "tokens": None,
        "sequences": None,
        "max_model_len": 131_072,
        "chunked": True,
        "throughput": False,
    }
    return batch(accelerator, **(given | fields))


@pytest.mark.parametrize(
    ("accelerator", "tier"),
    [("B200", 0), ("gb300", 0), ("H100", 1), ("H200", 1), ("H20", 1), ("A100", 2), ("L40S", 2), ("X", 2)],
)
def test_tiers_by_accelerator(accelerator: str, tier: int) -> None:
    fact = facts("engine_limits")["batch_defaults"]["tiers"][tier]
    server = [fact[name]["openai_api_server"] for name in ("max_num_batched_tokens", "max_num_seqs")]
    assert limits(accelerator) == Batch(*server)


def test_what_is_set_stays() -> None:
    assert limits(tokens=4_096, sequences=64) == Batch(4_096, 64)
    assert limits(tokens=512) == Batch(512, 512), "no more requests than tokens"


def test_throughput_doubles_what_is_not_set() -> None:
    assert limits(throughput=True) == Batch(16_384, 2_048)
    assert limits(throughput=True, sequences=8) == Batch(16_384, 8)


def test_a_prefill_in_one_piece_fits_into_a_batch() -> None:
    assert limits(chunked=False) == Batch(131_072, 1_024)
    assert limits(chunked=False, max_model_len=1_000) == Batch(8_192, 1_024)


def test_no_more_tokens_than_all_requests_have() -> None:
    assert limits(sequences=2, max_model_len=1_000) == Batch(2_000, 2)
