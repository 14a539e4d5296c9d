"""vLLM's own parser, one process for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.vllm_source import VllmParser


@pytest.fixture(scope="session")
def vllm() -> Iterator[VllmParser]:
    """The parser; fetches vLLM's source the first time ever."""
    with VllmParser() as parser:
        yield parser
