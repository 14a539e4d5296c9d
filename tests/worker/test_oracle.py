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
    Sampling,
    answer,
    answer_words,
    chat_prompt,
    count_tokens,
    expected_chat,
    expected_text,
    from_token_ids,
    last_token,
    natural_length,
    prompt_state,
    ranked,
    token_id,
    token_ids,
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
    cut = answer(state, b"last", 20, Sampling(stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == full.text[: full.text.index(stop)]
    end = full.text.index(stop) + len(stop)
    assert len(cut.pieces) == -(-end // 4), "the tokens up to the end of the stop string were generated"


def test_the_stop_string_that_completes_first_wins() -> None:
    full = answer(bytes(32), b"last", 20).text
    assert answer(bytes(32), b"last", 20, Sampling(stop=(full[10:30], full[12:14]))).text == full[:12]


def test_without_a_match_a_stop_string_changes_nothing() -> None:
    assert answer(bytes(32), b"last", 5, Sampling(stop=("Q",))) == answer(bytes(32), b"last", 5)


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


def test_an_answer_says_what_stopped_it() -> None:
    full = answer(bytes(32), b"last", 20)
    at_string = answer(bytes(32), b"last", 20, Sampling(stop=(full.text[9:11],)))
    assert (at_string.finish_reason, at_string.stop_reason) == ("stop", full.text[9:11])
    kept = answer(bytes(32), b"last", 20, Sampling(stop=(full.text[9:11],), include_stop=True))
    assert kept.text == full.text[:11]
    fourth = token_id(full.pieces[3].encode())
    at_token = answer(bytes(32), b"last", 20, Sampling(stop_token_ids=(fourth,)))
    assert (at_token.text, len(at_token.pieces), at_token.stop_reason) == (full.text[:12], 4, fourth)
    assert answer(bytes(32), b"last", 20, Sampling(stop_token_ids=(fourth,), include_stop=True)).text == full.text[:16]
    assert (full.finish_reason, full.stop_reason) == ("length", None)


def test_nothing_stops_an_answer_before_its_least_length() -> None:
    full = answer(bytes(32), b"last", 20)
    word = full.pieces[2]
    assert answer(bytes(32), b"last", 20, Sampling(stop=(word,), min_tokens=2)).text == full.text[:8]
    assert answer(bytes(32), b"last", 20, Sampling(stop=(word,), min_tokens=3)).text == full.text
    third = (token_id(word.encode()),)
    assert len(answer(bytes(32), b"last", 20, Sampling(stop_token_ids=third, min_tokens=2)).pieces) == 3
    assert len(answer(bytes(32), b"last", 20, Sampling(stop_token_ids=third, min_tokens=3)).pieces) == 20
    assert len(answer(bytes(32), b"last", None, Sampling(min_tokens=400)).pieces) == 400


def test_several_answers_of_one_prompt_differ() -> None:
    texts = {expected_text("same", 8, model="m", sampling=Sampling(choice=choice)) for choice in range(50)}
    assert len(texts) == 50
    assert expected_text("same", 8, model="m", sampling=Sampling(choice=0)) == expected_text("same", 8, model="m")


@given(PROMPTS)
def test_token_ids_are_the_text(text: str) -> None:
    raw = text.encode()
    ids = token_ids(raw)
    assert len(ids) == count_tokens(raw)
    if not raw[len(raw) - len(last_token(raw)) :].startswith(b"\0"):
        assert from_token_ids(ids) == raw


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_any_ids_are_a_prompt_of_as_many_tokens(ids: list[int]) -> None:
    raw = from_token_ids(ids)
    assert token_ids(raw) == ids
    assert count_tokens(raw) == len(ids)


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_an_id_that_is_no_token_is_refused(wrong: int) -> None:
    with pytest.raises(OverflowError):
        from_token_ids([1, wrong])
    with pytest.raises(OverflowError):
        from_token_ids([wrong])


def test_the_token_said_is_the_likeliest() -> None:
    first, *others = ranked(WORDS[0], 4)
    assert first[0] == WORDS[0]
    assert [token for token, _ in others] == list(WORDS[1:4])
    likelihoods = [likelihood for _, likelihood in (first, *others)]
    assert likelihoods == sorted(likelihoods, reverse=True)
    assert len(dict(ranked("none of them", 3))) == 3
