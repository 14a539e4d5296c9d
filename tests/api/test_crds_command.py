"""`prfaas crds`: what is committed is what the models say, and a difference is shown readably."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from prfaas.api.crd import files
from prfaas.cli import crds

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser()
    crds.add_parser(parser.add_subparsers())
    args = parser.parse_args(["crds", *arguments])
    status: int = args.run(args)
    return status


def test_what_is_committed_is_what_the_models_say(capsys: pytest.CaptureFixture[str]) -> None:
    status = run("--check", "--root", str(ROOT))

    assert status == 0, capsys.readouterr().err


def test_write_then_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--root", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines() == [f"{path}: written" for path in files()]

    assert run("--root", str(tmp_path)) == 0
    assert run("--check", "--root", str(tmp_path)) == 0
    assert capsys.readouterr() == ("", "")


def test_drift_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--root", str(tmp_path))
    edited = tmp_path / "crds/pdclusters.prfaas.io.yaml"
    edited.write_text(edited.read_text().replace("shortNames:\n    - pdc", "shortNames:\n    - pd"))
    (tmp_path / "docs/api.md").unlink()
    (tmp_path / "crds/old.yaml").write_text("")
    capsys.readouterr()

    assert run("--check", "--root", str(tmp_path)) == 1

    said = capsys.readouterr().err
    assert "crds/pdclusters.prfaas.io.yaml: differs from the models" in said
    assert "-    - pd\n+    - pdc\n" in said
    assert "docs/api.md: is missing" in said
    assert "crds/old.yaml: is generated from no model" in said
    assert said.endswith("run `prfaas crds` and commit the result\n")


def test_a_file_of_no_model_is_removed(tmp_path: Path) -> None:
    run("--root", str(tmp_path))
    (tmp_path / "crds/old.yaml").write_text("")

    run("--root", str(tmp_path))

    assert not (tmp_path / "crds/old.yaml").exists()


def test_the_chart_keeps_crds_and_differs_in_nothing_else() -> None:
    texts = files()
    for path, text in texts.items():
        if path.startswith("charts/"):
            crd = yaml.safe_load(text)
            assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
            assert crd == yaml.safe_load(texts[path.replace("charts/prfaas-crds/templates", "crds")])
