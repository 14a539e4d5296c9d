"""The cheap bound on a prompt's length."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.prompt import Prompt, measure


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": ""}, Prompt(0)),
        ({"prompt": "abcd"}, Prompt(1)),
        ({"prompt": "abcde"}, Prompt(2)),
        ({"prompt": "\u6f22\u5b57"}, Prompt(2)),  # 6 bytes
        ({"prompt": [1, 2, 3]}, Prompt(3)),
        ({"prompt": ["abcd", "abcde"]}, Prompt(3, sequences=2)),
        ({"prompt": [[1, 2], [3]]}, Prompt(3, sequences=2)),
        ({"prompt": "abcd", "n": 2}, Prompt(1, sequences=2)),
        ({"prompt": "abcd", "best_of": 3}, Prompt(1, sequences=3)),
        ({"prompt": ["a", "b"], "n": 2}, Prompt(2, sequences=4)),
        ({"prompt": "abcd", "use_beam_search": True}, Prompt(1, sequences=2)),
        ({"messages": [{"role": "user", "content": "abcd"}, {"role": "user", "content": "efgh"}]}, Prompt(2)),
        ({"messages": [{"content": [{"type": "text", "text": "abcd"}, {"type": "image_url"}]}]}, Prompt(1)),
        ({"messages": [{"content": None, "tool_calls": []}]}, Prompt(0)),
        ({"messages": [{"content": "abcd"}], "tools": [{"a": 1}]}, Prompt(4)),  # [{"a": 1}] is 10 bytes
        # What no engine takes must not break the router: the engine answers it.
        ({}, Prompt(0)),
        ({"prompt": 7, "n": "two"}, Prompt(0)),
        ({"prompt": []}, Prompt(0)),
        ({"messages": "hello"}, Prompt(0)),
        ({"prompt": "\ud800"}, Prompt(1)),
    ],
)
def test_measure(body: dict[str, Any], expected: Prompt) -> None:
    assert measure(body) == expected


@given(st.text())
def test_four_bytes_of_utf8_are_a_token(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    tokens = measure({"prompt": text}).tokens
    assert 4 * (tokens - 1) < size <= 4 * tokens
