"""The worker as a process of its own, and requests to it: what coverage claims must show here."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.worker.process import free_port

ROOT = Path(__file__).parents[2]
MODEL = "org/model"
START_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What a request got."""

    status: int
    text: str

    @property
    def body(self) -> Any:
        """The JSON body; None where it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    @property
    def error(self) -> tuple[int, str | None]:
        """Status, and the type in vLLM's usual error body."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return self.status, error.get("type") if isinstance(error, dict) else None

    @property
    def no_such_path(self) -> bool:
        """Whether this is how vLLM answers for a path that it does not have."""
        return self.status == 404 and self.body == {"detail": "Not Found"}


@dataclass(frozen=True)
class Server:
    """A server on loopback."""

    port: int

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout: float = 30
    ) -> Answer:
        """One request; `body` goes as JSON, or as it is where it is text."""
        content = body if isinstance(body, str) or body is None else json.dumps(body)
        sent = {"Content-Type": "application/json", **(headers or {})}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            connection.request(method, path, content, sent)
            response = connection.getresponse()
            return Answer(response.status, response.read().decode())


@contextlib.contextmanager
def worker(*flags: str, **environment: str) -> Iterator[Server]:
    """`prfaas worker serve` with these flags and variables, until it answers. Every port is a free one."""
    port = free_port()
    own = ["--profile", "H20x8", "--time-scale", "1000", "--host", "127.0.0.1", "--port", str(port)]
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "PYTHONPATH": str(ROOT / "operator"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()),
        **environment,
    }
    command = [sys.executable, "-m", "prfaas.cli.main", "worker", "serve", MODEL, *own, *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=ROOT)
        try:
            server = Server(port)
            await_answer(server, process, log)
            yield server
        finally:
            process.kill()
            process.wait()


def await_answer(server: Server, process: subprocess.Popen[bytes], log: Any) -> None:
    """Until `/health` answers; an AssertionError with the log when the process ends first."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if server.ask("GET", "/health", timeout=5).status == 200:
                return
        time.sleep(0.05)
    log.seek(0)
    raise AssertionError(f"the worker did not start (status {process.poll()}):\n{log.read()[-3000:]}")
