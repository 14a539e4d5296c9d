"""The API server accepts every sample as kustomize builds it, with nothing misspelt."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from e2e.apiserver import ApiServer
from prfaas.api.kinds import KINDS
from tests.api.documents import collection

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
FOLDERS = sorted(file.parent.relative_to(SAMPLES) for file in SAMPLES.rglob("kustomization.yaml"))


@pytest.mark.apiserver
@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_api_server_accepts_the_sample(folder: Path, apiserver: ApiServer) -> None:
    built = apiserver.kubectl("kustomize", str(SAMPLES / folder))
    assert built.returncode == 0, built.stderr
    ours = [document for document in yaml.safe_load_all(built.stdout) if document["kind"] in KINDS]
    query = {"dryRun": "All", "fieldValidation": "Strict"}

    assert ours
    for document in ours:
        document["metadata"]["namespace"] = "default"
        answer = apiserver.request("POST", collection(document["kind"], "default"), document, query=query)
        assert answer.status == 201, answer.message
