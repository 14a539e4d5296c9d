"""aiperf measures a worker as it would measure vLLM, and its figures are those that the worker's profile gives."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from e2e.environments import environment
from prfaas.worker.oracle import count_tokens
from tests.worker_clients.conftest import KEY
from tests.worker_clients.rig import MODEL, TIME_SCALE, Server

pytestmark = pytest.mark.clients

REQUESTS, OUTPUT = 16, 20


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes: aiperf makes prompts with one, and no model hub can be asked for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = (byte for byte in range(256) if byte not in printable)
    letters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(shifted)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": letters, "merges": []}
    folder.mkdir()
    document = {"added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def measured(single: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what aiperf wrote after a short run of streamed chats."""
    folder = tmp_path_factory.mktemp("aiperf")
    command = [
        *(str(environment("aiperf").program("aiperf")), "profile", "--model", MODEL, "--url", single.url),
        *("--endpoint-type", "chat", "--streaming", "--api-key", KEY, "--use-server-token-count"),
        *("--request-count", str(REQUESTS), "--concurrency", "4", "--isl", "400", "--osl", str(OUTPUT)),
        *("--tokenizer", str(byte_tokenizer(folder / "tokenizer")), "--random-seed", "1"),
        *("--extra-inputs", "ignore_eos:true", "--workers-max", "1", "--record-processor-service-count", "1"),
        *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder / "out")),
    ]
    with TemporaryDirectory(prefix="aiperf-") as scratch:  # what it leaves there; its sockets' names must be short
        quiet = {**os.environ, "HOME": str(folder), "HF_HOME": str(folder), "TMPDIR": scratch, "DO_NOT_TRACK": "1"}
        done = subprocess.run(command, env=quiet, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
    return folder / "out"


def figures(measured: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((measured / "profile_export_aiperf.json").read_text())
    return document


def test_every_request_was_answered(measured: Path) -> None:
    found = figures(measured)
    assert found["is_complete"]
    assert found["request_count"]["avg"] == found["completed_request_count"]["avg"] == REQUESTS
    assert found["request_error_rate"]["avg"] == 0
    assert found["error_summary"] == []


def test_its_figures_are_those_of_the_profile(measured: Path) -> None:
    found = figures(measured)
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == OUTPUT
    # 400 bytes of text, and what the chat template adds.
    assert count_tokens("a" * 400) < found["input_sequence_length"]["avg"] < count_tokens("a" * 500)
    prefill = 0.45 / TIME_SCALE  # the profile of an H20: a short prompt's prefill takes at least so long
    step = 0.025 / TIME_SCALE
    assert found["time_to_first_token"]["min"] >= 1000 * prefill
    assert found["request_latency"]["min"] >= 1000 * (prefill + (OUTPUT - 1) * step)
    assert found["request_throughput"]["avg"] <= 1 / prefill


def test_it_reads_the_workers_metrics(measured: Path) -> None:
    """aiperf scrapes `/metrics` by vLLM's names, and what it found agrees with what it sent."""
    found = json.loads((measured / "server_metrics_export.json").read_text())["metrics"]
    (latency,) = found["vllm:e2e_request_latency_seconds"]["series"]
    assert latency["stats"]["count"] == REQUESTS
    (tokens,) = found["vllm:generation_tokens"]["series"]
    assert tokens["stats"]["total"] == REQUESTS * OUTPUT
