"""Connections: client certificates, whose keys must not stay on disk, and the pod's own service account."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from prfaas.kube.client import KubeClient
from prfaas.kube.errors import BadCredentials
from prfaas.kube.kubeconfig import Credentials

PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


PAIR = Path(__file__).parents[1] / "data" / "peer"


@pytest.fixture
def pair() -> tuple[str, str]:
    """A self-signed certificate, good until 2126, and its key."""
    return (PAIR / "cert.pem").read_text(), (PAIR / "key.pem").read_text()


async def test_a_client_key_is_on_disk_only_while_it_is_loaded(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with KubeClient.from_credentials(Credentials("https://e", None, None, None, *pair)):
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("broken", ["certificate", "key", "ca"])
async def test_what_cannot_be_loaded_is_bad_credentials(pair: tuple[str, str], broken: str) -> None:
    certificate, key = pair
    credentials = Credentials(
        "https://e",
        ca=PEM if broken == "ca" else None,
        client_certificate=PEM if broken == "certificate" else certificate,
        client_key=PEM if broken == "key" else key,
    )
    with pytest.raises(BadCredentials, match="cannot be loaded"):
        KubeClient.from_credentials(credentials)


async def test_a_token_needs_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    async with KubeClient.from_credentials(Credentials("https://e", token="t")) as client:
        assert client.server == "https://e"


def test_outside_of_a_cluster_there_is_no_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BadCredentials, match="not in a cluster"):
        KubeClient.in_cluster()
