"""Debian packages without installing any: unpacked beside each other into the cache, and run from there.

Only packages that the machine lacks are fetched (apt computes which), so nothing on it changes. It takes apt's
configured sources as they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.datacenters.cache import (
    VERSIONS_FILE,
    Log,
    atomically,
    cache_root,
    locked,
    progress,
    say,
    tree_hash,
    used,
    versions,
)
from e2e.datacenters.errors import DatacentersError, in_words

HOST_PACKAGES = ("docker.io", "runc", "iptables", "iproute2", "mmdebstrap")
"""What the private Docker daemon and the building of root file systems need on the machine itself."""


class PackageError(DatacentersError):
    """Debian packages could not be fetched; the message ends with apt's own last lines."""


def packages_cache() -> Path:
    """The folder of what was made of Debian packages, as it is made now."""
    return used(cache_root() / f"debian-{tree_hash([VERSIONS_FILE, Path(__file__)])}")


@in_words()
def host_packages(log: Log = say) -> Path:
    """Folder that holds the unpacked files of HOST_PACKAGES and of what they depend on and the machine lacks."""
    target = packages_cache() / "host"
    if not target.exists():
        with locked(target.parent, log):
            if not target.exists():
                with atomically(target) as partial, progress("fetching Debian packages", log=log):
                    unpack_missing(HOST_PACKAGES, partial)
    return target


def unpack_missing(packages: Sequence[str], folder: Path) -> None:
    """Fetch the packages, and what they need, that the machine lacks; unpack them into the folder."""
    if not shutil.which("apt-get"):
        raise PackageError(
            "`apt-get` is not on PATH: images are made of Debian packages, by apt-get and the mmdebstrap that it "
            "fetches, whatever Docker runs them: use Debian 12"
        )
    archives = folder / "var" / "archives"
    (archives / "partial").mkdir(parents=True)
    download = [
        *("apt-get", "install", "--yes", "--download-only", "--no-install-recommends"),
        *("-o", f"Dir::Cache::Archives={archives}", "-o", "APT::Sandbox::User=root"),
        *packages,
    ]
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    result = subprocess.run(download, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:  # a fresh machine has no package lists, an old one has lists of versions that are gone
        subprocess.run(["apt-get", "update", "-q"], env=environment, capture_output=True, check=False)
        result = subprocess.run(download, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PackageError(f"apt-get could not fetch {', '.join(packages)}:\n{result.stderr[-2000:]}")
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
    shutil.rmtree(archives)
    for name in ("iptables", "ip6tables"):  # links that the package's own installation would have made
        binary = folder / "usr/sbin/xtables-nft-multi"
        if binary.exists():
            (folder / "usr/sbin" / name).symlink_to(binary.name)
            for suffix in ("save", "restore"):
                (folder / "usr/sbin" / f"{name}-{suffix}").symlink_to(binary.name)


def host_environment(folder: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment in which the unpacked programs find each other, their libraries and Perl modules."""
    environment = dict(os.environ if base is None else base)
    # Debian's packages put some files in /bin, /sbin and /lib, which on an installed system are links into /usr.
    libraries = [p for pattern in ("usr/lib/*-linux-gnu", "lib/*-linux-gnu") for p in folder.glob(pattern)]
    perl = [
        p for pattern in ("usr/share/perl5", "usr/share/perl/5*", "usr/lib/*/perl*/5*") for p in folder.glob(pattern)
    ]
    extensions = [p / "xtables" for p in libraries if (p / "xtables").is_dir()]
    standard = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    path = [*(str(folder / name) for name in ("usr/sbin", "usr/bin", "sbin", "bin")), *standard]
    environment["PATH"] = ":".join(dict.fromkeys([*path, *environment.get("PATH", "").split(":")]))
    for variable, values in (("LD_LIBRARY_PATH", libraries), ("PERL5LIB", perl), ("XTABLES_LIBDIR", extensions)):
        if values:
            environment[variable] = ":".join(map(str, values))
    return environment


@in_words()
def debian_root(name: str, packages: Sequence[str], log: Log = say) -> Path:
    """Tar archive of a minimal Debian root with the packages, cached by the name and what goes in (about a minute)."""
    target = packages_cache() / f"{name}-{name_hash(packages)}.tar"
    if target.exists():
        return target
    host = host_packages(log)
    excluded = (
        "/usr/share/man/*",
        "/usr/share/doc/*",
        "/usr/share/locale/*",
        "/usr/share/info/*",
        "/usr/share/lintian/*",
    )
    with locked(target.parent, log):
        if target.exists():
            return target
        with atomically(target) as partial, progress(f"making a Debian root for {name}", log=log):
            command = [
                *("mmdebstrap", "--mode=root", "--variant=minbase", "--format=tar", f"--include={','.join(packages)}"),
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in excluded),
                *(versions()["debian"]["suite"], str(partial)),
            ]
            result = subprocess.run(command, env=host_environment(host), capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise PackageError(f"mmdebstrap failed for {name}:\n{result.stderr[-2000:]}")
    return target


def name_hash(packages: Sequence[str]) -> str:
    """Short stable name of a list of packages."""
    return hashlib.sha256("\n".join(packages).encode()).hexdigest()[:8]
