"""One JSON object per line, with the same members in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MEMBERS = ["time", "level", "logger", "message"]


def logged(program: str) -> list[dict[str, Any]]:
    """What a process logs that sets up its log as the commands do."""
    text = f"import logging\nfrom prfaas import logs\nlogs.set_up()\nlog = logging.getLogger('prfaas.x')\n{program}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_has_the_standard_members_and_then_what_was_added() -> None:
    first, second = logged("log.info('a %s', 'b', extra={'link': 'east'})\nlog.debug('no')\nlog.error('ü\\n')")
    assert list(first) == [*MEMBERS, "link"]
    assert (first["level"], first["logger"], first["message"], first["link"]) == ("info", "prfaas.x", "a b", "east")
    assert (list(second), second["level"], second["message"]) == (MEMBERS, "error", "ü\n")


def test_a_traceback_is_part_of_its_line() -> None:
    (line,) = logged("try: 1 / 0\nexcept ZeroDivisionError: log.exception('bad')")
    assert "ZeroDivisionError" in line["exception"]


@pytest.mark.parametrize(
    "words",
    [
        ["worker", "serve", "m", "--profile", "H20x8", "--host", "256.0.0.1", "--time-scale", "1000"],
        ["operator", "--cluster-id", "e", "--namespace", "n", "--image", "i", "--port", "18999"],
    ],
)
def test_every_process_logs_so(words: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    command = [sys.executable, "-m", "prfaas.cli.main", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"prfaas {words[0]}") or words[0] == "operator"
    assert list(json.loads(done.stderr.splitlines()[0]))[:4] == MEMBERS
