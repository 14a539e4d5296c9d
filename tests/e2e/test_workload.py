"""The asks of the demo: lengths of the paper's distribution, text of exactly the stated length, traces replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.workload import BYTES_PER_TOKEN, WorkloadError, from_paper, from_trace, paper_lengths, text


@given(st.text(max_size=20), st.integers(min_value=1, max_value=3000))
def test_text_has_exactly_the_tokens_asked_for_and_is_a_function_of_its_seed(seed: str, tokens: int) -> None:
    made = text(seed, tokens)
    assert len(made.encode()) == tokens * BYTES_PER_TOKEN
    assert made == text(seed, tokens)


def test_lengths_have_the_papers_share_of_long_prompts() -> None:
    lengths = paper_lengths(1000, seed=7)
    assert min(lengths) >= 128
    assert max(lengths) <= 131_072
    # Section 4.1 of the paper: 49.6 % of requests are above 19.4K, the mean is about 27K (26.84 x 1024).
    assert sum(length > 19_400 for length in lengths) / 1000 == pytest.approx(0.496, abs=0.002)
    assert sum(lengths) / 1000 == pytest.approx(27_486, rel=0.01)


def test_arrivals_are_ordered_and_repeatable() -> None:
    asks = from_paper(20, rate=4.0, output_tokens=16, seed=3)
    assert asks == from_paper(20, rate=4.0, output_tokens=16, seed=3)
    assert [ask.at for ask in asks] == sorted(ask.at for ask in asks)
    assert asks[0].at == 0.0


def row(at: int, tokens: int, blocks: list[int]) -> str:
    return json.dumps({"timestamp": at, "input_length": tokens, "output_length": 5, "hash_ids": blocks})


def test_a_trace_keeps_lengths_times_and_shared_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join([row(0, 700, [0, 1]), row(3000, 1200, [0, 2, 3]), row(9000, 10, [4])]))
    first, second = from_trace(file, rows=2, time_scale=3.0)
    assert (first.at, second.at) == (0.0, 1.0)
    assert (first.prompt_tokens, second.prompt_tokens) == (700, 1200)
    assert len(first.prompt) == 700 * BYTES_PER_TOKEN
    block = 512 * BYTES_PER_TOKEN
    assert first.prompt[:block] == second.prompt[:block]
    assert first.prompt[block:] != second.prompt[block : len(first.prompt)]


@pytest.mark.parametrize("line", ["not json", "{}", '{"timestamp": 1, "input_length": "x", "output_length": 2}'])
def test_a_bad_row_is_named_with_what_would_be_right(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(row(0, 700, [0]) + "\n" + line)
    with pytest.raises(WorkloadError, match=r"trace.jsonl, line 2: not a trace row .*input_length"):
        from_trace(file, rows=10, time_scale=1.0)


def test_a_missing_trace_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"nothing.jsonl: No such file"):
        from_trace(tmp_path / "nothing.jsonl", rows=1, time_scale=1.0)
