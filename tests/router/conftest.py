"""One Envoy for all tests of this folder: it holds no state of a test but its endpoint list."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from e2e.local_router import EnvoyProcess, envoy
from tests.router.rig import MAX_BODY, Rig, rig


@pytest.fixture(scope="session")
def running_envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyProcess]:
    """The real Envoy, without a picker."""
    with envoy(tmp_path_factory.mktemp("router"), max_body_bytes=MAX_BODY) as running:
        yield running


@pytest.fixture
async def router(running_envoy: EnvoyProcess) -> AsyncIterator[Rig]:
    """Envoy with a picker in this process; no endpoints yet."""
    async with rig(running_envoy) as made:
        yield made
