"""`prfaas calibrate`: what it prints and writes, and what it says of files it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.api.profile import Profile
from prfaas.api.profiles import parse_profile, shipped
from prfaas.cli.main import main
from tests.planner.calibration_cases import samples

pytestmark = pytest.mark.slow

H20 = shipped("H20x8")
HEADER = "tokens,cached,seconds,concurrency,age_seconds,censored,bytes,transfer_seconds"


def write(path: Path, truth: Profile = H20) -> Path:
    """200 samples with transfers at 40 Gbit/s, one far off, one crowded and one stale."""
    lines = [HEADER]
    for s in samples(truth, count=200, noise=0.02):
        size = truth.kv.bytes(s.tokens - s.cached)
        lines.append(f"{s.tokens},{s.cached},{s.seconds:.6f},1,60,,{size},{size * 8e-9 / 40:.6f}")
    lines += ["50000,0,90,1,60,,,", "50000,0,20,3,60,false,,", "50000,0,1,1,1e6,no,,"]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return write(tmp_path / "samples.csv")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["calibrate", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("prfaas calibrate: ").strip()


def test_it_prints_fit_bounds_what_was_left_out_and_drift(capsys: pytest.CaptureFixture[str], measured: Path) -> None:
    assert main(["calibrate", str(measured), "--against", "H20x8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("T(l) = 0.4")
    assert "95 % bounds" in text
    assert "S(n) = 182,353,920 + 17,280 n bytes." in text
    assert "Transfers ran at 40 Gbit/s" in text
    assert f"{measured}:202 (12 times what the others say of its length)" in text
    assert f"Left out, others were prefilled beside it: 1: {measured}:203." in text
    assert f"Left out, older than 604,800 s: 1: {measured}:204." in text
    assert "\nNo drift: at " in text
    assert all(len(line) < 200 for line in text.splitlines() if str(measured) not in line)


def test_drift_is_said(capsys: pytest.CaptureFixture[str], measured: Path) -> None:
    assert main(["calibrate", str(measured), "--against", "H200x8"]) == 0
    assert "\nDRIFT: at " in capsys.readouterr().out


def test_the_profile_is_one_that_can_be_read_and_compared_with(
    capsys: pytest.CaptureFixture[str], measured: Path, tmp_path: Path
) -> None:
    out = tmp_path / "profile.yaml"
    assert main(["calibrate", str(measured), "--against", "H20x8", "-o", str(out)]) == 0
    made = parse_profile(out.read_text())
    assert made.source == "measured"
    assert (made.kv, made.decode, made.gpus) == (H20.kv, H20.decode, 8)
    assert made.prefill.seconds(60_000) == pytest.approx(H20.prefill.seconds(60_000), rel=0.02)
    assert made.prefill.measured_tokens is not None
    assert made.prefill.measured_tokens <= 131_072
    assert "# T(l) = " in out.read_text()
    capsys.readouterr()
    assert main(["calibrate", str(measured), "--against", str(out)]) == 0
    assert "No drift: " in capsys.readouterr().out


def test_an_older_age_can_be_allowed(capsys: pytest.CaptureFixture[str], measured: Path) -> None:
    assert main(["calibrate", str(measured), "--max-age", "2e6"]) == 0
    text = capsys.readouterr().out
    assert "older than" not in text
    assert "rift" not in text, "nothing to compare with"


def test_the_picture(capsys: pytest.CaptureFixture[str], measured: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    assert main(["calibrate", str(measured), "--against", "H200x8", "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_profile_is_not_written_without_one_in_force(
    capsys: pytest.CaptureFixture[str], measured: Path, tmp_path: Path
) -> None:
    said = refused(capsys, str(measured), "-o", str(tmp_path / "p.yaml"))
    assert said.startswith("-o: needs --against PROFILE")
    said = refused(capsys, str(measured), "--against", "H100x8")
    assert said.startswith("--against: 'H100x8' is neither a file nor one of H200x8, H20x8")
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: Profile\n")
    assert refused(capsys, str(measured), "--against", str(broken)).startswith(f"{broken}: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1000,0,0.5", "3 values for 8 columns"),
        ("1e3,0,0.5,1,,,,", "tokens: '1e3' is not a whole number from 1 to 10000000"),
        ("1000,1000,0.5,1,,,,", "cached 1000 must be below tokens 1000"),
        ("1000,-1,0.5,1,,,,", "cached: '-1' is not a whole number"),
        ("1000,0,0,1,,,,", "seconds: must be a finite number at least 1e-06"),
        ("1000,0,nan,1,,,,", "seconds: must be a finite number"),
        ("1000,0,fast,1,,,,", "seconds: 'fast' is not a number"),
        ("1000,0,0.5,0,,,,", "concurrency: must be a finite number at least 1"),
        ("1000,0,0.5,1,-5,,,", "age_seconds: must be"),
        ("1000,0,0.5,1,,maybe,,", "censored: 'maybe' is neither true nor false"),
        ("1000,0,0.5,1,,,-1,", "bytes: must be"),
        ("1000,0,0.5,1,,,1,0", "transfer_seconds: must be"),
        ('1000,0,"0.5', "unexpected end of data"),
    ],
)
def test_a_wrong_line_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(f"{HEADER}\n2000,0,0.6,1,,,,\n{line}\n")
    assert refused(capsys, str(path)).startswith(f"{path}:3: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "1: no column tokens, cached, seconds, concurrency"),
        (b"tokens,seconds\n", "1: no column cached, concurrency"),
        (b"tokens,cached,seconds,concurrency,batch\n", "1: unknown column 'batch'"),
        (b"tokens,cached,seconds,concurrency,tokens\n", "1: a column is named twice"),
        (b"tokens,cached,seconds,concurrency\n\xff\n", "1: is not UTF-8 text"),
    ],
)
def test_a_wrong_header_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_bytes(text)
    assert refused(capsys, str(path)).startswith(f"{path}:{said}")


def test_too_few_samples_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("cached,tokens,concurrency,seconds\n0,2000,1,0.6\n\n0,3000,1,0.7\n")
    assert refused(capsys, str(path)) == "samples: 2 are usable, 12 are needed (0 left out)"


@pytest.mark.parametrize("words", [[], ["/does/not/exist"], ["--max-age", "-1"]])
def test_words_that_cannot_be_are_refused_at_once(words: list[str], measured: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *words, *([str(measured)] if "--max-age" in words else [])])
    assert ended.value.code == 2
