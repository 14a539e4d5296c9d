"""OCI image archives written without a container engine: layers are tar files, an image is a list of them.

Enough of the OCI image layout for `ctr images import`, with Docker's own manifest beside it for `docker load` of any
age. Layers are reproducible: the same content gives the same digest, so an unchanged layer is not stored twice.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from e2e.datacenters.errors import DatacentersError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


class ArchiveError(DatacentersError, ValueError):
    """A file that is no image archive of ours."""


@dataclass(frozen=True)
class Layer:
    """An uncompressed tar file and its digest."""

    path: Path
    digest: str
    size: int

    @classmethod
    def of(cls, path: Path) -> Layer:
        """Read the file once for its digest."""
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return cls(path, digest, path.stat().st_size)


@dataclass(frozen=True)
class Image:
    """A name with its tag, layers from the bottom up, and what a container starts with."""

    name: str
    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    stop_signal: str = ""

    def config(self) -> bytes:
        """The image's configuration document."""
        process: dict[str, Any] = {
            "Env": [f"{key}={value}" for key, value in {"PATH": PATH, **self.environment}.items()],
            "WorkingDir": "/",
        }
        if self.entrypoint:
            process["Entrypoint"] = list(self.entrypoint)
        if self.command:
            process["Cmd"] = list(self.command)
        if self.user:
            process["User"] = self.user
        if self.stop_signal:
            process["StopSignal"] = self.stop_signal
        document = {
            "architecture": architecture(),
            "os": "linux",
            "config": process,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in self.layers]},
        }
        return json.dumps(document).encode()


def architecture() -> str:
    """The machine's architecture in the words of OCI."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


class LayerWriter:
    """A tar file with parents before children, root as owner and no times."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115  (closed by __exit__)
        self._folders: set[str] = set()

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def folder(self, name: str, mode: int = 0o755) -> None:
        """A folder, once."""
        parent, _, _ = name.rpartition("/")
        if parent:
            self.folder(parent)
        if name and name not in self._folders:
            self._folders.add(name)
            self._add(name, tarfile.DIRTYPE, mode)

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        self.folder(name.rpartition("/")[0])
        self._add(name, tarfile.SYMTYPE, 0o777, target=target)

    def data(self, name: str, content: bytes, mode: int = 0o644) -> None:
        """A file with the content."""
        self.folder(name.rpartition("/")[0])
        self._add(name, tarfile.REGTYPE, mode, io.BytesIO(content), len(content))

    def file(self, name: str, source: Path, mode: int | None = None) -> None:
        """A copy of a file; its own mode unless another is given."""
        self.folder(name.rpartition("/")[0])
        status = source.stat()
        with source.open("rb") as handle:
            self._add(name, tarfile.REGTYPE, mode or status.st_mode & 0o777, handle, status.st_size)

    def tree(self, name: str, source: Path, skip: Iterable[str] = ()) -> None:
        """A folder with everything in it, except entries of the names to skip."""
        self.folder(name)
        skipped = set(skip)
        for entry in sorted(source.iterdir()):
            inside = f"{name}/{entry.name}"
            if entry.name in skipped:
                continue
            if entry.is_symlink():
                self.link(inside, str(entry.readlink()))
            elif entry.is_dir():
                self.tree(inside, entry, skipped)
            else:
                self.file(inside, entry)

    def _add(self, name: str, kind: bytes, mode: int, content: Any = None, size: int = 0, *, target: str = "") -> None:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.size, info.linkname = kind, mode, size, target
        self._tar.addfile(info, content)


def write_archive(out: Path, images: Sequence[Image]) -> None:
    """One OCI archive that holds the images; layers that several share are in it once."""
    entries: list[dict[str, Any]] = []
    docker_entries: list[dict[str, Any]] = []
    blobs: dict[str, bytes | Path] = {}

    def put(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    for image in images:
        layers = [{"mediaType": LAYER, "digest": f"sha256:{x.digest}", "size": x.size} for x in image.layers]
        blobs.update({layer.digest: layer.path for layer in image.layers})
        config = {"mediaType": CONFIG, **put(image.config())}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
        entries.append(
            {
                "mediaType": MANIFEST,
                **put(json.dumps(manifest).encode()),
                "platform": {"architecture": architecture(), "os": "linux"},
                "annotations": {
                    "io.containerd.image.name": image.name,
                    "org.opencontainers.image.ref.name": image.name.rsplit(":", 1)[1],
                },
            }
        )
        docker_entries.append(
            {
                "Config": f"blobs/sha256/{config['digest'].removeprefix('sha256:')}",
                "RepoTags": [image.name],
                "Layers": [f"blobs/sha256/{layer.digest}" for layer in image.layers],
            }
        )
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    with LayerWriter(out) as archive:
        archive.data("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        archive.data("index.json", json.dumps(index).encode())
        archive.data("manifest.json", json.dumps(docker_entries).encode())
        for digest, blob in blobs.items():
            if isinstance(blob, Path):
                archive.file(f"blobs/sha256/{digest}", blob, 0o644)
            else:
                archive.data(f"blobs/sha256/{digest}", blob)


@dataclass(frozen=True)
class Held:
    """An image in an archive."""

    name: str
    digest: str
    """Of its manifest."""
    layers: tuple[str, ...]
    """Digests of its layers from the bottom up; ours are not compressed, so these are its diff ids too."""

    def layers_held(self, snapshots: Iterable[str]) -> set[str]:
        """Layers that a store with these snapshots has unpacked already. A snapshot is named by all layers up to it."""
        known, held, chain = set(snapshots), set(), ""
        for layer in self.layers:
            chain = f"sha256:{hashlib.sha256(f'{chain} {layer}'.encode()).hexdigest()}" if chain else layer
            if chain not in known:
                break
            held.add(layer)
        return held


def read_archive(archive: Path) -> list[Held]:
    """The images in an archive that `write_archive` made.

    :raises ArchiveError: not such an archive.
    """
    try:
        with tarfile.open(archive) as tar:

            def document(name: str) -> Any:
                entry = tar.extractfile(name)
                if entry is None:
                    raise KeyError(name)
                return json.load(entry)

            found = []
            for entry in document("index.json")["manifests"]:
                manifest = document(f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}")
                layers = tuple(layer["digest"] for layer in manifest["layers"])
                found.append(Held(entry["annotations"]["io.containerd.image.name"], entry["digest"], layers))
            return found
    except (tarfile.TarError, KeyError) as error:
        raise ArchiveError(
            f"{archive} is no OCI image archive with named images ({error}): see e2e/images.py"
        ) from error


def copy_archive(archive: Path, target: IO[bytes], without: Iterable[str]) -> None:
    """Copy an archive, leaving out layers by digest."""
    left_out = {f"blobs/sha256/{digest.removeprefix('sha256:')}" for digest in without}
    with tarfile.open(archive) as old, tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as new:
        for info in old:
            if info.name not in left_out:
                new.addfile(info, old.extractfile(info) if info.isreg() else None)
