"""The Containerfile, built as a user builds it: only its base is made here instead of pulled."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.debian import debian_root
from e2e.datacenters.docker import Docker
from e2e.datacenters.oci import Image, Layer, write_archive

pytestmark = [pytest.mark.datacenters, pytest.mark.long]

REPOSITORY = Path(__file__).parents[2]
BASE, NAME = "localhost/prfaas-test-base:1", "localhost/prfaas-test:1"


def context(folder: Path) -> Path:
    """What the Containerfile needs of the checkout, with the wheels fetched by the commands that it names."""
    for name in ("Containerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / name)
    for name in ("locks", "operator"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    commands = [
        line.removeprefix("#   python -m ").split()
        for line in (folder / "Containerfile").read_text().splitlines()
        if line.startswith("#   python -m ")
    ]
    assert [command[:2] for command in commands] == [["pip", "download"], ["pip", "wheel"]]
    for command in commands:
        subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True, capture_output=True)
    return folder


def test_it_builds_an_image_with_our_command_and_envoy(datacenters: Datacenters, tmp_path: Path) -> None:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("wheels are fetched for the Python that runs this, and Debian 12's base has 3.11")
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
