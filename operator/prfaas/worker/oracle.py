"""What the fake model answers: a pure function of the model and the prompt, so that a client can verify every token.

    state  = SHA-256(model, prompt)           what a prefill computes, and all that a KV cache carries
    token i = word(SHA-256(state, last prompt token, i // 16), i % 16)

A token is four bytes of UTF-8 (the last one of a text may be shorter), and so is every word of an answer: a space and
three letters. A decode worker that pulled a KV cache knows `state` from the pulled bytes alone; a client computes it
from the prompt it sent. If they agree on the answer, the cache that crossed was the cache of this prompt.
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


def prompt_state(model: str, prompt: bytes) -> bytes:
    """What a prefill of `prompt` computes. `model` is the name the engine loaded (`root` in /v1/models)."""
    digest = hashlib.sha256(b"prfaas-state\0" + model.encode() + b"\0")
    digest.update(prompt)
    return digest.digest()


def answer_words(state: bytes, last: bytes) -> Iterator[str]:
    """The endless answer, one token at a time, from the prefilled state and the last prompt token."""
    seed = hashlib.sha256(b"prfaas-answer\0" + state + last)
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
class Answer:
    """A whole answer: the text that each token adds, and why it ended (`length` or `stop`)."""

    pieces: tuple[str, ...]
    finish_reason: str

    @property
    def text(self) -> str:
        """The text a client receives."""
        return "".join(self.pieces)


def answer(state: bytes, last: bytes, max_tokens: int | None, stop: Sequence[str] = ()) -> Answer:
    """The answer up to `max_tokens` (None: the natural length) or the first stop string, which is cut off."""
    limit = natural_length(state) if max_tokens is None else max_tokens
    words = list(islice(answer_words(state, last), limit))
    whole = Answer(tuple(words), "stop" if max_tokens is None else "length")
    text = "".join(words)
    # The match that is complete first ends the answer, as it would token by token.
    matches = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    if not matches:
        return whole
    end, start = min(matches)
    tokens = -(-end // BYTES_PER_TOKEN)
    pieces = [text[i * BYTES_PER_TOKEN : min((i + 1) * BYTES_PER_TOKEN, start)] for i in range(tokens)]
    return Answer(tuple(pieces), "stop")


def expected_text(prompt: str, max_tokens: int | None, *, model: str, stop: Sequence[str] = ()) -> str:
    """The text that a completion of `prompt` must have. `max_tokens` None: the request set no limit (chat only)."""
    raw = prompt.encode()
    return answer(prompt_state(model, raw), last_token(raw), max_tokens, stop).text


def expected_chat(
    messages: Sequence[Mapping[str, Any]], max_tokens: int | None, *, model: str, stop: Sequence[str] = ()
) -> str:
    """The content that a chat completion of `messages` must have."""
    return expected_text(chat_prompt(messages), max_tokens, model=model, stop=stop)


def chat_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """The fake model's chat template: `<|role|>`, the content, a line's end, per message; then `<|assistant|>`.

    A content may be a string or a list of text parts. Raises ValueError with the path of what is neither.
    """
    rendered = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{index}].role must be a string")
        rendered.append(f"<|{role}|>\n{_content(message.get('content'), index)}\n")
    return "".join(rendered) + "<|assistant|>\n"


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
