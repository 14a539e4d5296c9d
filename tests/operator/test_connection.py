"""Kopf connects with what our own client connects with, however that was configured."""

from __future__ import annotations

from typing import Any, cast

import pytest
from kubernetes.aio.client import Configuration

from prfaas.kube.client import KubeClient
from prfaas.operator.handlers import connection


class _Client:
    def __init__(self, configuration: Configuration) -> None:
        self.api: Any = type("Api", (), {"configuration": configuration})()


@pytest.mark.parametrize(
    ("authorization", "token"),
    [("Bearer abc.def", "abc.def"), ("bearer abc.def", "abc.def"), ("abc.def", "abc.def"), (None, None)],
    ids=["kubeconfig", "service account", "bare", "client certificate"],
)
def test_the_token_is_bare(authorization: str | None, token: str | None) -> None:
    configuration = Configuration(host="https://127.0.0.1:1")
    if authorization is not None:
        configuration.api_key["BearerToken"] = authorization
    assert connection(cast(KubeClient, _Client(configuration))).token == token


def test_a_rotated_token_is_read_anew_at_each_login() -> None:
    configuration = Configuration(host="https://127.0.0.1:1")
    tokens = iter(["first", "second"])

    def refresh(into: Configuration) -> None:
        into.api_key["BearerToken"] = f"bearer {next(tokens)}"

    configuration.refresh_api_key_hook = refresh
    client = cast(KubeClient, _Client(configuration))
    assert [connection(client).token, connection(client).token] == ["first", "second"]
