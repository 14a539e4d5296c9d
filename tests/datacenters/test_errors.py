"""Whatever goes wrong is one class of error, and its message is for a person."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e import images
from e2e.datacenters import build, cluster, debian, docker, nodeimage, oci, topology
from e2e.datacenters.__main__ import main
from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.docker import Docker, DockerError
from e2e.datacenters.errors import DatacentersError, in_words


@pytest.mark.parametrize(
    "kind",
    [
        build.BuildError,
        cluster.DatacenterError,
        debian.PackageError,
        docker.DockerError,
        images.ImageError,
        nodeimage.NodeImageError,
        oci.ArchiveError,
        topology.TopologyError,
    ],
)
def test_one_class_catches_all(kind: type[Exception]) -> None:
    assert issubclass(kind, DatacentersError)


def test_a_failed_program_is_told_in_its_own_words() -> None:
    script = "import sys; sys.exit('no space left')"
    with pytest.raises(DatacentersError, match=r"-c import sys.* failed with status 1:\nno space left$"), in_words():
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    with pytest.raises(DatacentersError, match=r"^false failed with status 1$"), in_words():
        raise subprocess.CalledProcessError(1, "false")
    with pytest.raises(DatacentersError, match=r"^kubectl get nodes did not end in 300 s$"), in_words():
        raise subprocess.TimeoutExpired(["kubectl", "get", "nodes"], 300)


def test_what_the_system_refuses_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DatacentersError, match=r"absent: No such file or directory$"), in_words():
        (tmp_path / "absent").read_text()


def test_a_docker_that_hangs_is_an_error_of_docker(tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(DockerError, match=r"docker ps --all did not end in 0.1 s"):
        Docker(program, None, private=False, reason="").run("ps", "--all", timeout=0.1)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (RuntimeError("containerd did not start"), None),
        (nodeimage.NodeImageError("containerd did not start"), "error: containerd did not start\n"),
        (subprocess.TimeoutExpired("kind", 5), "error: kind did not end in 5 s\n"),
        (PermissionError(13, "Permission denied", "/x"), "error: /x: Permission denied\n"),
    ],
)
def test_the_command_ends_with_the_reason_and_hides_no_bug(
    failure: Exception, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Datacenters) -> None:
        raise failure

    monkeypatch.setattr(Datacenters, "down", fail)
    if said is None:
        with pytest.raises(RuntimeError):
            main(["down"])
    else:
        assert main(["down"]) == 1
        assert capsys.readouterr().err == said


def test_without_apt_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        debian.PackageError, match=r"`apt-get` is not on PATH: images are made of Debian packages.*mmdeb"
    ):
        debian.unpack_missing(["jq"], tmp_path)
