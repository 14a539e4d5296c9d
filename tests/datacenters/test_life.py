"""A small datacenter through its life: up, up again, everything killed, healed, killed, down, interrupted.

It has folders and a network namespace of its own, so whatever else is up on this machine stays untouched.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.datacenters.build import tool, tools_cache
from e2e.datacenters.cache import cache_root
from e2e.datacenters.debian import host_environment, host_packages
from e2e.datacenters.docker import SYSCTLS, PrivateDaemon, read_sysctl
from e2e.datacenters.nodeimage import node_archive

pytestmark = pytest.mark.datacenters

REPOSITORY = Path(__file__).parents[2]
SOLO = "datacenters: [{name: solo, nodes: [{accelerator: H20, machines: 1, gpusPerMachine: 4}]}]"


@dataclass(frozen=True)
class Machine:
    """A machine as far as the datacenters can tell: folders and a network of its own."""

    folder: Path
    network: Path

    @property
    def state(self) -> Path:
        return self.folder / "state" / "prfaas"

    def command(self, *arguments: str) -> list[str]:
        return ["nsenter", f"--net={self.network}", "--", *arguments]

    def environment(self) -> dict[str, str]:
        own = {"XDG_STATE_HOME": str(self.folder / "state"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        own["DOCKER_HOST"] = f"unix://{self.folder}/absent.sock"  # the user's daemon, if there is one, is not here
        return {**host_environment(host_packages()), **own}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`python -m e2e.datacenters` in a process group of its own, as a terminal would start it."""
        return subprocess.Popen(
            self.command(sys.executable, "-m", "e2e.datacenters", *arguments),
            cwd=REPOSITORY,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[str, str]:
        """Run to the end; stdout and stderr."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            raise
        assert process.returncode == 0, err
        return out, err

    def processes(self) -> list[int]:
        """Every process in the daemon's namespaces, and the one that holds them."""
        holder = int((self.state / "docker" / "pid").read_text().split()[0])
        found = [holder]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
        return found

    def kill_everything(self) -> None:
        """kill -9 of the daemon, containerd, shims, kubelets, API server and all the rest."""
        victims = self.processes()
        assert len(victims) > 20
        handles = [os.pidfd_open(pid) for pid in victims]
        for handle in handles:
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            except ProcessLookupError:
                continue  # gone with its parent
        for handle in handles:
            select.select([handle], [], [], 30)  # readable once the process has ended
            os.close(handle)

    def ip(self, *arguments: str) -> str:
        command, environment = self.command("ip", *arguments), self.environment()
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def traces(self) -> dict[str, list[str]]:
        """What datacenters may leave on a machine, cache aside."""
        links, routes = self.ip("-brief", "link"), self.ip("route")
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.folder) in line]
        own, cgroup = str(self.folder).encode(), PrivateDaemon(self.state).cgroup
        running = [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if own in read_if_there(p)]
        return {
            "links": [line.split()[0] for line in links.splitlines()],
            "routes": routes.splitlines(),
            "mounts": [line for line in mounts if str(self.network) not in line],
            "processes": running,
            "cgroups": sorted(str(p) for pattern in ("", "*/") for p in Path("/sys/fs/cgroup").glob(pattern + cgroup)),
            "files": sorted(str(p) for p in self.folder.glob("state*")),
            "settings": [read_sysctl(name) for name in SYSCTLS],
            "modules": [str(Path("/lib/modules").exists())],
        }


def read_if_there(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine with everything built already."""
    for program in ("kubectl", "kind"):
        tool(program)
    built = [host_packages().parent, node_archive().parent, tools_cache()]
    cache = tmp_path / "cache" / "prfaas"
    cache.mkdir(parents=True)
    for folder in built:
        (cache / folder.name).symlink_to(cache_root() / folder.name)
    network = tmp_path / "network"
    network.touch()
    subprocess.run(["unshare", f"--net={network}", "true"], check=True)
    (tmp_path / "solo.yaml").write_text(SOLO)
    machine = Machine(tmp_path, network)
    machine.ip("link", "set", "lo", "up")
    try:
        yield machine
    finally:
        machine.run("down")
        subprocess.run(["umount", network], check=True)


def nodes(machine: Machine) -> Sequence[dict[str, object]]:
    out, _ = machine.run("status", "-o", "json")
    found: Sequence[dict[str, object]] = json.loads(out)["datacenters"][0]["nodes"]
    return found


def test_a_datacenter_lives_dies_heals_and_goes_without_a_trace(machine: Machine) -> None:
    before = machine.traces()
    up = ("up", "--topology", str(machine.folder / "solo.yaml"))

    _, said = machine.run(*up)
    assert "docker: private (no Docker daemon answers" in said
    assert "node image: our own build (the private daemon reaches no registry)" in said
    assert [(node["ready"], node["gpus"], node["accelerator"]) for node in nodes(machine)] == [
        (True, 0, None),
        (True, 4, "H20"),
    ]
    assert machine.traces()["cgroups"], "traces() would not see what is left"
    kubeconfig = machine.run("kubeconfig", "solo")[0].strip()
    kubectl = machine.command(str(tool("kubectl")), "--kubeconfig", kubeconfig)
    identity = [*kubectl, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}"]
    first = subprocess.run(identity, capture_output=True, text=True, check=True).stdout

    running = machine.processes()[:2]
    _, said = machine.run(*up)
    assert "datacenters solo: up already" in said
    assert machine.processes()[:2] == running
    assert subprocess.run(identity, capture_output=True, text=True, check=True).stdout == first

    machine.kill_everything()
    _, said = machine.run(*up)
    assert "the private Docker daemon is gone: making the datacenters anew" in said
    assert all(node["ready"] for node in nodes(machine))

    machine.kill_everything()
    machine.run("down")
    assert machine.traces() == before


def test_an_interrupt_takes_down_what_was_begun(machine: Machine) -> None:
    before = machine.traces()
    with machine.start("up", "--topology", str(machine.folder / "solo.yaml")) as process:
        assert process.stderr is not None
        guard = threading.Timer(300, process.kill)  # a process that never says so must not hang the run
        guard.start()
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("creating solo ..."):
                os.killpg(process.pid, signal.SIGINT)
        guard.cancel()
    assert process.returncode == 130, said
    assert "interrupted: taking down what was begun" in said
    assert machine.traces() == before


def test_a_second_topology_must_wait_for_the_first_to_go(machine: Machine) -> None:
    machine.state.mkdir(parents=True)
    (machine.state / "topology.json").write_text(json.dumps({"datacenters": [{"name": "x", "nodes": [{}]}]}))
    process = machine.start("up", "--topology", str(machine.folder / "solo.yaml"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.strip() == "error: another topology is up: run `python -m e2e.datacenters down` first"
