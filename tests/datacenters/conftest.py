"""Two datacenters for the tests that need them, and a network of its own for those that take some down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.docker import state_root


@pytest.fixture(scope="session")
def datacenters() -> Iterator[Datacenters]:
    """The datacenters of two.yaml: those that are up, or else brought up for the session and taken down after it."""
    was_up = (state_root() / "topology.json").exists()
    them = Datacenters()
    them.up()
    yield them
    if not was_up:
        them.down()
