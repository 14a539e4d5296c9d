"""The process around the work: what it waits for, and what it says when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas.kube.errors import Forbidden, KubeError, NotFound, Unreachable
from prfaas.operator.run import NotInstalled, causes, check_installed
from tests.kube.virtual_time import run_virtually
from tests.operator.bench import settings


class Client:
    """Answers lists: with the errors that are left, then well."""

    def __init__(self, *errors: KubeError) -> None:
        self.errors = [*errors]

    async def list(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(0.01)
        if self.errors:
            raise self.errors.pop(0)


def check(*errors: KubeError) -> None:
    client: Any = Client(*errors)
    run_virtually(check_installed(client, settings("llm")))
    assert client.errors == []


def test_an_api_server_that_does_not_answer_is_waited_for_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    check(*[Unreachable("connection refused")] * 5)
    assert [record.getMessage() for record in caplog.records if record.name == "prfaas.operator"] == [
        "waiting for the API server: Unreachable: connection refused"
    ]


def test_what_only_a_person_can_cure_is_not_waited_for() -> None:
    with pytest.raises(NotInstalled, match="install chart prfaas-crds"):
        check(NotFound("no such kind"))
    with pytest.raises(NotInstalled, match="rights do not suffice"):
        check(Forbidden("may not list", code=403))


def test_what_is_at_the_bottom_of_nested_groups_is_one_line() -> None:
    inner = ExceptionGroup("tasks", [ValueError("first\nline"), ValueError("first\nline"), KeyError("k")])
    assert causes(ExceptionGroup("unhandled", [inner])) == "ValueError: first line; KeyError: 'k'"
    assert causes(RuntimeError("alone")) == "RuntimeError: alone"
