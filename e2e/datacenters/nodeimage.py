"""The node image, built from Go modules and Debian packages where `kindest/node` cannot be pulled.

A Debian root, the files of kind's own base image (from the kind module on disk), our Go binaries, and an image store
already filled with what kubeadm asks for, so that no node ever pulls. The result is an image archive.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e.datacenters.build import go_environment, tool, tools_cache
from e2e.datacenters.cache import (
    HERE,
    NODE_FILES,
    TOOLCHAIN,
    Log,
    atomically,
    cache_root,
    locked,
    progress,
    remove,
    say,
    tree_hash,
    used,
    versions,
)
from e2e.datacenters.debian import debian_root, packages_cache
from e2e.datacenters.errors import DatacentersError, in_words
from e2e.datacenters.oci import Image, Layer, LayerWriter, write_archive

NODE_PACKAGES = (
    *("systemd", "systemd-sysv", "util-linux", "mount", "kmod", "procps", "hostname", "bash", "ca-certificates"),
    *("iptables", "nftables", "conntrack", "iproute2", "ethtool", "socat", "curl", "jq", "pigz"),
    *("runc", "libseccomp2", "containernetworking-plugins"),
)
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "etcd")
UNITS_STARTED = ("containerd", "kubelet", "undo-mount-hacks")


class NodeImageError(DatacentersError):
    """The node image could not be built; the message ends with what the failed program printed."""


def image_hash() -> str:
    """Hash of everything that goes into the node image."""
    return tree_hash([NODE_FILES, HERE / "oci.py", Path(__file__)], tools_cache().name, packages_cache().name)


def image_name() -> str:
    """Name under which Docker knows the node image."""
    return f"localhost/prfaas-node:{image_hash()}"


@in_words()
def node_archive(log: Log = say) -> Path:
    """The node image as an archive, built when missing (a minute on top of the programs' own builds)."""
    target = used(cache_root() / f"node-{image_hash()}") / "image.tar"
    if target.exists():
        return target
    for name in ("kube", "containerd", "containerd-shim-runc-v2", "ctr", "crictl", "coredns", "pause"):
        tool(name, log)
    base = debian_root("node", NODE_PACKAGES, log)
    with locked(target.parent, log):
        if target.exists():
            return target
        for left_over in target.parent.glob("work.*"):
            remove(left_over)
        with (
            progress("assembling the node image", log=log),
            tempfile.TemporaryDirectory(dir=target.parent, prefix="work.") as work,
            atomically(target) as partial,
        ):
            root, layer = Path(work) / "root", Path(work) / "layer.tar"
            root.mkdir()
            subprocess.run(["tar", "-xpf", base, "-C", root, "--exclude=./dev/*"], check=True)
            assemble(root)
            fill_image_store(root, Path(work))
            subprocess.run(["tar", "-cf", layer, "-C", root, "."], check=True)
            write_archive(partial, [node_image(layer)])
    return target


def node_image(layer: Path) -> Image:
    """What kind's own image says of how a node starts and stops."""
    return Image(
        image_name(),
        (Layer.of(layer),),
        entrypoint=("/usr/local/bin/entrypoint", "/sbin/init"),
        environment={"container": "docker"},
        stop_signal="SIGRTMIN+3",
    )


def assemble(root: Path) -> None:
    """Turn a Debian root into a kind node: kind's files, our programs, and only the units that a node starts."""
    kind_files = kind_module() / "images/base/files"
    copy_files(kind_files, root)
    for script in ("usr/local/bin/entrypoint", "usr/local/bin/clean-install", "kind/bin/mount-product-files.sh"):
        (root / script).chmod(0o755)
    units = root / "etc/systemd/system"
    for pattern in (
        "lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
        "lib/systemd/system/multi-user.target.wants/*",
        "lib/systemd/system/local-fs.target.wants/*",
        "lib/systemd/system/basic.target.wants/*",
        "lib/systemd/system/sockets.target.wants/*udev*",
        "lib/systemd/system/sockets.target.wants/*initctl*",
        "etc/systemd/system/*.wants/*",
    ):
        for unit in root.glob(pattern):
            remove(unit)
    wanted = units / "multi-user.target.wants"
    for folder in (wanted, root / "etc/kubernetes/manifests", root / "kind/manifests", root / "opt/cni"):
        folder.mkdir(parents=True, exist_ok=True)
    for unit_name in UNITS_STARTED:
        (wanted / f"{unit_name}.service").symlink_to(f"/etc/systemd/system/{unit_name}.service")
    remove(units / "systemd-binfmt.service")
    (units / "systemd-binfmt.service").symlink_to("/dev/null")
    with (root / "etc/systemd/journald.conf").open("a") as journald:
        journald.write("ReadKMsg=no\n")

    install(tool("kube"), root / "usr/bin/kube")
    for name in ("kubelet", "kubeadm", "kubectl"):
        (root / "usr/bin" / name).symlink_to("kube")
    for name in ("containerd", "ctr", "containerd-shim-runc-v2", "crictl"):
        install(tool(name), root / "usr/local/bin" / name)
    remove(root / "opt/cni/bin")
    (root / "opt/cni/bin").symlink_to("/usr/lib/cni")

    kubernetes = versions()["kubernetes"]
    (root / "kind/version").write_text(kubernetes["version"])
    shutil.copy(NODE_FILES / "storage.yaml", root / "kind/manifests/default-storage.yaml")
    settings = root / "etc/containerd/config.toml"
    settings.write_text(
        re.sub(
            r"registry\.k8s\.io/pause:[\w.]+", f"registry.k8s.io/pause:{kubernetes['pause_tag']}", settings.read_text()
        )
    )
    (root / "etc/containerd/cri-base.json").write_text(json.dumps(base_runtime_spec()))


def kind_module() -> Path:
    """Folder of the kind module that the toolchain is built from."""
    command = ["go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kind"]
    listed = subprocess.run(command, cwd=TOOLCHAIN, env=go_environment(), capture_output=True, text=True, check=True)
    if not listed.stdout.strip():  # in go.sum, but not unpacked on this machine
        download = ["go", "mod", "download", "sigs.k8s.io/kind"]
        subprocess.run(download, cwd=TOOLCHAIN, env=go_environment(), check=True, capture_output=True)
        listed = subprocess.run(
            command, cwd=TOOLCHAIN, env=go_environment(), capture_output=True, text=True, check=True
        )
    return Path(listed.stdout.strip())


def copy_files(source: Path, root: Path) -> None:
    """Copy kind's files; the module cache is read-only, the node's root must not be."""
    for file in source.rglob("*"):
        if file.is_file():
            target = root / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            remove(target)
            shutil.copyfile(file, target)


def install(program: Path, target: Path) -> None:
    """Copy a program and make it executable."""
    shutil.copyfile(program, target)
    target.chmod(0o755)


def base_runtime_spec() -> dict[str, Any]:
    """What every container of a node starts from: containerd's default, kind's hook, no limits of its own."""
    printed = subprocess.run([tool("ctr"), "oci", "spec"], capture_output=True, check=True).stdout
    spec: dict[str, Any] = json.loads(printed)
    hooks = spec.setdefault("hooks", {}).setdefault("createContainer", [])
    hooks.append({"path": "/kind/bin/mount-product-files.sh"})
    spec["process"].pop("rlimits", None)
    return spec


def control_plane_images(root: Path, work: Path) -> list[Image]:
    """The images that kubeadm asks for; those of Kubernetes share one layer with one binary."""
    registry = "registry.k8s.io"
    kubernetes = versions()["kubernetes"]
    version = kubernetes["version"]

    def base(layer: LayerWriter) -> None:
        layer.folder("tmp", 0o1777)
        layer.folder("run")
        layer.link("var/run", "/run")
        layer.data("etc/passwd", b"root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:n:/:/sbin/nologin\n")
        layer.data("etc/group", b"root:x:0:\nnogroup:x:65534:\n")
        layer.data("etc/nsswitch.conf", b"hosts: files dns\n")

    with LayerWriter(work / "kube.tar") as layer:
        base(layer)
        layer.file("usr/local/bin/kube", tool("kube"), 0o755)
        for name in CONTROL_PLANE:
            layer.link(f"usr/local/bin/{name}", "kube")
    with LayerWriter(work / "nft.tar") as layer:
        for name in programs_with_libraries(root, ("/usr/sbin/nft", "/usr/sbin/conntrack", "/usr/bin/kmod")):
            layer.file(name.lstrip("/"), inside(root, name), 0o755)
        layer.link("usr/sbin/modprobe", "/usr/bin/kmod")
    with LayerWriter(work / "coredns.tar") as layer:
        base(layer)
        layer.file("coredns", tool("coredns"), 0o755)
    with LayerWriter(work / "pause.tar") as layer:
        layer.file("pause", tool("pause"), 0o755)
    kube, nft, coredns, pause = (Layer.of(work / f"{n}.tar") for n in ("kube", "nft", "coredns", "pause"))
    images = [
        Image(
            f"{registry}/{name}:{version}",
            (kube, nft) if name == "kube-proxy" else (kube,),
            (f"/usr/local/bin/{name}",),
        )
        for name in CONTROL_PLANE
        if name != "etcd"
    ]
    images.append(Image(f"{registry}/etcd:{kubernetes['etcd_tag']}", (kube,), ("/usr/local/bin/etcd",)))
    images.append(Image(f"{registry}/coredns/coredns:{kubernetes['coredns_tag']}", (coredns,), ("/coredns",)))
    images.append(Image(f"{registry}/pause:{kubernetes['pause_tag']}", (pause,), ("/pause",)))
    return images


def programs_with_libraries(root: Path, programs: Sequence[str]) -> list[str]:
    """The programs and every library they load, as paths inside the root."""
    found: dict[str, None] = {}
    for program in programs:
        found[program] = None
        loaded = subprocess.run(["chroot", root, "ldd", program], capture_output=True, text=True, check=True).stdout
        found.update(dict.fromkeys(word for word in loaded.split() if word.startswith("/")))
    return list(found)


def inside(root: Path, name: str) -> Path:
    """The file that a path means inside the root, links followed there."""
    real = subprocess.run(["chroot", root, "readlink", "-f", name], capture_output=True, text=True, check=True).stdout
    return root / real.strip().lstrip("/")


def fill_image_store(root: Path, work: Path) -> None:
    """Write the control plane's images into the root's own containerd store, by a throw-away containerd."""
    archive = work / "images.tar"
    write_archive(archive, control_plane_images(root, work))
    store, run = root / "var/lib/containerd", work / "run"
    store.mkdir(parents=True, exist_ok=True)
    run.mkdir()
    socket = run / "containerd.sock"
    kubernetes_plugins = [
        f"io.containerd.{name}" for name in ("grpc.v1.cri", "cri.v1.images", "cri.v1.runtime", "nri.v1.nri")
    ]
    settings = work / "containerd.toml"
    settings.write_text(
        f'version = 3\nroot = "{store}"\nstate = "{run}/state"\ndisabled_plugins = {json.dumps(kubernetes_plugins)}\n'
        f'[grpc]\n  address = "{socket}"\n[ttrpc]\n  address = "{socket}.ttrpc"\n'
    )
    ctr = [str(tool("ctr")), "--address", str(socket), "--namespace", "k8s.io"]
    with (work / "containerd.log").open("w") as output:
        daemon = subprocess.Popen([tool("containerd"), "--config", settings], stdout=output, stderr=output)
        try:
            wait_for_socket(ctr, daemon, work / "containerd.log")
            options = ["--local", "--discard-unpacked-layers", "--snapshotter=overlayfs"]
            imported = subprocess.run(
                [*ctr, "images", "import", *options, str(archive)], capture_output=True, text=True, check=False
            )
            if imported.returncode != 0:
                raise NodeImageError(f"the node's image store could not be filled:\n{imported.stderr[-2000:]}")
            # Layers are unpacked: drop the packed copies now, not when a collector would have come by.
            subprocess.run([*ctr, "content", "prune", "references"], capture_output=True, check=True)
        finally:
            daemon.terminate()
            daemon.wait(timeout=30)
    os.sync()


def wait_for_socket(ctr: Sequence[str], daemon: subprocess.Popen[bytes], log_file: Path) -> None:
    """Wait until the throw-away containerd answers (it takes about a second)."""
    deadline = time.monotonic() + 60
    while subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise NodeImageError(f"containerd did not start:\n{log_file.read_text()[-2000:]}")
        time.sleep(0.2)
