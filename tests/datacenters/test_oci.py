"""Image archives: reproducible, readable by containerd and Docker, and sent without layers that are held already."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from e2e.datacenters.oci import Image, Layer, LayerWriter, copy_archive, read_archive, write_archive


def layer(path: Path, content: str) -> Layer:
    with LayerWriter(path) as writer:
        writer.data("opt/app/file", content.encode())
    return Layer.of(path)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    layers = tuple(layer(tmp_path / f"{n}.tar", n) for n in ("base", "wheels", "code"))
    out = tmp_path / "image.tar"
    write_archive(out, [Image("localhost/a:1", layers, command=("a",), user="65532:65532", stop_signal="SIGTERM")])
    return out


def blob(archive: Path, digest: str) -> bytes:
    with tarfile.open(archive) as tar:
        entry = tar.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
        assert entry is not None
        return entry.read()


def test_every_blob_is_what_its_name_says(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        blobs = [name for name in tar.getnames() if name.startswith("blobs/sha256/") and len(name) > 20]
    assert len(blobs) == 5  # three layers, configuration, manifest
    for name in blobs:
        digest = name.rpartition("/")[2]
        assert hashlib.sha256(blob(archive, digest)).hexdigest() == digest


def test_docker_and_containerd_are_told_the_same(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        docker = json.load(tar.extractfile("manifest.json") or io.BytesIO())
        index = json.load(tar.extractfile("index.json") or io.BytesIO())
    manifest = json.loads(blob(archive, index["manifests"][0]["digest"]))
    assert docker[0]["RepoTags"] == ["localhost/a:1"]
    assert docker[0]["Layers"] == [f"blobs/sha256/{x['digest'].removeprefix('sha256:')}" for x in manifest["layers"]]
    assert docker[0]["Config"].endswith(manifest["config"]["digest"].removeprefix("sha256:"))
    config = json.loads(blob(archive, manifest["config"]["digest"]))
    assert config["config"]["Cmd"] == ["a"]
    assert config["config"]["User"] == "65532:65532"
    assert config["config"]["StopSignal"] == "SIGTERM"
    assert config["rootfs"]["diff_ids"] == [x["digest"] for x in manifest["layers"]]


def test_the_same_content_is_the_same_image(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    layers = tuple(layer(other / f"{n}.tar", n) for n in ("base", "wheels", "code"))
    write_archive(
        other / "image.tar",
        [Image("localhost/a:1", layers, command=("a",), user="65532:65532", stop_signal="SIGTERM")],
    )
    assert read_archive(other / "image.tar") == read_archive(archive)


def test_layers_that_a_node_has_unpacked_are_held_up_to_the_first_that_it_lacks(archive: Path) -> None:
    (image,) = read_archive(archive)
    base, wheels, code = image.layers
    second = f"sha256:{hashlib.sha256(f'{base} {wheels}'.encode()).hexdigest()}"
    third = f"sha256:{hashlib.sha256(f'{second} {code}'.encode()).hexdigest()}"
    assert image.layers_held([]) == set()
    assert image.layers_held([base]) == {base}
    assert image.layers_held([base, second]) == {base, wheels}
    assert image.layers_held([second, third]) == set()  # a layer is of use only on those below it
    assert image.layers_held([base, second, third]) == {base, wheels, code}


def test_a_copy_leaves_out_only_what_it_should(archive: Path, tmp_path: Path) -> None:
    (image,) = read_archive(archive)
    out = tmp_path / "top.tar"
    with out.open("wb") as target:
        copy_archive(archive, target, without=image.layers[:2])
    with tarfile.open(archive) as old, tarfile.open(out) as new:
        gone = {f"blobs/sha256/{digest.removeprefix('sha256:')}" for digest in image.layers[:2]}
        assert set(old.getnames()) - set(new.getnames()) == gone
    assert blob(out, image.layers[2]) == blob(archive, image.layers[2])


def test_a_tree_keeps_links_and_modes_and_makes_parents(tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "run").write_text("#!/bin/sh\n")
    (source / "bin" / "run").chmod(0o755)
    (source / "go").symlink_to("bin/run")
    (source / "__pycache__").mkdir()
    out = tmp_path / "layer.tar"
    with LayerWriter(out) as writer:
        writer.tree("usr/share/x", source, skip=["__pycache__"])
    with tarfile.open(out) as tar:
        names = tar.getnames()
        assert names == ["usr", "usr/share", "usr/share/x", "usr/share/x/bin", "usr/share/x/bin/run", "usr/share/x/go"]
        assert tar.getmember("usr/share/x/bin/run").mode == 0o755
        assert tar.getmember("usr/share/x/go").linkname == "bin/run"
        assert {(m.uid, m.gid, m.mtime) for m in tar} == {(0, 0, 0)}


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not an archive")
    with pytest.raises(ValueError, match=r"text is no OCI image archive"):
        read_archive(tmp_path / "text")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(ValueError, match=r"empty.tar is no OCI image archive with named images"):
        read_archive(tmp_path / "empty.tar")
