"""One installation for all scenarios, and the same state before each of them.

The datacenters are brought up if they are not, and taken down afterwards only then. Scenarios may run in any order:
each finds every node running, the line up, the samples as they are in `manifests/` and Ready, and leaves whatever it
changed to the next `settled`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e import images
from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.docker import state_root
from e2e.stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e/scenarios" in item.nodeid or item.path.parent.name == "scenarios":
            item.add_marker(pytest.mark.datacenters)


@pytest.fixture(scope="session")
def installed() -> Iterator[Stack]:
    """Two datacenters with two operator replicas in each."""
    was_up = (state_root() / "topology.json").exists()
    datacenters = Datacenters()
    datacenters.up()
    image = images.build()
    datacenters.load(image.archive)
    stack = Stack(datacenters, image.reference, replicas=2)
    stack.install()
    stack.apply_samples()
    yield stack
    if not was_up:
        datacenters.down()


@pytest.fixture
def stack(installed: Stack) -> Stack:
    """The installation, settled."""
    installed.settle()
    return installed
