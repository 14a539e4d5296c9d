"""Programs built from the Go module in toolchain/: `tool("kubectl")` is a path, built when missing.

All come from one module with one set of flags, so that a package that several of them need compiles once. Kubernetes'
programs and etcd are links to one binary. kind, kubectl and helm are taken from PATH when their version fits.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import threading
from collections import deque
from pathlib import Path

from e2e.datacenters.cache import (
    TOOLCHAIN,
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

KUBE_PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubeadm",
    "kubectl",
    "kubelet",
)
"""Names under which the `kube` binary is one of the programs of Kubernetes."""

PACKAGES = {
    "kube": "./cmd/kube",
    "kind": "sigs.k8s.io/kind",
    "containerd": "github.com/containerd/containerd/v2/cmd/containerd",
    "containerd-shim-runc-v2": "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    "ctr": "github.com/containerd/containerd/v2/cmd/ctr",
    "coredns": "./cmd/coredns",
    "pause": "./cmd/pause",
    "crictl": "sigs.k8s.io/cri-tools/cmd/crictl",
    "helm": "helm.sh/helm/v4/cmd/helm",
}
"""Go package of every binary, in the order that a whole build takes."""

GO_SETTINGS = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
GO_TAGS = "no_btrfs no_zfs no_devmapper"
VERSION_ARGUMENTS = {
    "kind": ["version", "-q"],
    "kubectl": ["version", "--client"],
    "helm": ["version", "--short"],
}


class BuildError(DatacentersError):
    """A program could not be built; the message ends with the compiler's last lines."""


def tools_cache() -> Path:
    """The folder of the programs built from the toolchain, with the flags, as they are now."""
    flags = [word for name in PACKAGES for word in go_arguments(name, Path("out"))]
    return cache_root() / tree_hash([VERSIONS_FILE, TOOLCHAIN], *GO_SETTINGS.values(), *flags)


@in_words()
def tool(name: str, log: Log = say) -> Path:
    """Path of a program, built first if the cache lacks it (the first build of `kube` takes many minutes).

    :raises BuildError: Go is missing or the build failed.
    :raises KeyError: no such program.
    """
    if name in VERSION_ARGUMENTS and (found := from_path(name)):
        return found
    binary = "kube" if name in KUBE_PROGRAMS else name
    if binary not in PACKAGES:
        raise KeyError(f"no program {name!r} in the toolchain; there are {', '.join([*PACKAGES, *KUBE_PROGRAMS])}")
    target = used(tools_cache()) / "bin" / name
    if target.exists():
        return target
    with locked(tools_cache(), log):
        built = tools_cache() / "bin" / binary
        if not built.exists():
            compile_program(binary, built, log)
        if binary == "kube":
            for program in KUBE_PROGRAMS:
                link = built.parent / program
                if not link.is_symlink():
                    link.symlink_to("kube")
    return target


def build_all(log: Log = say) -> Path:
    """Build every program; the folder they are in."""
    for name in [*PACKAGES, "kubectl"]:
        tool(name, log)
    return tools_cache() / "bin"


def go_arguments(name: str, out: Path) -> list[str]:
    """Command line that builds one program. Flags differ between programs only in what the linker stamps."""
    stamp = f"-s -w {version_stamp(versions()['kubernetes']['version'])}" if name == "kube" else "-s -w"
    return ["go", "build", "-v", "-trimpath", "-tags", GO_TAGS, "-ldflags", stamp, "-o", str(out), PACKAGES[name]]


def version_stamp(version: str) -> str:
    """Linker flags for what `--version` of Kubernetes' programs says: kubeadm refuses a kubelet it cannot parse."""
    major, minor, _ = version.removeprefix("v").split(".")
    component = "k8s.io/component-base/version"
    values = {
        f"{component}.gitVersion": version,
        f"{component}.gitMajor": major,
        f"{component}.gitMinor": minor,
        f"{component}.gitTreeState": "clean",
        f"{component}.gitCommit": "0" * 40,
        f"{component}.buildDate": "2026-11-30T00:00:00Z",
        "k8s.io/client-go/pkg/version.gitVersion": version,
    }
    return " ".join(f"-X {key}={value}" for key, value in values.items())


def go_environment() -> dict[str, str]:
    """Environment of a Go build: static binaries, go.sum as it is, and nothing of this checkout's commit in them."""
    return os.environ | GO_SETTINGS


def compile_program(name: str, target: Path, log: Log) -> None:
    """Run the compiler with its progress on the terminal. Compiled packages stay in Go's cache if it is stopped."""
    if not shutil.which("go"):
        raise BuildError("`go` is not on PATH; install Go 1.26 or newer (https://go.dev/dl)")
    total = package_count(name)
    last_lines: deque[str] = deque(maxlen=25)
    compiled = 0
    with atomically(target) as partial:
        process = subprocess.Popen(
            ["nice", "-n", "5", *go_arguments(name, partial)],
            cwd=TOOLCHAIN,
            env=go_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None

        def read() -> None:
            nonlocal compiled
            for line in process.stderr or ():
                last_lines.append(line)
                compiled += not line.startswith("go: ")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            with progress(f"building {name}", lambda: f"{compiled} of at most {total} packages compiled", log):
                status = process.wait()
                reader.join()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if status != 0:
            raise BuildError(f"building {name} failed with status {status}:\n{''.join(last_lines)}")


def package_count(name: str) -> int:
    """How many packages a program consists of (downloads modules that are missing)."""
    listed = subprocess.run(
        ["go", "list", "-deps", "-tags", GO_TAGS, PACKAGES[name]],
        cwd=TOOLCHAIN,
        env=go_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        raise BuildError(f"the modules of {name} could not be loaded:\n{listed.stderr[-2000:]}")
    return len(listed.stdout.split())


@functools.cache
def from_path(name: str) -> Path | None:
    """A program on PATH whose version the versions file accepts, else None."""
    found = shutil.which(name)
    if not found:
        return None
    try:
        answer = subprocess.run(
            [found, *VERSION_ARGUMENTS[name]], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lowest, beyond = versions()["accepted"][name]
    return Path(found) if fits(answer.stdout, lowest, beyond) else None


def fits(version_output: str, lowest: str, beyond: str) -> bool:
    """Whether the first version named in a program's output is in [lowest, beyond)."""
    found = re.search(r"\bv?(\d+\.\d+\.\d+)", version_output)
    return found is not None and number(lowest) <= number(found[1]) < number(beyond)


def number(version: str) -> tuple[int, ...]:
    """`"1.36.0"` -> (1, 36, 0)."""
    return tuple(map(int, version.split(".")))
