"""Fixtures of the operator's tests: a client of the real API server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from e2e.apiserver import ApiServer
from tests.hand import Hand


@pytest.fixture(autouse=True)
def _logging(caplog: pytest.LogCaptureFixture) -> None:
    """Log lines are made, so that one that cannot be made fails its test."""
    caplog.set_level(logging.DEBUG, logger="prfaas")


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[Hand]:
    """The administrator's."""
    async with await Hand.from_kubeconfig_file(apiserver.kubeconfig) as each:
        yield each
