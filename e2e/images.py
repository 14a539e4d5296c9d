"""The project's own image, assembled without a container engine: Debian's Python, the locked wheels, our code.

Three layers, from what changes least to what changes most: a change of the code rewrites the last one only, and loads
into the nodes in seconds. `Containerfile` makes the same image where a registry is reachable.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.datacenters import debian, oci
from e2e.datacenters.cache import (
    VERSIONS_FILE,
    Log,
    atomically,
    cache_root,
    locked,
    progress,
    remove,
    say,
    tree_hash,
    used,
)
from e2e.datacenters.debian import debian_root
from e2e.datacenters.errors import DatacentersError, in_words
from e2e.datacenters.oci import Image, Layer, LayerWriter, write_archive

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "locks" / "runtime.txt"
PACKAGE = ROOT / "operator" / "prfaas"
SAMPLES_REFERENCE = "localhost/prfaas:dev"
"""What the demo's samples call the image. The real tag is a hash of the content, so that new code means new pods."""
PYTHON = "3.11"
"""Debian 12's Python."""
BASE_PACKAGES = ("python3", "ca-certificates")
HOST_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
"""On the path of Debian's Python without further settings."""
PLATFORMS = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 37)))
"""Wheels that Debian 12's C library (2.36) can load."""
USER = "65532:65532"
_SCRIPT = b"#!/usr/bin/python3 -I\nimport sys\n\nfrom prfaas.cli.main import main\n\nsys.exit(main())\n"


class ImageError(DatacentersError):
    """The image could not be assembled; the message ends with what the failed program printed."""


@dataclass(frozen=True)
class Built:
    """An image archive (OCI, and Docker's form beside it) and the name in it."""

    reference: str
    archive: Path


@in_words()
def build(log: Log = say) -> Built:
    """Assemble what is missing; nothing is done again for content that was assembled before.

    Raises ImageError: the wheels could not be fetched.
    """
    folder = cache_root() / "image"
    with locked(folder, log):
        staging = _stage(folder)
        content = tree_hash([staging], _recipe())
        built = Built(f"{SAMPLES_REFERENCE.partition(':')[0]}:{content}", folder / f"prfaas-{content}.tar")
        if used(built.archive).exists():
            return built
        base = debian_root("python", BASE_PACKAGES, log)
        wheels = _wheels(folder, base, log)
        with progress("assembling the image", log=log):
            code = folder / "code.tar"
            _write_code(staging, code, base)
            with atomically(built.archive) as partial:
                layers = tuple(Layer.of(layer) for layer in (base, wheels, code))
                write_archive(partial, [Image(built.reference, layers, command=("prfaas", "--help"), user=USER)])
            for pattern, kept in (("prfaas-*.tar", 3), ("wheels-*.tar", 2)):  # of other checkouts, or to go back to
                forget_all_but(kept, folder.glob(pattern))
    return built


def _wheels(folder: Path, base: Path, log: Log) -> Path:
    """The layer with the locked wheels and Envoy's program on PATH."""
    target = folder / f"wheels-{_recipe()}.tar"
    if used(target).exists():
        return target
    site = folder / "site"
    remove(site)
    with progress("installing the locked wheels for the image", log=log), atomically(target) as partial:
        done = subprocess.run(install_command(site), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ImageError(f"pip could not install {LOCK.name}: {done.stderr.strip()[-2000:]}")
        compile_tree(site, base)
        with LayerWriter(partial) as layer:
            layer.tree(SITE, site, skip=("bin", "tests", "test"))
            layer.link("usr/local/bin/envoy", f"/{SITE}/envoy/_bin/envoy")
        remove(site)
    return target


def _recipe() -> str:
    """Hash of what the layers below our code are made of, and how."""
    made_by = [Path(__file__), *(Path(module.__file__ or "") for module in (debian, oci))]
    return tree_hash([LOCK, VERSIONS_FILE, *made_by])


def install_command(site: Path) -> list[str]:
    """pip's arguments: wheels for the image's Python, whatever the Python that runs this; every one by its hash."""
    return [*_pip("install"), "--target", str(site), "--requirement", str(LOCK)]


def download_command(folder: Path) -> list[str]:
    """pip's arguments that fetch the same wheels as files."""
    return [*_pip("download"), "--dest", str(folder), "--requirement", str(LOCK)]


def _pip(verb: str) -> list[str]:
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    return [
        *(sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--require-hashes", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms),
    ]


def forget_all_but(kept: int, files: Iterable[Path]) -> None:
    """Remove all but the files that were used last."""
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[kept:]:
        file.unlink()


@in_words()
def wheels(folder: Path, log: Log = say) -> None:
    """Everything that Containerfile installs, as wheels: the locked ones by hash, and ours. Replaces the folder.

    Raises DatacentersError: a wheel could not be fetched or built.
    """
    with (
        progress(f"fetching wheels into {folder}", log=log),
        atomically(folder.absolute()) as partial,
        tempfile.TemporaryDirectory() as source,
    ):
        subprocess.run(download_command(partial), capture_output=True, text=True, check=True)
        # From a copy: setuptools would leave folders in the checkout, and take old modules from them the next time.
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(PACKAGE.parent, Path(source, PACKAGE.parent.name), ignore=ignored)
        ours = [*(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps")]
        ours += ["--no-build-isolation", "--wheel-dir", str(partial), source]
        subprocess.run(ours, capture_output=True, text=True, check=True)


def compile_tree(folder: Path, base: Path) -> None:
    """Bytecode beside every module: a container's root is read-only, so it could never write its own.

    Hashes, not times, since layers have no times; unchecked, since the files of an image do not change. Done by this
    Python where it is of the image's version, else by the image's own, in its root file system (`base`).
    """
    if HOST_PYTHON == PYTHON:
        subprocess.run([sys.executable, *_compileall(folder)], check=False)
        return
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="root.") as root:
        subprocess.run(["tar", "-xpf", base, "-C", root, "--exclude=./dev/*"], capture_output=True, check=True)
        within = Path(root, "tree")
        folder.rename(within)
        try:
            command = ["chroot", root, "/usr/bin/python3", *_compileall(Path("/tree"))]
            subprocess.run(command, check=False)
        finally:
            within.rename(folder)


def _compileall(folder: Path) -> list[str]:
    """Python's arguments. Modules that are no Python of this version (there are some among tests) are passed over."""
    paths = ["-s", str(folder), "-p", f"/{SITE}", str(folder)]
    return ["-m", "compileall", "-qq", "--invalidation-mode", "unchecked-hash", *paths]


def _stage(folder: Path) -> Path:
    """A copy of our package without what running it has left there."""
    staging = folder / "code"
    remove(staging)
    shutil.copytree(PACKAGE, staging / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return staging


def _write_code(staging: Path, target: Path, base: Path) -> None:
    """The layer with our code and the `prfaas` command."""
    compile_tree(staging, base)
    with LayerWriter(target) as layer:
        layer.tree(SITE, staging)
        layer.data("usr/local/bin/prfaas", _SCRIPT, 0o755)


def main(arguments: Sequence[str] | None = None) -> int:
    """Assemble the image and say where it is, or fetch its wheels. Exit status 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m e2e.images", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="only what Containerfile installs, into FOLDER")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.wheels:
            wheels(parsed.wheels)
            return 0
        built = build()
    except DatacentersError as error:
        say(f"error: {error}")
        return 1
    say(f"{built.reference} in {built.archive}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
