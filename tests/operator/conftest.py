"""Fixtures of the operator's tests: a client of the real API server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from e2e.apiserver import ApiServer
from prfaas.kube.client import KubeClient


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[KubeClient]:
    """The administrator's."""
    async with await KubeClient.from_kubeconfig_file(apiserver.kubeconfig) as each:
        yield each
