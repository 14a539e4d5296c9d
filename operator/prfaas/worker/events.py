"""KV events as vLLM 0.33 publishes them: what its prefix cache stores and removes, on ZeroMQ, as msgpack maps.

A message has three frames: topic, sequence number (8 bytes, from 0), and the msgpack array of time, events and data
parallel rank. One message per engine step that has events, none without. A second socket answers who missed some: all
buffered batches from a start sequence on, then one with the sequence -1. Nothing here waits: a subscriber that is too
slow loses messages at the high water mark, as with vLLM.

ZeroMQ is imported only where events are on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq
    import zmq.asyncio

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
MAX_BUFFERED_BYTES = 8 * 1024 * 1024
"""vLLM buffers `buffer_steps` batches whatever they weigh; a worker that shares a machine with others cannot."""


@dataclass(frozen=True)
class EventsConfig:
    """`--kv-events-config`, every field of it."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    int_hashes: bool = True
    """VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: the low 64 bits as a number, rather than the whole hash as bytes."""

    @property
    def on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def binds(endpoint: str) -> bool:
    """Whether the publisher binds its endpoint; it connects to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class Publisher:
    """Collects the events of a step, sends them, answers replays. `start` in a running loop, `stop` at the end."""

    def __init__(self, config: EventsConfig, host: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._config, self._host, self._wall_clock = config, host, wall_clock
        self._pending: list[Mapping[str, Any]] = []
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._buffered = 0
        self._sequence = 0
        self._topic = config.topic.encode()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._answering: asyncio.Task[None] | None = None
        self._endpoint, self._replay_endpoint = config.endpoint, config.replay_endpoint

    def note(self, event: Mapping[str, Any]) -> None:
        """Something happened in this step."""
        self._pending.append(event)

    def start(self) -> None:
        """Open the sockets; OSError where an endpoint is taken, or is none."""
        import zmq
        import zmq.asyncio

        self._pub = zmq.Context.instance().socket(zmq.PUB)
        self._pub.set_hwm(self._config.hwm)
        if binds(self._endpoint):
            self._endpoint = self._bind(self._pub, self._endpoint)
        else:
            self._open(self._pub.connect, self._endpoint)
        if self._replay_endpoint is not None:
            self._replay = zmq.asyncio.Context.shadow(zmq.Context.instance()).socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.SNDHWM, 2 * (self._config.buffer_steps + 1))
            self._replay_endpoint = self._bind(self._replay, self._replay_endpoint)
            self._answering = asyncio.create_task(self._answer_replays(self._replay))

    def flush(self) -> None:
        """The step is over: send what happened in it, if anything did."""
        if not self._pending or self._pub is None:
            return
        import msgspec

        events, self._pending = self._pending, []
        payload = msgspec.msgpack.encode((self._wall_clock(), events, 0))
        self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        if len(self._buffer) == self._buffer.maxlen:
            self._forget_oldest()
        self._buffer.append((self._sequence, payload))
        self._buffered += len(payload)
        while self._buffered > MAX_BUFFERED_BYTES and len(self._buffer) > 1:
            self._forget_oldest()
        self._sequence += 1

    def sources(self) -> dict[str, Any]:
        """The body of `/kv_event_sources`: the configuration in effect, by data parallel rank."""
        shown = asdict(self._config) | {"endpoint": self._endpoint, "replay_endpoint": self._replay_endpoint}
        del shown["int_hashes"]
        return {"0": shown}

    async def stop(self) -> None:
        """Close the sockets."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._replay = None

    def _forget_oldest(self) -> None:
        if self._buffer:
            self._buffered -= len(self._buffer.popleft()[1])

    def _bind(self, socket: zmq.Socket[Any], endpoint: str) -> str:
        """Bind; `tcp://*:0` becomes this host's address and a free port."""
        if endpoint != "tcp://*:0":
            self._open(socket.bind, endpoint)
            return endpoint
        port = socket.bind_to_random_port(f"tcp://{self._host}")
        return f"tcp://{self._host}:{port}"

    def _open(self, how: Callable[[str], object], endpoint: str) -> None:
        import zmq

        try:
            how(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"--kv-events-config: {endpoint}: {error.strerror}") from error

    async def _answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3:
                log.warning("a replay request of %d frames is not answered: 3 are right", len(frames))
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._buffer):
                if sequence >= first:
                    await socket.send_multipart((client, b"", self._topic, sequence.to_bytes(8, "big"), payload))
            await socket.send_multipart((client, b"", b"", END, b""))
