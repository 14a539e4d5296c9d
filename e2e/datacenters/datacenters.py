"""The datacenters as one thing: up, down, and what one does to them in between.

`up` is level-triggered: it looks at what is there and makes up the difference, so it may be run again at any time. A
cluster that was not finished, or does not come back, is made anew.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

from e2e.datacenters import border, kind, oci
from e2e.datacenters.build import tool
from e2e.datacenters.cache import Log, cache_root, elapsed, forget_unused, locked, progress, remove, say, versions
from e2e.datacenters.cluster import Cluster, DatacenterError
from e2e.datacenters.docker import Docker, DockerError, PrivateDaemon, state_root, users_daemon
from e2e.datacenters.errors import in_words
from e2e.datacenters.nodeimage import image_name, node_archive
from e2e.datacenters.topology import Topology, TopologyError, load_topology, parse_topology

__all__ = ["DatacenterError", "Datacenters", "parallel"]

T = TypeVar("T")
NodeAction = Literal["start", "stop", "kill"]
NOT_UP = "no datacenters are up: run `python -m e2e.datacenters up`"


class Datacenters:
    """The datacenters of one topology on this machine. There is one set per user: the one in the state folder."""

    def __init__(self, topology: Topology | None = None, log: Log = say) -> None:
        self.topology = topology or load_topology()
        self.log = log
        self.state = state_root()
        self._interrupted = threading.Event()

    @classmethod
    def running(cls, log: Log = say) -> Datacenters:
        """Those that were brought up.

        :raises DatacenterError: none were.
        """
        file = state_root() / "topology.json"
        if not file.exists():
            raise DatacenterError(NOT_UP)
        return cls(parse_topology(json.loads(file.read_text())), log)

    # Bringing up and taking down

    @in_words()
    def up(self) -> None:
        """Bring everything up; do nothing where it is up. An interrupt takes down what this call began.

        :raises DatacenterError: another topology is up, or a cluster could not be made.
        """
        with locked(cache_root() / "datacenters", self.log):
            self._refuse_other_topology()
            fresh = not (self.state / "topology.json").exists()
            if fresh:  # nothing runs that may stand on it
                forget_unused(self.log)
            try:
                self._up()
            except KeyboardInterrupt:
                self._interrupted.clear()
                if fresh:
                    self.log("interrupted: taking down what was begun")
                    self._down()
                raise

    def _refuse_other_topology(self) -> None:
        file = self.state / "topology.json"
        if file.exists() and parse_topology(json.loads(file.read_text())) != self.topology:
            raise DatacenterError("another topology is up: run `python -m e2e.datacenters down` first")

    def _up(self) -> None:
        started = time.monotonic()
        docker = self._start_docker()
        for program in ("kind", "kubectl"):
            tool(program, self.log)
        (self.state / "topology.json").write_text(self.topology.model_dump_json(by_alias=True))
        clusters = self._clusters(docker)
        names = [cluster.name for cluster in clusters]
        new = [cluster for cluster in clusters if not cluster.whole()]
        routers = [name for name in names if not border.runs(docker, name)]
        image = self._node_image(docker) if new or routers else ""
        self._each(lambda cluster: cluster.create(image) if cluster in new else cluster.start_stopped(), clusters)
        for name in routers:
            border.create(docker, self.topology, name, image)
        for index in range(len(self.topology.lines)):
            border.connect(docker, self.topology, index)
        with progress(f"waiting for {', '.join(names)}", lambda: waiting_for(clusters), self.log):
            self._each(self._settle_or_anew, clusters)
        did = f"up in {elapsed(time.monotonic() - started)}" if new else "up already"
        self.log(f"datacenters {', '.join(names)}: {did}")

    def _settle_or_anew(self, cluster: Cluster) -> None:
        try:
            cluster.settle()
        except DatacenterError as error:
            if self._interrupted.is_set():
                raise
            self.log(f"{error}; making it anew")
            cluster.create(self._node_image(cluster.docker))
            cluster.settle()

    @in_words()
    def down(self) -> None:
        """Take everything down, whatever state it is in; what was never up is down."""
        with locked(cache_root() / "datacenters", self.log):
            self._down()

    def _down(self) -> None:
        file = self.state / "docker.json"
        if not file.exists():
            remove(self.state)
            return
        if json.loads(file.read_text())["private"]:
            daemon = PrivateDaemon(self.state)
            if daemon.answers():
                with progress("removing nodes", log=self.log):
                    remove_ours(daemon.handle())
            daemon.stop(self.log)
        else:
            with progress("removing nodes", log=self.log):
                remove_ours(self._docker())
        remove(self.state)
        with contextlib.suppress(OSError):  # others may keep things there
            self.state.parent.rmdir()
        self.log("datacenters: down")

    @in_words()
    def clean_cache(self) -> None:
        """Remove everything that was built or fetched.

        :raises DatacenterError: datacenters are up, and stand on it.
        """
        if self.state.exists():
            raise DatacenterError("datacenters are up on what is cached: run `python -m e2e.datacenters down` first")
        remove(cache_root())

    def _start_docker(self) -> Docker:
        """The daemon in use, or the one chosen now: one line says which and why."""
        file = self.state / "docker.json"
        chosen = json.loads(file.read_text())["private"] if file.exists() else None
        mine = None if chosen else users_daemon()
        if chosen is False and mine is None:
            raise DockerError("the Docker daemon that runs the datacenters does not answer: start it")
        daemon = PrivateDaemon(self.state)
        if mine is None and chosen and not daemon.answers():
            self.log("the private Docker daemon is gone: making the datacenters anew")
            self._down()
        self.state.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"private": mine is None}))
        docker = mine or daemon.start(self.log)
        self.log(f"docker: {'private' if docker.private else 'yours'} ({docker.reason})")
        return docker

    def _docker(self) -> Docker:
        """The daemon that runs the datacenters now."""
        file = self.state / "docker.json"
        if not file.exists():
            raise DatacenterError(NOT_UP)
        if json.loads(file.read_text())["private"]:
            daemon = PrivateDaemon(self.state)
            if daemon.pid() is None:
                raise DatacenterError(
                    "the private Docker daemon is gone: `up` makes the datacenters anew, `down` clears up"
                )
            return daemon.handle()
        mine = users_daemon()
        if mine is None:
            raise DockerError("the Docker daemon that runs the datacenters does not answer: start it")
        return mine

    def _node_image(self, docker: Docker) -> str:
        """Name of the node image, present in the daemon. One line says which and why."""
        stock = str(versions()["kind"]["image"])
        if docker.private:
            reason = "the private daemon reaches no registry"
        else:
            present = docker.run("image", "inspect", stock, check=False).returncode == 0
            if present or docker.run("pull", "--quiet", stock, check=False, timeout=900).returncode == 0:
                self.log(f"node image: {stock.partition('@')[0]} (a registry is reachable)")
                return stock
            reason = f"{stock.partition('@')[0]} cannot be pulled"
        name = image_name()
        if docker.run("image", "inspect", name, check=False).returncode != 0:
            archive = node_archive(self.log)
            with progress("loading the node image", log=self.log):
                docker.run("load", "--input", str(archive), timeout=600)
            self._remove_other_images(docker, name)
        self.log(f"node image: our own build ({reason})")
        return name

    def _remove_other_images(self, docker: Docker, kept: str) -> None:
        """Forget node images of earlier builds; Docker refuses where one is in use."""
        repository = kept.partition(":")[0]
        listed = docker.run("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository).stdout.split()
        for name in listed:
            if name != kept:
                docker.run("image", "rm", name, check=False)

    # Using them

    def kubeconfig(self, name: str) -> Path:
        """The administrator's kubeconfig of a datacenter; works in any shell of this machine."""
        self.topology.index(name)
        return self.state / "kubeconfig" / f"{name}.yaml"

    @in_words()
    def kubectl(self, name: str, *arguments: str, check: bool = True, text: str | None = None) -> str:
        """Run kubectl against a datacenter with `text` as its input; what it printed.

        :raises DatacenterError: it failed, and `check` is set.
        """
        return self._cluster(name).kubectl(*arguments, check=check, text=text)

    @in_words()
    def exec_in_node(self, node: str, *arguments: str, check: bool = True, text: str | None = None) -> str:
        """Run a command in a node (or border router); what it printed."""
        return self._docker().exec(self._node_name(node), *arguments, check=check, text=text)

    @in_words()
    def node_addresses(self, name: str) -> dict[str, str]:
        """Address of each node of a datacenter, by name."""
        nodes = self._cluster(name).nodes()
        if nodes is None:
            raise DatacenterError(f"{name}: its API server does not answer")
        return {node.name: node.address for node in nodes}

    def api_server(self, name: str) -> str:
        """URL of a datacenter's API server as its peers reach it, over the line."""
        return f"https://{self.node_addresses(name)[kind.node_names(self._cluster(name).datacenter)[0]]}:6443"

    @in_words()
    def set_line(self, one: str, other: str, *, rate: str | None = None, up: bool | None = None) -> None:
        """Change a line's capacity (`"400mbit"`, each direction), cut it, or join it again."""
        index = self.topology.line_index(one, other)
        docker = self._docker()
        if rate is not None:
            border.set_rate(docker, self.topology, index, rate)
        if up is not None:
            border.set_up(docker, self.topology, index, up)

    @in_words()
    def line(self, one: str, other: str) -> border.LineState:
        """A line as it is now."""
        return border.state(self._docker(), self.topology, self.topology.line_index(one, other))

    @in_words()
    def line_counters(self, one: str, other: str) -> dict[str, border.Traffic]:
        """What crossed a line since it was made, by direction (`"east->west"`)."""
        return border.traffic(self._docker(), self.topology, self.topology.line_index(one, other))

    @in_words()
    def node(self, node: str, action: NodeAction) -> None:
        """Stop a node in order, kill it, or start it again (which waits until it is Ready)."""
        docker, name = self._docker(), self._node_name(node)
        docker.run({"stop": "stop", "kill": "kill", "start": "start"}[action], name)
        if action == "start":
            owner = next(cluster for cluster in self._clusters(docker) if name in kind.node_names(cluster.datacenter))
            owner.settle()

    @in_words()
    def load(self, archive: Path) -> None:
        """Load an OCI image archive of ours into every node that runs workloads, as far as each lacks it."""
        docker = self._docker()
        content = oci.read_archive(archive)
        running = [
            node
            for cluster in self._clusters(docker)
            for node, _ in cluster.workers()
            if cluster.containers().get(node)
        ]
        with progress(f"loading {content[0].name} into {len(running)} nodes", log=self.log):
            parallel(lambda node: load_into(docker, node, archive, content), running)

    @in_words()
    def status(self) -> dict[str, Any]:
        """What is up, as plain data."""
        docker = self._docker()

        def one(cluster: Cluster) -> dict[str, Any]:
            nodes = cluster.nodes()
            return {
                "name": cluster.name,
                "kubeconfig": str(cluster.kubeconfig),
                "answers": nodes is not None,
                "nodes": [
                    {key: value for key, value in asdict(node).items() if key != "heard"} for node in nodes or []
                ],
                "containers": cluster.containers(),
            }

        return {
            "docker": {"private": docker.private, "socket": docker.socket},
            "datacenters": self._each(one, self._clusters(docker)),
            "lines": [asdict(border.state(docker, self.topology, index)) for index in range(len(self.topology.lines))],
        }

    # Inside

    def _clusters(self, docker: Docker) -> list[Cluster]:
        return [
            Cluster(docker, self.topology, datacenter, self.state, self.log, self._interrupted)
            for datacenter in self.topology.datacenters
        ]

    def _cluster(self, name: str) -> Cluster:
        return self._clusters(self._docker())[self.topology.index(name)]

    def _each(self, work: Callable[[Cluster], T], clusters: Sequence[Cluster]) -> list[T]:
        return parallel(work, clusters, self._interrupted)

    def _node_name(self, node: str) -> str:
        """Full name of a node or border router, given with or without our prefix."""
        names = [name for datacenter in self.topology.datacenters for name in kind.node_names(datacenter)]
        names += [border.container(datacenter.name) for datacenter in self.topology.datacenters]
        for candidate in (node, f"{kind.PREFIX}{node}"):
            if candidate in names:
                return candidate
        raise TopologyError(f"there is no node {node!r}: name one of {', '.join(names)}")


def load_into(docker: Docker, node: str, archive: Path, content: Sequence[oci.Held]) -> None:
    """Load an archive into a node's image store, without the layers that it has unpacked already.

    :raises DatacenterError: the node's containerd refused it.
    """
    ctr = ("ctr", "--namespace", "k8s.io")
    listed = docker.exec(node, *ctr, "images", "list").splitlines()
    held = {(fields[0], fields[2]) for fields in map(str.split, listed) if len(fields) > 2}
    if all((image.name, image.digest) in held for image in content):
        return
    snapshots = docker.exec(node, *ctr, "snapshots", "list").split()
    present = {layer for image in content for layer in image.layers_held(snapshots)}
    command = docker.command("exec", "-i", node, *ctr, "images", "import", "--local", "--discard-unpacked-layers", "-")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=docker.environment(), stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            oci.copy_archive(archive, process.stdin, without=present)
        if process.wait() != 0:
            output.seek(0)
            raise DatacenterError(f"{node}: {archive} could not be loaded: {output.read().decode()[-2000:]}")


def waiting_for(clusters: Sequence[Cluster]) -> str:
    """How far the clusters are, in words."""
    parts = []
    for cluster in clusters:
        nodes = cluster.nodes() if cluster.kubeconfig.exists() else None
        ready = sum(node.ready for node in nodes or [])
        parts.append(f"{cluster.name} {ready} of {len(kind.node_names(cluster.datacenter))} nodes Ready")
    return ", ".join(parts)


def remove_ours(docker: Docker) -> None:
    """Remove every container, volume and network of ours from a daemon."""
    containers = docker.run("ps", "--all", "--quiet", "--filter", f"name=^{kind.PREFIX}").stdout.split()
    if containers:
        docker.run("rm", "--force", "--volumes", *containers)
    networks = docker.run("network", "ls", "--quiet", "--filter", f"name=^{kind.PREFIX}").stdout.split()
    if networks:
        docker.run("network", "rm", *networks)


def parallel(work: Callable[[Any], T], items: Sequence[Any], interrupted: threading.Event | None = None) -> list[T]:
    """Do the work for all items at once; the first failure is raised after all have ended.

    An interrupt sets the event, by which the work ends early.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        try:
            return list(pool.map(work, items))
        except KeyboardInterrupt:
            if interrupted:
                interrupted.set()
            raise
