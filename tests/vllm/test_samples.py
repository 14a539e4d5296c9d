"""The samples, as a person reviews them: what `prfaas render -o args` prints is pasted, and vLLM takes it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from e2e.vllm_source import VllmParser
from prfaas.cli.main import main
from tests.vllm.test_rendered import KUBELET

pytestmark = pytest.mark.clients

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
FOLDERS = sorted({file.parent for file in SAMPLES.rglob("p*cluster.yaml")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SAMPLES)))
def test_command_lines_of_a_sample(folder: Path, vllm: VllmParser, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", str(folder), "-o", "args"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        pasted = re.sub(r'"\$\{(\w+)\}"', lambda found: KUBELET[found[1]], line)
        words = shlex.split(pasted)
        parsed = vllm.parse(words[words.index("serve") + 1 :])
        assert parsed["kv_transfer_config"]["kv_connector"] == "NixlConnector"
        assert parsed.configured is not None
        assert parsed.configured["kv_transfer_config"]["kv_role"] in ("kv_producer", "kv_consumer")
        assert parsed.configured["kv_events_config"]["enable_kv_cache_events"] is True
