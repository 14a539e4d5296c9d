"""Processes of these tests: workers as a pod starts them, and programs of others before or against them.

Every process is started and ended here, by its id. Readiness is polled, with a deadline.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from prfaas.api.profiles import shipped

ROOT = Path(__file__).parents[2]
MODEL = "org/model"
START_SECONDS = 40.0
TIME_SCALE = 100
POLL_SECONDS = 0.02
"""Between two looks at another process, which has no event to wait for."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body of a JSON answer."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, `[DONE]` checked and left out."""
        data = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(line) for line in data]


@dataclass(frozen=True)
class Server:
    """A process that serves HTTP on loopback."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """One request on a connection of its own; OSError while nobody listens."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    @contextmanager
    def begun(self, path: str, body: object) -> Iterator[None]:
        """Within it, the answer to a request has begun and goes on; at the end its client leaves."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert (answer.status, answer.read(1)) == (200, b"d")
            yield
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series; AssertionError if it is not there."""
        for family in text_string_to_metric_families(self.ask("GET", "/metrics").body.decode()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"no {name} {labels}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for the condition; AssertionError with the log when the process ends or the time is over."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except OSError:  # nobody listens yet
                pass
            assert self.process.poll() is None, f"ended before: {what}\n{self.shown()}"
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"still not: {what}\n{self.shown()}")

    def shown(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4_000:]


@contextmanager
def program(
    command: Sequence[str], log: Path, port: int = 0, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A process that serves on a port; killed at the end, if it did not end before."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **(environment or {})}, cwd=ROOT
        )
    try:
        yield Server(process, port, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def worker(folder: Path, name: str, *flags: str, role: str | None = None) -> Iterator[Server]:
    """A worker process that serves, on ports that were free. `role`: of a NixlConnector."""
    profile = folder / f"{name}.yaml"
    document = shipped("H200x8" if role == "kv_producer" else "H20x8").to_wire() | {"startupSeconds": 0}
    profile.write_text(json.dumps(document))
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    command = [
        *(sys.executable, "-m", "prfaas.cli.main", "worker", "serve", MODEL, "--profile", str(profile)),
        *("--host", "127.0.0.1", "--port", "0", "--time-scale", str(TIME_SCALE), "--kv-byte-scale", "0.01"),
        *(("--kv-transfer-config", transfer) if role else ()),
        *flags,
    ]
    environment = {
        "PYTHONPATH": str(ROOT / "operator"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "0",
    }
    with program(command, folder / f"{name}.log", environment=environment) as started:
        said: list[int] = []

        def serves() -> bool:
            said[:] = [int(port) for port in re.findall(r"serving on port (\d+)", started.log.read_text())]
            return bool(said)

        started.until(serves, f"{name} serves")
        yield Server(started.process, said[0], started.log)
        started.process.terminate()
        assert started.process.wait(START_SECONDS) == 0, started.shown()
