"""The project's image: what is in it, and that a change of code is a change of its last layer only."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from e2e import images
from e2e.datacenters.debian import PackageError, debian_root
from e2e.datacenters.oci import LayerWriter, read_archive

NEEDS_3_11 = pytest.mark.skipif(images.HOST_PYTHON != "3.11", reason="this is another Python than the image's")


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small package in place of ours, and small lower layers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "prfaas"
    (package / "cli").mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    (package / "cli" / "main.py").write_text("def main(): return 0\n")
    monkeypatch.setattr(images, "PACKAGE", package)

    def layer(name: str) -> Path:
        target = tmp_path / f"{name}.tar"
        with LayerWriter(target) as writer:
            writer.data(f"lower/{name}", name.encode())
        return target

    monkeypatch.setattr(images, "debian_root", lambda *_: layer("base"))
    monkeypatch.setattr(images, "_wheels", lambda *_: layer("wheels"))
    # The lower layer here has no Python that could compile; any will do for what these tests look at.
    monkeypatch.setattr(images, "HOST_PYTHON", images.PYTHON)
    return package


def layer_names(archive: Path, digest: str) -> list[str]:
    with tarfile.open(archive) as tar:
        blob = tar.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
        assert blob is not None
        with tarfile.open(fileobj=io.BytesIO(blob.read())) as layer:
            return layer.getnames()


def test_the_top_layer_holds_our_code_compiled_and_our_command(code: Path) -> None:
    built = images.build(lambda _: None)
    (image,) = read_archive(built.archive)
    assert image.name == built.reference
    names = layer_names(built.archive, image.layers[-1])
    assert "usr/local/bin/prfaas" in names
    assert f"{images.SITE}/prfaas/cli/main.py" in names
    compiled = f"{images.SITE}/prfaas/cli/__pycache__/main.{sys.implementation.cache_tag}.pyc"
    assert compiled in names


@pytest.mark.datacenters
@pytest.mark.parametrize("host", ["3.12", pytest.param("3.11", marks=NEEDS_3_11)])
def test_bytecode_is_the_images_pythons_whatever_the_hosts(
    host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(images, "HOST_PYTHON", host)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("def f(): raise ValueError\n")
    (tree / "b.py").write_text("no python\n")
    images.compile_tree(tree, debian_root("python", images.BASE_PACKAGES))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tree"]
    (compiled,) = (tree / "__pycache__").iterdir()
    assert compiled.name == "a.cpython-311.pyc"
    data = compiled.read_bytes()
    assert data[4] == 0b01  # by hash, unchecked
    assert f"/{images.SITE}/a.py".encode() in data


def test_a_change_of_code_changes_the_last_layer_only(code: Path) -> None:
    (before,) = read_archive(images.build(lambda _: None).archive)
    (code / "__init__.py").write_text("x = 2\n")
    (after,) = read_archive(images.build(lambda _: None).archive)
    assert before.layers[:2] == after.layers[:2]
    assert before.layers[2] != after.layers[2]


def test_the_same_code_is_the_same_image_and_is_not_assembled_twice(code: Path) -> None:
    said: list[str] = []
    first = images.build(said.append)
    assert said != []
    said.clear()
    (code / "cli" / "__pycache__").mkdir()
    (code / "cli" / "__pycache__" / "main.cpython-311.pyc").write_bytes(b"left over")
    (code / "__init__.py").touch()
    assert images.build(said.append) == first
    assert said == []


def test_wheels_are_taken_by_hash_and_for_the_images_python(tmp_path: Path) -> None:
    command = images.install_command(tmp_path)
    assert "--require-hashes" in command
    assert "--only-binary=:all:" in command
    assert command[command.index("--python-version") + 1] == "3.11"
    assert command[-1] == str(images.LOCK)
    assert "--hash=sha256:" in images.LOCK.read_text()


def test_wheels_for_the_containerfile_are_the_images_and_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        asked.append(command)
        if command[3] == "wheel":
            source = Path(command[-1])
            assert (source / "pyproject.toml").read_text() == (images.ROOT / "pyproject.toml").read_text()
            assert (source / "operator" / "prfaas" / "cli" / "main.py").exists()
            assert not list(source.rglob("__pycache__"))
        else:
            Path(command[command.index("--dest") + 1]).mkdir(parents=True)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "old.whl").touch()
    images.wheels(tmp_path / "wheels", lambda _: None)
    assert list((tmp_path / "wheels").iterdir()) == []
    fetch, ours = asked
    installed = images.install_command(tmp_path)
    assert fetch[3] == "download"
    assert fetch[4 : fetch.index("--dest")] == installed[4 : installed.index("--target")]
    assert fetch[-1] == str(images.LOCK)
    assert "--no-build-isolation" in ours


def test_what_cannot_be_fetched_is_told_in_pips_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "LOCK", tmp_path / "no.txt")
    assert images.main(["--wheels", str(tmp_path / "wheels")]) == 1
    said = capsys.readouterr().err
    assert "error: " in said
    assert "no.txt" in said
    assert "Traceback" not in said
    assert not (tmp_path / "wheels").exists()


def test_an_image_that_cannot_be_made_is_one_error(
    code: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Path:
        raise PackageError("apt-get could not fetch python3:\nE: no network")

    monkeypatch.setattr(images, "debian_root", refuse)
    assert images.main([]) == 1
    assert capsys.readouterr().err.endswith("error: apt-get could not fetch python3:\nE: no network\n")
