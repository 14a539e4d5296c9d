"""A router of others that follows the workers' KV events: it knows what each has cached, having seen none of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.environments import environment
from e2e.local_router import free_port
from tests.worker_clients.rig import MODEL, Server, program, worker

pytestmark = pytest.mark.clients

TOKENS, BLOCK = 233, 16
WHOLE_BLOCKS = TOKENS // BLOCK * BLOCK


@dataclass
class Followed:
    """vllm-router, its own metrics, and the workers whose events it reads."""

    router: Server
    metrics: Server
    workers: tuple[Server, Server]
    numbers: Iterator[int] = field(default_factory=count)

    def lookups(self, result: str) -> float:
        """How often its index of blocks gave that result."""
        text = self.metrics.ask("GET", "/metrics").body.decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "vllm_router_kv_placement_lookups_total" and sample.labels["result"] == result:
                    return float(sample.value)
        return 0.0

    def went_to_its_cache(self, holder: Server) -> bool:
        """Whether a prompt that `holder` alone has answered is sent there, because of what the index knows.

        False: its events had not reached the router yet. A prompt is new from its first token on.
        """
        text = f"{next(self.numbers):04d}" * 4 + "Tell me about the sea. " * 60
        tokens = holder.ask("POST", "/tokenize", {"model": MODEL, "prompt": text}).json["tokens"][:TOKENS]
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
        assert holder.ask("POST", "/v1/completions", body).status == 200
        known, hits = self.lookups("hit"), self.hits()
        assert self.router.ask("POST", "/v1/completions", body).status == 200
        if self.lookups("hit") == known:
            return False
        gained = {server: now - hits[server] for server, now in self.hits().items()}
        assert gained == {server: WHOLE_BLOCKS if server is holder else 0 for server in self.workers}
        return True

    def hits(self) -> dict[Server, float]:
        """Prompt tokens that each worker found in its prefix cache."""
        return {server: server.metric("vllm:prefix_cache_hits_total") for server in self.workers}


def events(server: Server) -> dict[str, Any]:
    """Where a worker publishes, as it says itself: it was told to take ports that are free."""
    sources: dict[str, Any] = server.ask("GET", "/kv_event_sources").json["0"]
    return sources


@pytest.fixture(scope="module")
def followed(folder: Path) -> Iterator[Followed]:
    """Two workers that publish, and vllm-router with its policy `kv_aware`."""
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    flags = ("--kv-events-config", json.dumps(config), "--block-size", str(BLOCK))
    port, metrics = free_port(), free_port()
    with worker(folder, "events-a", *flags) as a, worker(folder, "events-b", *flags) as b:
        command = [
            *(str(environment("vllm-router").program("vllm-router")), "--worker-urls", a.url, b.url),
            *("--policy", "kv_aware", "--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK)),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", str(metrics)),
        ]
        for server in (a, b):
            found = events(server)
            command += ["--kv-event-source", f"{server.url}={found['endpoint']}"]
            command += ["--kv-event-replay-source", f"{server.url}={found['replay_endpoint']}"]
        with program(command, folder / "kv-aware.log", port) as router:
            router.until(lambda: router.ask("GET", "/health").status == 200, "vllm-router is healthy")
            yield Followed(router, Server(router.process, metrics, router.log), (a, b))


def test_a_prompt_goes_where_its_blocks_are(followed: Followed) -> None:
    for holder in (*followed.workers, *followed.workers):
        followed.router.until(partial(followed.went_to_its_cache, holder), "the router knows of a cache")
