"""`prfaas`: every command is there, and one that is called brings only its own module."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prfaas.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n    {command}" in printed for command in COMMANDS)


def test_an_unknown_command_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fly"])
    said = capsys.readouterr().err
    assert "'fly'" in said
    assert all(command in said for command in COMMANDS)


def test_a_worker_pays_for_nothing_of_the_operator() -> None:
    program = (
        "import sys; from prfaas.cli.main import main\n"
        "try: main(['worker', 'serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in ('kopf', 'kubernetes', 'grpc', 'prfaas.cli.operator') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
