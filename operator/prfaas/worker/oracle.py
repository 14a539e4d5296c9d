"""What the fake model answers: a pure function of the model and the prompt, so that a client can verify every token.

    state  = SHA-256(model, prompt)           what a prefill computes, and all that a KV cache carries
    token i = word(SHA-256(state, last prompt token, choice, i // 16), i % 16)

A token is four bytes of UTF-8 (the last one of a text may be shorter), its id these bytes as a number; every word of an
answer is a token too: a space and three letters. A decode worker that pulled a KV cache knows `state` from the pulled
bytes alone; a client computes it from the prompt it sent. If they agree on the answer, the cache that crossed was the
cache of this prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

BYTES_PER_TOKEN = 4
STATE_BYTES = 32

_CONSONANTS = "bcdfghklmnprstvz"
_VOWELS = "aeio"
WORDS = tuple(f" {first}{vowel}{last}" for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS)
_WORDS_PER_BLOCK = 16


def count_tokens(text: str | bytes) -> int:
    """Tokens of a text: its UTF-8 bytes over four, rounded up.

    Raises UnicodeEncodeError where the text is not UTF-8 encodable (a lone surrogate).
    """
    size = len(text) if isinstance(text, bytes) else len(text.encode())
    return -(-size // BYTES_PER_TOKEN)


def last_token(prompt: bytes) -> bytes:
    """The last token of a prompt: its last one to four bytes."""
    return prompt[(count_tokens(prompt) - 1) * BYTES_PER_TOKEN :] if prompt else b""


def adapted(model: str, adapter: str | None) -> str:
    """The model that a LoRA adapter makes of a model, as `prompt_state` takes it."""
    return f"{model}+{adapter}" if adapter else model


def prompt_state(model: str, prompt: bytes) -> bytes:
    """What a prefill of `prompt` computes. `model` is the name the engine loaded (`root` in /v1/models)."""
    digest = hashlib.sha256(b"prfaas-state\0" + model.encode() + b"\0")
    digest.update(prompt)
    return digest.digest()


def answer_words(state: bytes, last: bytes, choice: int = 0) -> Iterator[str]:
    """The endless answer, one token at a time, from the prefilled state and the last prompt token."""
    seed = hashlib.sha256(b"prfaas-answer\0" + state + last)
    if choice:
        seed.update(b"\0choice" + choice.to_bytes(4, "big"))
    block = 0
    while True:
        part = seed.copy()
        part.update(block.to_bytes(8, "big"))
        digest = part.digest()
        for index in range(_WORDS_PER_BLOCK):
            yield WORDS[int.from_bytes(digest[2 * index : 2 * index + 2], "big") % len(WORDS)]
        block += 1


def natural_length(state: bytes) -> int:
    """Tokens after which the model ends its answer by itself: 64 to 319. It never does where a request sets a limit."""
    return 64 + hashlib.sha256(b"prfaas-length\0" + state).digest()[0]


@dataclass(frozen=True)
class Sampling:
    """What a request says about its answer, besides a limit, as far as this model obeys it."""

    choice: int = 0
    """Which of several answers (`n`) this is."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """Whether what stopped the answer stays in its text."""


@dataclass(frozen=True)
class Answer:
    """A whole answer: the text that each token adds, and why it ended (`length` or `stop`)."""

    pieces: tuple[str, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    """The stop string, or the stop token's id; None where the model ended by itself."""

    @property
    def text(self) -> str:
        """The text a client receives."""
        return "".join(self.pieces)


def answer(state: bytes, last: bytes, max_tokens: int | None, sampling: Sampling | None = None) -> Answer:
    """The answer up to `max_tokens` (None: the natural length), or up to what stops it, which is cut off."""
    asked = sampling or Sampling()
    limit = max(natural_length(state), asked.min_tokens) if max_tokens is None else max_tokens
    words = tuple(islice(answer_words(state, last, asked.choice), limit))
    at = _stop_token(words, asked)
    text = "".join(words[:at])
    # The match that is complete first ends the answer, as it would token by token; one that was complete within the
    # least length does not count.
    least = asked.min_tokens * BYTES_PER_TOKEN
    starts = ((stop, text.find(stop, max(0, least - len(stop) + 1))) for stop in asked.stop)
    matches = [(start + len(stop), start, stop) for stop, start in starts if start >= 0]
    if matches:
        end, start, stop = min(matches)
        shown = end if asked.include_stop else start
        tokens = -(-end // BYTES_PER_TOKEN)
        pieces = [text[i * BYTES_PER_TOKEN : min((i + 1) * BYTES_PER_TOKEN, shown)] for i in range(tokens)]
        return Answer(tuple(pieces), "stop", stop)
    if at is not None:
        return Answer((*words[:at], words[at] if asked.include_stop else ""), "stop", token_id(words[at].encode()))
    return Answer(words, "stop" if max_tokens is None else "length")


def _stop_token(words: Sequence[str], asked: Sampling) -> int | None:
    if not asked.stop_token_ids:
        return None
    stops = set(asked.stop_token_ids)
    found = (i for i in range(asked.min_tokens, len(words)) if token_id(words[i].encode()) in stops)
    return next(found, None)


def token_id(token: bytes) -> int:
    """The id of one token: its bytes as a number, so that ids and text are the same thing."""
    return int.from_bytes(token, "big")


def token_ids(text: bytes) -> list[int]:
    """The ids of a text's tokens."""
    return [token_id(text[i : i + BYTES_PER_TOKEN]) for i in range(0, len(text), BYTES_PER_TOKEN)]


def from_token_ids(ids: Sequence[int]) -> bytes:
    """The text of these tokens; the inverse of `token_ids`, except where a text's last token begins with a zero byte.

    Every token but the last is four bytes, so that the text has as many tokens as there are ids.
    Raises OverflowError for an id that is no token: below 0 or from 2^32 on.
    """
    if not ids:
        return b""
    *rest, last = ids
    head = b"".join(number.to_bytes(BYTES_PER_TOKEN, "big") for number in rest)
    tail = last.to_bytes(BYTES_PER_TOKEN, "big").lstrip(b"\0") or b"\0"
    return head + tail


def ranked(token: str, count: int) -> list[tuple[str, float]]:
    """The likeliest tokens where the model said `token`, with their log probabilities; `token` is always the first.

    A prompt's tokens are no words of the model: they stand before the first words.
    """
    at = _INDEX.get(token, -1)
    others = (WORDS[(at + 1 + i) % len(WORDS)] for i in range(count - 1))
    return [(token, LIKELIEST), *((other, -3.0 - i) for i, other in enumerate(others))]


LIKELIEST = -0.125
"""The log probability of every token that the model says."""
_INDEX = {word: index for index, word in enumerate(WORDS)}


def expected_text(
    prompt: str | bytes,
    max_tokens: int | None,
    *,
    model: str,
    stop: Sequence[str] = (),
    sampling: Sampling | None = None,
) -> str:
    """The text that a completion of `prompt` must have. `max_tokens` None: the request set no limit (chat only).

    A prompt of token ids is given as `from_token_ids(ids)`. `stop` is short for a Sampling with these stop strings.
    """
    raw = prompt.encode() if isinstance(prompt, str) else prompt
    return answer(prompt_state(model, raw), last_token(raw), max_tokens, sampling or Sampling(stop=tuple(stop))).text


def expected_chat(
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int | None,
    *,
    model: str,
    stop: Sequence[str] = (),
    sampling: Sampling | None = None,
) -> str:
    """The content that a chat completion of `messages` must have."""
    return expected_text(chat_prompt(messages), max_tokens, model=model, stop=stop, sampling=sampling)


def chat_prompt(messages: Sequence[Mapping[str, Any]], *, to_answer: bool = True, open_end: bool = False) -> str:
    """The fake model's chat template: `<|role|>`, the content, a line's end, per message; then `<|assistant|>`.

    `to_answer` is vLLM's `add_generation_prompt`; `open_end` its `continue_final_message`: the last line has no end.

    A content may be a string or a list of text parts. Raises ValueError with the path of what is neither.
    """
    rendered = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{index}].role must be a string")
        rendered.append(f"<|{role}|>\n{_content(message.get('content'), index)}\n")
    if open_end:
        return "".join(rendered).removesuffix("\n")
    return "".join(rendered) + ("<|assistant|>\n" if to_answer else "")


def _content(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    where = f"messages[{index}].content"
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{number}] must be a text part: this model reads text only")
        texts.append(part["text"])
    return "".join(texts)
