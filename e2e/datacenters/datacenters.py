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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from e2e.datacenters import addresses, border, kind, oci, oci_wrapper
from e2e.datacenters.build import tool
from e2e.datacenters.cache import Log, cache_root, elapsed, locked, progress, remove, say, versions
from e2e.datacenters.docker import Docker, DockerError, PrivateDaemon, state_root, users_daemon
from e2e.datacenters.nodeimage import image_name, node_archive
from e2e.datacenters.topology import Datacenter, NodeGroup, Topology, TopologyError, load_topology, parse_topology

T = TypeVar("T")
NodeAction = Literal["start", "stop", "kill"]
READY_SECONDS = 180.0
"""Longest wait for a cluster to be ready before it counts as broken."""
DNS_QUESTION = r"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x08kube-dns\x0bkube-system\x03svc\x07cluster\x05local\0\0\x01\0\x01"
"""For bash's printf: the A record of the DNS Service. No label of ten letters: a line feed would cut the packet."""


class DatacenterError(RuntimeError):
    """The datacenters are not as the call needs them; the message says what would put it right."""


@dataclass(frozen=True)
class Node:
    """A node as its API server has it."""

    name: str
    ready: bool
    address: str
    pod_range: str
    accelerator: str | None
    gpus: int


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
            raise DatacenterError("no datacenters are up: run `python -m e2e.datacenters up`")
        return cls(parse_topology(json.loads(file.read_text())), log)

    # Bringing up and taking down

    def up(self) -> None:
        """Bring everything up; do nothing where it is up. An interrupt takes down what this call began.

        :raises DatacenterError: another topology is up, or a cluster could not be made.
        """
        with locked(cache_root() / "datacenters", self.log):
            self._refuse_other_topology()
            fresh = not (self.state / "topology.json").exists()
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
        image = self._node_image(docker)
        for program in ("kind", "kubectl"):
            tool(program, self.log)
        (self.state / "topology.json").write_text(self.topology.model_dump_json(by_alias=True))
        names = [datacenter.name for datacenter in self.topology.datacenters]
        created = self._each(lambda dc: self._ensure_cluster(docker, dc, image))
        for name in names:
            border.create(docker, self.topology, name, image)
        for index in range(len(self.topology.lines)):
            border.connect(docker, self.topology, index)
        with progress(f"waiting for {', '.join(names)}", self._waiting_for, self.log):
            self._each(lambda dc: self._ready_or_anew(docker, dc, image))
        did = f"up in {elapsed(time.monotonic() - started)}" if any(created) else "up already"
        self.log(f"datacenters {', '.join(names)}: {did}")

    def down(self) -> None:
        """Take everything down, whatever state it is in; what was never up is down."""
        with locked(cache_root() / "datacenters", self.log):
            self._down()

    def _down(self) -> None:
        file = self.state / "docker.json"
        if not file.exists():
            remove(self.state)
            return
        daemon = PrivateDaemon(self.state)
        if json.loads(file.read_text())["private"]:
            # Whatever runs, runs in its namespaces: asking kind to delete each cluster would only take longer.
            docker = daemon.handle()
            if daemon.pid():
                with progress("removing nodes", log=self.log):
                    remove_ours(docker)
            daemon.stop(self.log)
            if (daemon.data / "containers").exists() and any((daemon.data / "containers").iterdir()):
                remove(daemon.data)  # killed under way: the store may be torn, and the image is quickly loaded again
        else:
            with progress("removing nodes", log=self.log):
                remove_ours(self._docker())
        remove(self.state)
        with contextlib.suppress(OSError):  # others may keep things there
            self.state.parent.rmdir()
        self.log("datacenters: down")

    def clean_cache(self) -> None:
        """Remove everything that was built or fetched.

        :raises DatacenterError: datacenters are up, and stand on it.
        """
        if self.state.exists():
            raise DatacenterError(
                "datacenters are up, and use what is cached: run `python -m e2e.datacenters down` first"
            )
        remove(cache_root())

    def _start_docker(self) -> Docker:
        """The daemon in use, or the one chosen now: one line says which and why."""
        file = self.state / "docker.json"
        chosen = json.loads(file.read_text())["private"] if file.exists() else None
        mine = None if chosen else users_daemon()
        if chosen is False and mine is None:
            raise DockerError("the Docker daemon that runs the datacenters does not answer: start it, or run `down`")
        daemon = PrivateDaemon(self.state)
        if mine is None and chosen and not daemon.pid():
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
            raise DatacenterError("no datacenters are up: run `python -m e2e.datacenters up`")
        if json.loads(file.read_text())["private"]:
            return PrivateDaemon(self.state).handle()
        mine = users_daemon()
        if mine is None:
            raise DockerError("the Docker daemon that runs the datacenters does not answer")
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
        self.log(f"node image: our own build ({reason})")
        return name

    def _ensure_cluster(self, docker: Docker, datacenter: Datacenter, image: str) -> bool:
        """Make the cluster, or start its stopped nodes; whether it was made."""
        found = docker.running(f"{kind.CLUSTER_LABEL}={kind.cluster_name(datacenter.name)}")
        finished = self._kind_kubeconfig(datacenter.name).exists()
        if not finished or set(found) != set(kind.node_names(datacenter)):
            self._create_cluster(docker, datacenter, image)
            return True
        stopped = sorted(name for name, running in found.items() if not running)
        if stopped:
            self.log(f"{datacenter.name}: starting {', '.join(stopped)}")
            docker.run("start", *stopped)
        return False

    def _create_cluster(self, docker: Docker, datacenter: Datacenter, image: str) -> None:
        name, block = datacenter.name, self._block(datacenter.name)
        program, kubeconfig = tool("kind", self.log), self._kind_kubeconfig(name)
        work = self.state / "kind"
        work.mkdir(parents=True, exist_ok=True)
        environment = {**docker.environment(), "KIND_EXPERIMENTAL_DOCKER_NETWORK": kind.network_name(name)}
        remove(kubeconfig)
        partial = kubeconfig.with_suffix(".partial")
        output = work / f"{name}.log"
        settings = work / f"{name}.yaml"
        reduced = docker.private and bool(oci_wrapper.missing(Path("/proc/self/status").read_text()))
        settings.write_text(kind.configuration(datacenter, block, image, reduced))
        with output.open("w") as log:
            delete = kind.delete_command(program, name, partial)
            subprocess.run(delete, env=environment, stdout=log, stderr=log, check=False)
            if docker.run("network", "inspect", kind.network_name(name), check=False).returncode != 0:
                docker.run(*kind.network_command(kind.network_name(name), block.nodes, block.bridge))
            with progress(f"creating {name}", lambda: last_line(output), self.log):
                create = kind.create_command(program, settings, partial)
                process = subprocess.Popen(create, env=environment, stdout=log, stderr=log)
                while process.poll() is None:
                    if self._interrupted.wait(0.2):
                        process.kill()
                        process.wait()
        if process.returncode != 0:
            raise DatacenterError(f"kind could not create {name} (log: {output}):\n{output.read_text()[-2000:]}")
        partial.replace(kubeconfig)

    def _ready_or_anew(self, docker: Docker, datacenter: Datacenter, image: str) -> None:
        try:
            self._settle(docker, datacenter)
        except DatacenterError as error:
            if self._interrupted.is_set():
                raise
            self.log(f"{datacenter.name}: {error}; making it anew")
            self._create_cluster(docker, datacenter, image)
            self._settle(docker, datacenter)

    def _settle(self, docker: Docker, datacenter: Datacenter) -> None:
        """Bring routes, GPUs and the kubeconfig in line with the nodes, and wait until they are ready and DNS answers.

        :raises DatacenterError: not ready in READY_SECONDS.
        """
        name = datacenter.name
        deadline = time.monotonic() + READY_SECONDS
        control_plane = kind.node_names(datacenter)[0]
        self._write_kubeconfig(docker, name)
        wanted = set(kind.node_names(datacenter))

        def listed() -> list[Node] | None:
            nodes = self._nodes_or_none(name)
            known = nodes is not None and {node.name for node in nodes if node.pod_range and node.address} == wanted
            return nodes if known else None

        nodes = self._until(listed, deadline, f"not all of its {len(wanted)} nodes have joined")
        self._route(docker, name, nodes)
        self.kubectl(name, "--namespace=kube-system", "scale", "deployment", "coredns", "--replicas=1")
        self._until(lambda: self._ready_with_gpus(datacenter) or None, deadline, "its nodes are not Ready")
        self._until(lambda: self._dns_answers(docker, control_plane, name) or None, deadline, "its DNS does not answer")

    def _route(self, docker: Docker, name: str, nodes: Sequence[Node]) -> None:
        pods = {node.name: (node.address, node.pod_range) for node in nodes}
        router = border.container(name)
        docker.exec(router, "ip", "-batch", "-", text=border.routes(self.topology, name, pods))
        for node in nodes:
            docker.exec(node.name, "ip", "-batch", "-", text=border.node_routes(self.topology, name, node.name, pods))
        if docker.private:
            block = self._block(name)
            PrivateDaemon(self.state).route(block.pods, block.border)

    def _ready_with_gpus(self, datacenter: Datacenter) -> bool:
        """Whether all nodes are Ready with their GPUs; offers missing GPUs, as a device plugin would."""
        nodes = {node.name: node for node in self._nodes_or_none(datacenter.name) or []}
        wanted = {name: group.gpus for name, group in self._workers(datacenter)}
        lacking = [(name, gpus) for name, gpus in wanted.items() if name in nodes and nodes[name].gpus != gpus]
        for name, gpus in lacking:
            places = [f"/status/{field}/nvidia.com~1gpu" for field in ("capacity", "allocatable")]
            patch = json.dumps([{"op": "add", "path": place, "value": str(gpus)} for place in places])
            self.kubectl(datacenter.name, "patch", "node", name, "--subresource=status", "--type=json", f"-p={patch}")
        return bool(nodes) and not lacking and all(node.ready for node in nodes.values())

    def _dns_answers(self, docker: Docker, control_plane: str, name: str) -> bool:
        """Ask the cluster's DNS for its own Service, as a pod would."""
        server = self._block(name).services[10]
        script = (
            f"exec 3<>/dev/udp/{server}/53 && printf '{DNS_QUESTION}' >&3 && "
            "timeout 2 head -c 8 <&3 | od -An -v -tu1 | tr -s ' \\n' ' '"
        )
        answer = docker.exec(control_plane, "bash", "-c", script, check=False).split()
        return len(answer) == 8 and int(answer[3]) & 15 == 0 and int(answer[7]) > 0

    # Using them

    def kubeconfig(self, name: str) -> Path:
        """The administrator's kubeconfig of a datacenter; works in any shell of this machine."""
        self.topology.index(name)
        return self.state / "kubeconfig" / f"{name}.yaml"

    def kubectl(self, name: str, *arguments: str, check: bool = True, text: str | None = None) -> str:
        """Run kubectl against a datacenter with `text` as its input; what it printed.

        :raises DatacenterError: it failed, and `check` is set.
        """
        result = self._kubectl(name, *arguments, text=text)
        if check and result.returncode != 0:
            raise DatacenterError(
                f"{name}: kubectl {' '.join(arguments)[:300]} failed: {result.stderr.strip()[-2000:]}"
            )
        return result.stdout

    def exec_in_node(self, node: str, *arguments: str, check: bool = True, text: str | None = None) -> str:
        """Run a command in a node (or border router); what it printed."""
        return self._docker().exec(self._node_name(node), *arguments, check=check, text=text)

    def node_addresses(self, name: str) -> dict[str, str]:
        """Address of each node of a datacenter, by name."""
        return {node.name: node.address for node in self._nodes(name)}

    def set_line(self, one: str, other: str, *, rate: str | None = None, up: bool | None = None) -> None:
        """Change a line's capacity (`"400mbit"`, each direction), cut it, or join it again."""
        index = self.topology.line_index(one, other)
        docker = self._docker()
        if rate is not None:
            border.set_rate(docker, self.topology, index, rate)
        if up is not None:
            border.set_up(docker, self.topology, index, up)

    def line(self, one: str, other: str) -> border.LineState:
        """A line as it is now."""
        return border.state(self._docker(), self.topology, self.topology.line_index(one, other))

    def line_counters(self, one: str, other: str) -> dict[str, border.Traffic]:
        """What crossed a line since it was made, by direction (`"east->west"`)."""
        return border.traffic(self._docker(), self.topology, self.topology.line_index(one, other))

    def node(self, node: str, action: NodeAction) -> None:
        """Stop a node in order, kill it, or start it again (which waits until it is Ready)."""
        docker, name = self._docker(), self._node_name(node)
        docker.run({"stop": "stop", "kill": "kill", "start": "start"}[action], name)
        if action == "start":
            owner = next(dc for dc in self.topology.datacenters if name in kind.node_names(dc))
            self._settle(docker, owner)

    def load(self, archive: Path) -> None:
        """Load an OCI image archive of ours into every node that runs workloads, as far as each lacks it."""
        docker = self._docker()
        ctr = ("ctr", "--namespace", "k8s.io")
        content = oci.read_archive(archive)

        def load_into(node: str) -> None:
            listed = docker.exec(node, *ctr, "images", "list").splitlines()
            held = {(fields[0], fields[2]) for fields in map(str.split, listed) if len(fields) > 2}
            if all((image.name, image.digest) in held for image in content):
                return
            snapshots = docker.exec(node, *ctr, "snapshots", "list").split()
            present = {layer for image in content for layer in image.layers_held(snapshots)}
            command = docker.command(
                "exec", "-i", node, *ctr, "images", "import", "--local", "--discard-unpacked-layers", "-"
            )
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

        nodes = [node for datacenter in self.topology.datacenters for node, _ in self._workers(datacenter)]
        with progress(f"loading {content[0].name} into {len(nodes)} nodes", log=self.log):
            parallel(load_into, nodes)

    def status(self) -> dict[str, Any]:
        """What is up, as plain data."""
        docker = self._docker()
        datacenters = []
        for datacenter in self.topology.datacenters:
            nodes = self._nodes_or_none(datacenter.name)
            datacenters.append(
                {
                    "name": datacenter.name,
                    "kubeconfig": str(self.kubeconfig(datacenter.name)),
                    "answers": nodes is not None,
                    "nodes": [asdict(node) for node in nodes or []],
                    "containers": docker.running(f"{kind.CLUSTER_LABEL}={kind.cluster_name(datacenter.name)}"),
                }
            )
        lines = [asdict(border.state(docker, self.topology, index)) for index in range(len(self.topology.lines))]
        return {
            "docker": {"private": docker.private, "socket": docker.socket},
            "datacenters": datacenters,
            "lines": lines,
        }

    # Inside

    def _block(self, name: str) -> addresses.Block:
        return addresses.block(self.topology.index(name))

    def _workers(self, datacenter: Datacenter) -> Iterator[tuple[str, NodeGroup]]:
        yield from zip(kind.node_names(datacenter)[1:], datacenter.groups(), strict=True)

    def _each(self, work: Callable[[Datacenter], T]) -> list[T]:
        return parallel(work, self.topology.datacenters, self._interrupted)

    def _until(self, look: Callable[[], T | None], deadline: float, problem: str) -> T:
        """The first answer that is not None.

        :raises DatacenterError: none before the deadline (of time.monotonic), or interrupted.
        """
        while (answer := look()) is None:
            if self._interrupted.wait(0.5) or time.monotonic() > deadline:
                raise DatacenterError(problem)
        return answer

    def _kind_kubeconfig(self, name: str) -> Path:
        """kind's own kubeconfig. Being there means that kind finished the cluster."""
        return self.state / "kind" / f"{name}.kubeconfig"

    def _write_kubeconfig(self, docker: Docker, name: str) -> None:
        """Our kubeconfig: kind's, or, for a private daemon, with the node's own address in place of its loopback."""
        text = self._kind_kubeconfig(name).read_text()
        if docker.private:
            control_plane = f"{kind.cluster_name(name)}-control-plane"
            template = '{{(index .NetworkSettings.Networks "' + kind.network_name(name) + '").IPAddress}}'
            address = docker.run("inspect", "--format", template, control_plane).stdout.strip()
            lines = [
                f"{line.partition('server:')[0]}server: https://{address}:6443" if "server:" in line else line
                for line in text.splitlines()
            ]
            text = "\n".join([*lines, ""])
        target = self.kubeconfig(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_text() != text:
            target.touch(mode=0o600)
            target.write_text(text)

    def _kubectl(self, name: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(tool("kubectl", self.log)), "--kubeconfig", str(self.kubeconfig(name)), *arguments]
        return subprocess.run(command, capture_output=True, text=True, input=text or "", check=False, timeout=300)

    def _nodes(self, name: str) -> list[Node]:
        nodes = self._nodes_or_none(name)
        if nodes is None:
            raise DatacenterError(f"{name}: its API server does not answer")
        return nodes

    def _nodes_or_none(self, name: str) -> list[Node] | None:
        result = self._kubectl(name, "get", "nodes", "--output=json", "--request-timeout=5s")
        if result.returncode != 0:
            return None
        return [parse_node(item) for item in json.loads(result.stdout)["items"]]

    def _node_name(self, node: str) -> str:
        """Full name of a node or border router, given with or without our prefix."""
        names = [name for datacenter in self.topology.datacenters for name in kind.node_names(datacenter)]
        names += [border.container(datacenter.name) for datacenter in self.topology.datacenters]
        for candidate in (node, f"{kind.PREFIX}{node}"):
            if candidate in names:
                return candidate
        raise TopologyError(f"there is no node {node!r}: name one of {', '.join(names)}")

    def _waiting_for(self) -> str:
        parts = []
        for datacenter in self.topology.datacenters:
            nodes = self._nodes_or_none(datacenter.name) if self.kubeconfig(datacenter.name).exists() else None
            ready = sum(node.ready for node in nodes or [])
            parts.append(f"{datacenter.name} {ready} of {1 + len(datacenter.groups())} nodes Ready")
        return ", ".join(parts)


def remove_ours(docker: Docker) -> None:
    """Remove every container, volume and network of ours from a daemon."""
    containers = docker.run("ps", "--all", "--quiet", "--filter", f"name=^{kind.PREFIX}").stdout.split()
    if containers:
        docker.run("rm", "--force", "--volumes", *containers)
    networks = docker.run("network", "ls", "--quiet", "--filter", f"name=^{kind.PREFIX}").stdout.split()
    if networks:
        docker.run("network", "rm", *networks)


def parse_node(item: dict[str, Any]) -> Node:
    """A node from the API server's document."""
    status, metadata = item["status"], item["metadata"]
    addresses_found = [entry["address"] for entry in status.get("addresses", []) if entry["type"] == "InternalIP"]
    conditions = {entry["type"]: entry["status"] for entry in status.get("conditions", [])}
    return Node(
        name=metadata["name"],
        ready=conditions.get("Ready") == "True",
        address=addresses_found[0] if addresses_found else "",
        pod_range=item["spec"].get("podCIDR", ""),
        accelerator=metadata.get("labels", {}).get("prfaas.io/accelerator"),
        gpus=int(status.get("allocatable", {}).get("nvidia.com/gpu", "0")),
    )


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


def last_line(file: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
