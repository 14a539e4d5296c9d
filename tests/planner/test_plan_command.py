"""`prfaas plan` as a person and a script meet it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from prfaas.cli.main import main
from tests.planner.cases import PAPER_FILE, ROOT

pytestmark = pytest.mark.slow

PLAN = ["plan", "-f", str(PAPER_FILE)]


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--rate", "2.2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "h20: 3 prefill and 5 decode instances; prompts above 19,518 uncached tokens go over east"
    )
    rows = {line.split("  ")[0]: line.split() for line in printed.splitlines()}
    assert rows["plan"][1:6] == ["3/5", "4", "19,518", "3.24", "49.3%"]
    assert rows["homogeneous"][1:5] == ["9/3", "-", "-", "2.11"]
    assert rows["naive"][1:5] == ["0/8", "4", "0", "2.46"]
    assert "The bottleneck is the remote prefill instances of h200." in printed
    widths = {len(line) for line in printed.splitlines() if line.startswith(("plan ", "naive ", "homogeneous"))}
    assert len(widths) == 1, "columns are aligned"


def test_yaml_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "-o", "json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert main([*PLAN, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == keys
    expected = (
        "lambdaMax threshold thresholds instances theta offloadShare meanLong meanShort egressGbps ttft bottleneck"
    )
    for each in (keys, *keys["baselines"].values(), keys["second"]):
        assert set(expected.split()) <= set(each)
    assert set(keys["baselines"]) == {"homogeneous", "naive", "blind"}
    assert keys["baselines"]["naive"]["theta"]["prefill"] is None, "JSON has no infinity"


def test_what_if_keeps_the_plan_and_adds_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "-o", "json", "--what-if", "prfaas=+2,link=25"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert keys["instances"]["prfaas"] == 4
    assert keys["whatIf"]["instances"]["prfaas"] == 6
    assert keys["whatIf"]["lambdaMax"] > keys["lambdaMax"]
    assert keys["whatIf"]["staying"]["loss"] > 0


def test_flags_go_before_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "-o", "json", "--service-time", "mean", "--objective", "latency", "--rate", "1.9"]) == 0
    keys = json.loads(capsys.readouterr().out)
    assert keys["loadedTtft"]["p90"] < 4.2
    assert "lowest P90" in keys["reason"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-f", "nothing.yaml"], "prfaas plan: nothing.yaml: No such file or directory"),
        (["-f", str(ROOT / "manifests/samples/west")], "PlanInput: exactly one such document is needed, there are 0"),
        ([*PLAN[1:], "--sweep", "line=1"], "line: there is no such pool or link: h200, h20, east"),
        ([*PLAN[1:], "--objective", "latency"], "rate: is needed for the objective latency"),
        ([*PLAN[1:], "--rate", "-1"], "rate: must be a finite number above 0"),
        ([*PLAN[1:], "--plot", "/nowhere/at/all.png"], "No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_picture_must_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, "--plot", "plan.pdf"])
    assert "the name must end in .png or .svg" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
@pytest.mark.parametrize("flags", [[], ["--sweep", "link=100,10,1"], ["--sweep", "prfaas=2,4,6"]])
def test_pictures_are_drawn(name: str, flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / name
    assert main([*PLAN, "--plot", str(out), *flags]) == 0
    begins = out.read_bytes()[:5]
    assert begins == (b"\x89PNG\r" if name.endswith("png") else b"<?xml")


def test_the_case_study_takes_less_than_a_second_and_a_half() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "prfaas.cli.main", *PLAN, "-o", "json"]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 1.5, f"{used:.2f} s of processor time, interpreter included"


def test_planning_needs_neither_numpy_nor_matplotlib() -> None:
    program = (
        "import sys; from prfaas.cli.main import main\n"
        f"assert main({PLAN!r}) == 0\n"
        "heavy = {'numpy', 'matplotlib', 'scipy', 'kopf', 'kubernetes', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
