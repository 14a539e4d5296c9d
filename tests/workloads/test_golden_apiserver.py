"""A real API server takes every object of the golden folders as it is, without a warning about a field.

LeaderWorkerSets are not served there: of them the pod templates are checked, as PodTemplates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.apiserver import ApiServer

GOLDEN = Path(__file__).parent / "golden"


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    for case in sorted(GOLDEN.iterdir()):
        for item in yaml.safe_load_all((case / "expected.yaml").read_text()):
            name = f"{case.name}-{item['kind']}-{item['metadata']['name']}"
            if item["kind"] != "LeaderWorkerSet":
                yield name, item
                continue
            for part in ("leaderTemplate", "workerTemplate"):
                template = item["spec"]["leaderWorkerTemplate"][part]
                metadata = {"name": f"{item['metadata']['name']}-{part.lower()}"}
                yield (
                    f"{name}-{part}",
                    {
                        "apiVersion": "v1",
                        "kind": "PodTemplate",
                        "metadata": metadata,
                        "template": template,
                    },
                )


CASES = list(objects())


@pytest.mark.apiserver
@pytest.mark.parametrize("item", [item for _, item in CASES], ids=[name for name, _ in CASES])
def test_the_api_server_takes_it(apiserver: ApiServer, namespace: str, item: dict[str, Any]) -> None:
    metadata = {key: value for key, value in item["metadata"].items() if key != "ownerReferences"}
    placed = {**item, "metadata": {**metadata, "namespace": namespace}}
    done = apiserver.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"), stdin=json.dumps(placed)
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_golden_folders_have_a_group_that_spans_nodes() -> None:
    assert any(name.endswith("workerTemplate") for name, _ in CASES)
