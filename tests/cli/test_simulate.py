"""`prfaas simulate`: what it prints, and what it says of what cannot be simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAPER = str(ROOT / "manifests/examples/paper.yaml")
MOONCAKE = [
    {"timestamp": 1000 * i, "input_length": 1024 + 512 * (i % 3), "output_length": 10, "hash_ids": [*range(2 + i % 3)]}
    for i in range(30)
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return path


def keys(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", "-f", PAPER, *words, "-o", "json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", "-f", PAPER, *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("prfaas simulate: ").strip()


def test_the_keys_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = keys(capsys, "--rate", "2", "--duration", "300", "--seed", "4")
    assert 500 < found["requests"] < 700
    assert found["throughput"] == pytest.approx(2.0, rel=0.2)
    assert 0 < found["ttft"]["p50"] < found["ttft"]["mean"] < found["ttft"]["p90"] < found["ttft"]["p99"]
    assert found["tpot"]["p50"] == found["tpot"]["p99"] == 0.025
    assert set(found["utilisation"]) == {"prfaas/h200", "prefill/h20", "decode/h20", "line/link:east"}
    assert 4 < found["egressGbps"] < 12
    assert 0.4 < found["offloadShare"] < 0.6
    assert 19_100 <= found["threshold"] <= 19_600
    assert found["seed"] == 4
    assert found["instances"] == {"prefill": 3, "decode": 5, "prfaas": 4}
    assert found["series"][-1]["threshold"] == found["threshold"]


def test_the_same_seed_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    one = keys(capsys, "--rate", "2", "--duration", "60", "--queueing", "triage")
    assert one == keys(capsys, "--rate", "2", "--duration", "60", "--queueing", "triage")
    assert one["ttft"] != keys(capsys, "--rate", "2", "--duration", "60", "--seed", "1")["ttft"]


@pytest.mark.parametrize(
    ("policy", "threshold", "instances"),
    [
        ("threshold=30000", 30_000, {"prefill": 4, "decode": 4, "prfaas": 4}),
        ("homogeneous", None, {"prefill": 9, "decode": 3, "prfaas": 0}),
        ("naive", 0, {"prefill": 0, "decode": 8, "prfaas": 4}),
        ("blind", None, {"prefill": 3, "decode": 5, "prfaas": 4}),
    ],
)
def test_policies(
    capsys: pytest.CaptureFixture[str], policy: str, threshold: int | None, instances: dict[str, int]
) -> None:
    found = keys(capsys, "--rate", "1", "--duration", "300", "--policy", policy)
    assert (found["threshold"], found["instances"]) == (threshold, instances)
    assert (found["offloadShare"] == 0) == (policy == "homogeneous")
    assert (found["offloadShare"] == 1) == (policy == "naive")


def test_a_trace_is_planned_for_by_its_own_lengths_and_rate(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    found = keys(capsys, "--trace", str(trace))
    assert found["requests"] == 30
    assert found["rate"] == pytest.approx(30 / 29, rel=1e-5)
    assert found["threshold"] < 10_000, "the shortest prompts of the case study are longer"
    assert found["cachedShare"] > 0.5
    assert keys(capsys, "--trace", str(trace), "--prefix-cache", "none")["cachedShare"] == 0
    assert keys(capsys, "--trace", str(trace), "--scale-rate", "10")["seconds"] < 6
    assert keys(capsys, "--trace", str(trace), "--duration", "10")["requests"] == 11


def test_a_line_that_is_cut_moves_everything_home(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schedule = tmp_path / "line.csv"
    schedule.write_text("seconds,gbps\n0,0\n")
    found = keys(capsys, "--rate", "0.5", "--duration", "120", "--link-schedule", str(schedule))
    assert (found["offloadShare"], found["egressGbps"]) == (0, 0)


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-f", PAPER, "--rate", "2", "--duration", "100"]) == 0
    text = capsys.readouterr().out
    assert "time to first token" in text
    assert "the line east" in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    assert (
        main(["simulate", "-f", PAPER, "--rate", "2", "--duration", "60", "--queueing", "triage", "--plot", str(out)])
        == 0
    )
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "1", "--policy", "best"], "--policy: 'best' is none: give one of planned, threshold=N"),
        (["--rate", "1", "--policy", "threshold=long"], "--policy: 'long' is no threshold"),
        (["--rate", "1", "--policy", "blind", "--queueing", "triage"], "--queueing: triage needs a threshold"),
        (["--rate", "9", "--objective", "latency"], "rate: 9 requests/s cannot be served"),
        (["--trace", "/does/not/exist"], "[Errno 2] No such file"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert refused(capsys, *words).startswith(said)


def test_a_bad_line_of_a_trace_is_said_with_its_number(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    with trace.open("a") as lines:
        lines.write('{"timestamp": 1}\n')
    assert refused(capsys, "--trace", str(trace)).startswith(f"{trace}:31: ")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "1", "--trace", "x"],
        ["--rate", "1", "--duration", "-1"],
        ["--rate", "1", "--plot", "out.pdf"],
        ["--rate", "1", "--queueing", "lifo"],
    ],
)
def test_values_that_cannot_be_are_refused_at_once(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "-f", PAPER, *words])
    assert ended.value.code == 2


def test_an_interrupt_prints_what_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from prfaas.planner.simulator.engine import Simulation

    whole = Simulation.run

    def interrupted(self: Simulation, progress: Any = None) -> Any:
        def stop(requests: int, seconds: float) -> None:
            if requests >= 1000:
                raise KeyboardInterrupt

        return whole(self, stop)

    monkeypatch.setattr(Simulation, "run", interrupted)
    assert main(["simulate", "-f", PAPER, "--rate", "2", "-o", "json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"] is True
    assert 0 < found["requests"] < 1100
    assert found["unfinished"] > 0
