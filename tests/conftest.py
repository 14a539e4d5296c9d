"""Fixtures of every room: one API server for the whole run, a namespace for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings

from e2e.apiserver import ApiServer

# The same examples in every run, however slow the machine: a failure can be repeated.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """etcd and kube-apiserver with our CRDs. A test that stops or hangs it starts it again before it ends."""
    with ApiServer(tmp_path_factory.mktemp("apiserver")) as server:
        server.install_crds()
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer, request: pytest.FixtureRequest) -> str:
    """A fresh namespace. It is left behind: without controllers a namespace never finishes its deletion."""
    name = f"test-{next(_numbers)}"
    body = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "annotations": {"prfaas.io/test": request.node.nodeid}},
    }
    answer = apiserver.request("POST", "/api/v1/namespaces", body)
    assert answer.status == 201, answer.message
    return name
