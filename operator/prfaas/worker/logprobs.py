"""Log probabilities in the shapes of the completions and the chat endpoint. The numbers are the oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prfaas.worker.oracle import BYTES_PER_TOKEN, ranked, token_id, token_ids


def completion_logprobs(
    words: Sequence[str], alternatives: int, *, as_ids: bool, offset: int = 0, prompt: bool = False
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; `offset` is where the text of these tokens begins.

    `prompt`: the first token is a prompt's first, which has no probability.
    """
    tokens, values, tops, offsets = [], [], [], []
    for index, word in enumerate(words):
        entries = _ranked(word, max(alternatives, 1))
        shown = [(_shown(token, as_ids), value) for token, value in entries]
        first = prompt and index == 0
        tokens.append(shown[0][0])
        values.append(None if first else shown[0][1])
        tops.append(None if first else dict(shown))
        offsets.append(offset)
        offset += len(word)
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(words: Sequence[str], alternatives: int, *, as_ids: bool) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = []
    for word in words:
        entries = [
            {"token": _shown(token, as_ids), "logprob": value, "bytes": list(token.encode())}
            for token, value in _ranked(word, max(alternatives, 1))
        ]
        content.append({**entries[0], "top_logprobs": entries[:alternatives]})
    return {"content": content}


def prompt_logprobs(prompt: bytes, alternatives: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: by token id; nothing for the first token."""
    shown: list[dict[str, Any] | None] = [None]
    for word in prompt_words(prompt)[1:]:
        entries = _ranked(word, alternatives + 1)
        shown.append(
            {
                str(token_id(token.encode())): {"logprob": value, "rank": rank, "decoded_token": token}
                for rank, (token, value) in enumerate(entries, 1)
            }
        )
    return shown


def prompt_words(prompt: bytes) -> list[str]:
    """The text of every token of a prompt; a character that tokens share is replaced in both."""
    return [prompt[i : i + BYTES_PER_TOKEN].decode(errors="replace") for i in range(0, len(prompt), BYTES_PER_TOKEN)]


def answer_ids(words: Sequence[str]) -> list[int]:
    """The ids of an answer's tokens."""
    return [each for word in words for each in token_ids(word.encode())]


def _ranked(word: str, count: int) -> list[tuple[str, float]]:
    return ranked(word, count)


def _shown(token: str, as_id: bool) -> str:
    return f"token_id:{token_id(token.encode())}" if as_id else token
