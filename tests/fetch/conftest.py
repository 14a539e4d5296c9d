"""Fixtures of the fetcher's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fetch.bench import Fetching


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    """Nothing fetched yet. Proxies of this machine's environment are not asked."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return Fetching(tmp_path / "models" / "demo" / "model" / "main")
