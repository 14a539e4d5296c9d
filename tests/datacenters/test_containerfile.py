"""The Containerfile, built as a user builds it: only its base is made here instead of pulled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from e2e import images
from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.debian import debian_root
from e2e.datacenters.docker import Docker
from e2e.datacenters.oci import Image, Layer, write_archive

pytestmark = [pytest.mark.datacenters, pytest.mark.long]

REPOSITORY = Path(__file__).parents[2]
BASE, NAME = "localhost/prfaas-test-base:1", "localhost/prfaas-test:1"


def context(folder: Path) -> Path:
    """What the Containerfile takes of a checkout after `make wheels`."""
    for name in ("Containerfile", ".dockerignore"):
        shutil.copy(REPOSITORY / name, folder / name)
    shutil.copytree(REPOSITORY / "locks", folder / "locks")
    assert images.main(["--wheels", str(folder / "dist" / "wheels")]) == 0
    return folder


def test_it_builds_an_image_with_our_command_and_envoy(datacenters: Datacenters, tmp_path: Path) -> None:
    docker: Docker = datacenters._docker()
    base = tmp_path / "base.tar"
    root = debian_root("containerfile", ["python3", "python3-venv", "ca-certificates"])
    write_archive(base, [Image(BASE, (Layer.of(root),))])
    docker.run("load", "--input", str(base), timeout=300)
    build = tmp_path / "context"
    build.mkdir()
    context(build)
    try:
        arguments = ("--build-arg", f"BASE={BASE}", "--network", "none", "-f", str(build / "Containerfile"))
        docker.run("build", *arguments, "--tag", NAME, str(build), timeout=900)

        def inside(*command: str) -> str:
            return docker.run("run", "--rm", "--read-only", "--network", "none", NAME, *command).stdout

        assert inside("prfaas", "--help").startswith("usage: prfaas")
        assert "1.40.0" in inside("envoy", "--version")
        assert inside("id", "-u").strip() == "65532"
        assert inside().startswith("usage: prfaas")
    finally:
        docker.run("rmi", "--force", NAME, BASE, check=False)
        docker.run("image", "prune", "--force", check=False)
