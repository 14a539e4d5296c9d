"""One worker without KV transfer, one pair of prefill and decode, and one OpenAI client, for all tests of this room."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from e2e.environments import environment
from tests.worker_clients.rig import Server, worker

KEY = "a-key-of-the-tests"


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker."""

    prefill: Server
    decode: Server


@dataclass(frozen=True)
class Client:
    """The OpenAI client, in a process of its own."""

    process: subprocess.Popen[str]

    def told(self, call: str, **arguments: Any) -> dict[str, Any]:
        """All that came of a call (openai_driver.py). Argument `key_`: another API key."""
        asked: dict[str, Any] = {"call": call, "arguments": arguments}
        if (key := arguments.pop("key_", None)) is not None:
            asked["key"] = key
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the client's process ended"
        came = cast(dict[str, Any], json.loads(line))
        for thing in (came.get("value"), *came.get("values", ())):
            assert not isinstance(thing, dict) or "invalid" not in thing, thing["invalid"]
        return came

    def value(self, call: str, **arguments: Any) -> dict[str, Any]:
        """The object that a call gave."""
        came = self.told(call, **arguments)
        assert "raised" not in came, came
        return cast(dict[str, Any], came["value"])

    def values(self, call: str, **arguments: Any) -> list[dict[str, Any]]:
        """What a stream gave."""
        came = self.told(call, stream=True, **arguments)
        assert "raised" not in came, came
        return cast(list[dict[str, Any]], came["values"])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs and profiles."""
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="session")
def single(folder: Path) -> Iterator[Server]:
    """A worker without KV transfer that wants a key, tells cached tokens, and fails where that is asked for."""
    flags = ("--api-key", KEY, "--enable-prompt-tokens-details", "--enable-faults")
    with worker(folder, "single", *flags) as started:
        yield started


@pytest.fixture(scope="session")
def pair(folder: Path) -> Iterator[Pair]:
    """A prefill and a decode worker with NixlConnector."""
    with (
        worker(folder, "prefill", role="kv_producer") as prefill,
        worker(folder, "decode", role="kv_consumer") as decode,
    ):
        yield Pair(prefill, decode)


@pytest.fixture(scope="session")
def client(single: Server, folder: Path) -> Iterator[Client]:
    """The OpenAI client against `single`."""
    with client_of(single, folder) as started:
        yield Client(started)


def client_of(server: Server, folder: Path) -> subprocess.Popen[str]:
    """A process of the OpenAI client for a server. Ends with its input."""
    python = environment("openai").program("python")
    driver = Path(__file__).with_name("openai_driver.py")
    log = (folder / f"openai-{server.port}.log").open("wb")
    with log:
        return subprocess.Popen(
            [python, str(driver), f"{server.url}/v1", KEY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
