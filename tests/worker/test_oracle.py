"""What the fake model answers."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.worker.generation import LONGEST_NATURAL
from prfaas.worker.oracle import (
    WORDS,
    answer,
    answer_words,
    chat_prompt,
    count_tokens,
    expected_chat,
    expected_text,
    last_token,
    natural_length,
    prompt_state,
)

PROMPTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)


def test_the_answer_is_part_of_the_protocol() -> None:
    """Workers and clients of different versions must agree: changing these texts breaks verification."""
    assert expected_text("Once upon a time", 6, model="org/model") == " gel sit dah lap fec soc"
    assert expected_chat([{"role": "user", "content": "Hi"}], 3, model="org/model") == " zap foz son"


@given(prompt=PROMPTS, count=st.integers(1, 60))
def test_every_token_is_four_bytes(prompt: str, count: int) -> None:
    text = expected_text(prompt, count, model="m")
    assert count_tokens(text) == count == len(text) / 4


@given(prompt=PROMPTS, count=st.integers(1, 60), more=st.integers(1, 60))
def test_a_longer_answer_begins_with_the_shorter(prompt: str, count: int, more: int) -> None:
    assert expected_text(prompt, count + more, model="m").startswith(expected_text(prompt, count, model="m"))


@given(one=PROMPTS, other=PROMPTS)
def test_another_prompt_or_model_has_another_answer(one: str, other: str) -> None:
    if one != other:
        assert expected_text(one, 24, model="m") != expected_text(other, 24, model="m")
    assert expected_text(one, 24, model="m") != expected_text(one, 24, model="n")


@given(state=st.binary(min_size=32, max_size=32), one=st.binary(max_size=4), other=st.binary(max_size=4))
def test_the_last_prompt_token_matters(state: bytes, one: bytes, other: bytes) -> None:
    if one != other:
        assert list(islice(answer_words(state, one), 24)) != list(islice(answer_words(state, other), 24))


@pytest.mark.parametrize(
    ("text", "tokens", "last"),
    [("", 0, b""), ("a", 1, b"a"), ("abcd", 1, b"abcd"), ("abcde", 2, b"e"), ("ab€f", 2, b"\xacf"[-2:])],
)
def test_a_token_is_four_bytes_of_utf8(text: str, tokens: int, last: bytes) -> None:
    assert count_tokens(text) == count_tokens(text.encode()) == tokens
    assert last_token(text.encode()) == last


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) == 1024


@given(state=st.binary(min_size=32, max_size=32))
def test_an_answer_without_a_limit_ends_by_itself(state: bytes) -> None:
    whole = answer(state, b"last", None)
    assert whole.finish_reason == "stop"
    assert 64 <= len(whole.pieces) == natural_length(state) <= LONGEST_NATURAL


@given(state=st.binary(min_size=32, max_size=32), start=st.integers(0, 70), size=st.integers(1, 9))
def test_a_stop_string_is_cut_off_where_it_first_completes(state: bytes, start: int, size: int) -> None:
    full = answer(state, b"last", 20)
    stop = full.text[start : start + size]
    cut = answer(state, b"last", 20, [stop])
    assert cut.finish_reason == "stop"
    assert cut.text == full.text[: full.text.index(stop)]
    end = full.text.index(stop) + len(stop)
    assert len(cut.pieces) == -(-end // 4), "the tokens up to the end of the stop string were generated"


def test_the_stop_string_that_completes_first_wins() -> None:
    full = answer(bytes(32), b"last", 20).text
    assert answer(bytes(32), b"last", 20, [full[10:30], full[12:14]]).text == full[:12]


def test_without_a_match_a_stop_string_changes_nothing() -> None:
    assert answer(bytes(32), b"last", 5, ["Q"]) == answer(bytes(32), b"last", 5)


def test_chat_template() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    assert chat_prompt(messages) == "<|system|>\nBe brief.\n<|user|>\nab\n<|assistant|>\n\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"content": "x"}, r"messages\[0\].role"),
        ({"role": "user", "content": 5}, r"messages\[0\].content "),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\].content\[0\]"),
    ],
)
def test_what_is_not_text_is_refused_with_its_path(message: dict[str, Any], path: str) -> None:
    with pytest.raises(ValueError, match=path):
        chat_prompt([message])


def test_state_separates_model_and_prompt() -> None:
    assert prompt_state("a", b"bc") != prompt_state("ab", b"c")
