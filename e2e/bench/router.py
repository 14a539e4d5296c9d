"""What the router costs: requests per second, added latency, CPU per request, with the real Envoy.

`python -m e2e.bench.router [--seconds S]`. Four processes share the machine: this load generator, one process of mock
engines that answer at once (two prefill, two decode), Envoy, and the picker. The floor is the same two legs made by the
client itself, without a router between. CPU comes from the process table (10 ms ticks), so it is the steadier figure
where others use the machine too; how much they used it is printed with each row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from e2e.local_router import envoy, picker_process
from prfaas.api.policy import LinkThreshold, RoutingPolicy
from prfaas.routing.world import Endpoint, Pools

LINK: Final = "to-east"
TICKS: Final = os.sysconf("SC_CLK_TCK")
DESCRIPTOR: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "00000000-0000-0000-0000-000000000000",
    "remote_request_id": "cmpl-00000000-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [list(range(64))],
    "tp_size": 8,
}


# Mock engines


class MockEngine(asyncio.Protocol):
    """An engine that answers at once; as little HTTP as Envoy and our client speak."""

    _prefilled = json.dumps({"choices": [{"text": "t"}], "kv_transfer_params": DESCRIPTOR}).encode()
    _event = b'data: {"choices":[{"text":"token"}]}\n\n'

    def __init__(self) -> None:
        self._seen = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while True:
            head, found, rest = self._seen.partition(b"\r\n\r\n")
            if not found:
                return
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(rest) < length:
                return
            self._seen = rest[length:]
            self._answer(b'"do_remote_decode":true' in rest[:length].replace(b" ", b""))

    def _answer(self, prefill: bool) -> None:
        assert self._transport is not None
        if prefill:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(self._prefilled) + self._prefilled)
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(8):
            self._transport.write(b"%x\r\n%b\r\n" % (len(self._event), self._event))
        self._transport.write(b"0\r\n\r\n")


async def serve_mocks() -> None:
    """Four mock engines; their ports on the first line of output."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(MockEngine, "127.0.0.1", 0) for _ in range(4)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


@contextmanager
def mocks() -> Iterator[tuple[int, list[Endpoint]]]:
    """Process id and endpoints of the mock engines."""
    process = subprocess.Popen([sys.executable, "-m", "e2e.bench.router", "--mocks"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        ports = json.loads(process.stdout.readline())
        yield process.pid, [Endpoint("127.0.0.1", port) for port in ports]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# Load


@dataclass(frozen=True)
class Row:
    """One measurement. Seconds; CPU in seconds per request; `others` in cores."""

    what: str
    connections: int
    size: int
    rate: float
    p50: float
    p99: float
    cpu: dict[str, float]
    others: float


class Connection:
    """One kept-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, endpoint: Endpoint) -> Connection:
        return cls(*await asyncio.open_connection(endpoint.host, endpoint.port))

    async def post(self, body: bytes) -> None:
        """One request, its answer read to the end. Raises RuntimeError when it is not 200."""
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        self._writer.write(head % len(body) + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.split(b"\r\n")[0].decode())
        length = answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if length:
            await self._reader.readexactly(int(length))
        else:
            await self._reader.readuntil(b"\r\n0\r\n\r\n")

    def close(self) -> None:
        self._writer.close()


def busy() -> float:
    """CPU seconds that the whole machine has used."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / TICKS


def used(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(
    what: str, size: int, seconds: float, clients: Sequence[Callable[[], Awaitable[None]]], pids: dict[str, int]
) -> Row:
    """Every client sends one request after another for `seconds`."""
    for client in clients:
        await client()
    times: list[float] = []
    before = {name: used(pid) for name, pid in pids.items()}
    machine, own = busy(), time.process_time()
    start = time.monotonic()

    async def run(client: Callable[[], Awaitable[None]]) -> None:
        while (began := time.monotonic()) < start + seconds:
            await client()
            times.append(time.monotonic() - began)

    await asyncio.gather(*(run(client) for client in clients))
    wall = time.monotonic() - start
    cpu = {name: used(pid) - before[name] for name, pid in pids.items()}
    others = busy() - machine - sum(cpu.values()) - (time.process_time() - own)
    times.sort()
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    per_request = {name: spent / len(times) for name, spent in cpu.items()}
    return Row(what, len(clients), size, len(times) / wall, p50, p99, per_request, max(0.0, others / wall))


def body(size: int) -> bytes:
    """A streamed request of about `size` bytes."""
    return json.dumps({"model": "m", "stream": True, "max_tokens": 8, "prompt": "word " * (size // 5)}).encode()


async def both_legs(prefill: Connection, decode: Connection, raw: bytes) -> None:
    """What the router does, made by the client: its cost without a router."""
    await prefill.post(raw[:-1] + b', "stream": false, "kv_transfer_params": {"do_remote_decode": true}}')
    await decode.post(raw)


async def bench(seconds: float, concurrency: int) -> list[Row]:
    """All rows."""
    rows = []
    cut = (LinkThreshold(link=LINK, tokens=4_000),)
    rules = RoutingPolicy.build(pd_cluster_uid="bench", epoch=1, version=1, model="m", thresholds=cut)
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as folder, mocks() as (mock_pid, engines):
        p, e, *decoders = engines
        with (
            envoy(Path(folder), max_body_bytes=32 * 1024 * 1024, concurrency=concurrency) as data_plane,
            picker_process(data_plane, rules, Pools((p,), tuple(decoders), {LINK: (e,)})) as picker,
        ):
            await data_plane.knows({decoder.address for decoder in decoders})
            pids = {"envoy": data_plane.pid, "picker": picker.process.pid, "mocks": mock_pid}
            router = Endpoint("127.0.0.1", data_plane.port)
            for connections, size in ((1, 300), (32, 300), (1, 100_000), (8, 100_000)):
                raw = body(size)
                opened = [await Connection.open(router) for _ in range(connections)]
                through = [partial(connection.post, raw) for connection in opened]
                pairs = [(await Connection.open(p), await Connection.open(decoders[0])) for _ in range(connections)]
                floor = [partial(both_legs, *pair, raw) for pair in pairs]
                rows.append(await measure("two legs, no router", size, seconds, floor, {"mocks": mock_pid}))
                rows.append(await measure("router", size, seconds, through, pids))
                for connection in (*opened, *(half for pair in pairs for half in pair)):
                    connection.close()
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| what | connections | body | requests/s | p50 ms | p99 ms | CPU us: Envoy | picker | mocks | others, cores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cpu = " | ".join(
            f"{row.cpu[name] * 1e6:.0f}" if name in row.cpu else "-" for name in ("envoy", "picker", "mocks")
        )
        lines.append(
            f"| {row.what} | {row.connections} | {row.size:,} B | {row.rate:,.0f} | {row.p50 * 1e3:.2f} "
            f"| {row.p99 * 1e3:.1f} | {cpu} | {row.others:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=4.0, help="per row")
    parser.add_argument("--concurrency", type=int, default=1, help="threads of Envoy")
    parser.add_argument("--mocks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mocks:
        asyncio.run(serve_mocks())
        return 0
    print(table(asyncio.run(bench(args.seconds, args.concurrency))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
