"""One datacenter's cluster: made by kind, then brought to where it serves: routes, GPUs, Ready, DNS.

Every step looks first and may be repeated. What is Ready is judged by signs of life that are younger than the node's
container, so that a node that was just started again does not pass for what it was before.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from e2e.datacenters import addresses, border, kind, oci_wrapper
from e2e.datacenters.build import tool
from e2e.datacenters.cache import Log, progress, remove, say
from e2e.datacenters.docker import Docker, PrivateDaemon
from e2e.datacenters.errors import DatacentersError
from e2e.datacenters.topology import ACCELERATOR_LABEL, Datacenter, NodeGroup, Topology

T = TypeVar("T")
READY_SECONDS = 180.0
"""Longest wait for a cluster to be ready before it counts as broken."""
DNS_QUESTION = r"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x08kube-dns\x0bkube-system\x03svc\x07cluster\x05local\0\0\x01\0\x01"
"""For bash's printf: the A record of the DNS Service. No label of ten letters: a line feed would cut the packet."""


class DatacenterError(DatacentersError):
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
    heard: float
    """When its kubelet last said how it is; seconds since the epoch, 0 for never."""


@dataclass(frozen=True)
class Cluster:
    """A datacenter's cluster, whether it is there or not."""

    docker: Docker
    topology: Topology
    datacenter: Datacenter
    state: Path
    """Folder of what is running."""
    log: Log = say
    interrupted: threading.Event = field(default_factory=threading.Event)
    """Set when waiting should end."""

    @property
    def name(self) -> str:
        """The datacenter's name."""
        return self.datacenter.name

    @property
    def block(self) -> addresses.Block:
        """The datacenter's ranges."""
        return addresses.block(self.topology.index(self.name))

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.state / "kubeconfig" / f"{self.name}.yaml"

    @property
    def kind_kubeconfig(self) -> Path:
        """kind's own kubeconfig. Being there means that kind finished the cluster."""
        return self.state / "kind" / f"{self.name}.kubeconfig"

    def workers(self) -> Iterator[tuple[str, NodeGroup]]:
        """Name and group of every node that runs workloads."""
        yield from zip(kind.node_names(self.datacenter)[1:], self.datacenter.groups(), strict=True)

    def containers(self) -> dict[str, bool]:
        """The nodes' containers: whether each runs."""
        return self.docker.running(f"{kind.CLUSTER_LABEL}={kind.cluster_name(self.name)}")

    def whole(self) -> bool:
        """Whether kind finished it and every node's container is there, running or not."""
        return self.kind_kubeconfig.exists() and set(self.containers()) == set(kind.node_names(self.datacenter))

    # Making it

    def create(self, image: str) -> None:
        """Make the cluster anew.

        :raises DatacenterError: kind could not; the message ends with its log.
        """
        program = tool("kind", self.log)
        work = self.state / "kind"
        work.mkdir(parents=True, exist_ok=True)
        network = kind.network_name(self.name)
        environment = {**self.docker.environment(), "KIND_EXPERIMENTAL_DOCKER_NETWORK": network}
        partial = self.kind_kubeconfig.with_suffix(".partial")
        output, settings = work / f"{self.name}.log", work / f"{self.name}.yaml"
        reduced = self.docker.private and bool(oci_wrapper.missing(Path("/proc/self/status").read_text()))
        settings.write_text(kind.configuration(self.datacenter, self.block, image, reduced))
        remove(self.kind_kubeconfig)
        with output.open("w") as log:
            delete = kind.delete_command(program, self.name, partial)
            subprocess.run(delete, env=environment, stdout=log, stderr=log, check=False)
            if self.docker.run("network", "inspect", network, check=False).returncode != 0:
                self.docker.run(*kind.network_command(network, self.block.nodes, self.block.bridge))
            with progress(f"creating {self.name}", lambda: last_line(output), self.log):
                create = kind.create_command(program, settings, partial)
                process = subprocess.Popen(create, env=environment, stdout=log, stderr=log)
                while process.poll() is None:
                    if self.interrupted.wait(0.2):
                        process.kill()
                        process.wait()
        if process.returncode != 0:
            raise DatacenterError(f"kind could not create {self.name} (log: {output}):\n{output.read_text()[-2000:]}")
        partial.replace(self.kind_kubeconfig)

    def start_stopped(self) -> None:
        """Start nodes that were stopped or killed."""
        stopped = sorted(name for name, running in self.containers().items() if not running)
        if stopped:
            self.log(f"{self.name}: starting {', '.join(stopped)}")
            self.docker.run("start", *stopped)

    def settle(self) -> None:
        """Bring routes, GPUs and the kubeconfig in line with the nodes; wait until they are Ready and DNS answers.

        :raises DatacenterError: not in READY_SECONDS.
        """
        deadline = time.monotonic() + READY_SECONDS
        self._write_kubeconfig()
        wanted = set(kind.node_names(self.datacenter))

        def joined() -> list[Node] | None:
            nodes = self.nodes()
            known = {node.name for node in nodes or [] if node.pod_range and node.address}
            return nodes if known == wanted else None

        nodes = self._until(joined, deadline, f"not all of its {len(wanted)} nodes have joined")
        self._route(nodes)
        self.kubectl("--namespace=kube-system", "scale", "deployment", "coredns", "--replicas=1")
        self._until(lambda: self._ready_with_gpus() or None, deadline, "its nodes are not Ready")
        self._until(lambda: self._dns_answers() or None, deadline, "its DNS does not answer")

    def _until(self, look: Callable[[], T | None], deadline: float, problem: str) -> T:
        while (answer := look()) is None:
            if self.interrupted.wait(0.5) or time.monotonic() > deadline:
                raise DatacenterError(f"{self.name}: {problem}")
        return answer

    def _route(self, nodes: Sequence[Node]) -> None:
        pods = {node.name: (node.address, node.pod_range) for node in nodes}
        router = border.container(self.name)
        self.docker.exec(router, "ip", "-batch", "-", text=border.routes(self.topology, self.name, pods))
        for node in nodes:
            routes = border.node_routes(self.topology, self.name, node.name, pods)
            self.docker.exec(node.name, "ip", "-batch", "-", text=routes)
        if self.docker.private:
            PrivateDaemon(self.state).route(self.block.pods, self.block.border)

    def _ready_with_gpus(self) -> bool:
        """Whether all nodes are Ready with their GPUs; offers missing GPUs, as a device plugin would."""
        nodes = {node.name: node for node in self.nodes() or []}
        if not nodes or not all(node.ready for node in nodes.values()) or not self._heard_since_start(nodes):
            return False
        lacking = [(name, group.gpus) for name, group in self.workers() if nodes[name].gpus != group.gpus]
        for name, gpus in lacking:
            places = [f"/status/{part}/nvidia.com~1gpu" for part in ("capacity", "allocatable")]
            patch = json.dumps([{"op": "add", "path": place, "value": str(gpus)} for place in places])
            self.kubectl("patch", "node", name, "--subresource=status", "--type=json", f"-p={patch}")
        return not lacking

    def _heard_since_start(self, nodes: dict[str, Node]) -> bool:
        listed = self.docker.run("inspect", "--format", "{{slice .Name 1}} {{.State.StartedAt}}", *nodes).stdout
        started = {name: seconds(when) for name, when in map(str.split, listed.splitlines())}
        return all(node.heard >= int(started[node.name]) for node in nodes.values())

    def _dns_answers(self) -> bool:
        """Ask the cluster's DNS for its own Service, as a pod would."""
        script = (
            f"exec 3<>/dev/udp/{self.block.services[10]}/53 && printf '{DNS_QUESTION}' >&3 && "
            "timeout 2 head -c 8 <&3 | od -An -v -tu1 | tr -s ' \\n' ' '"
        )
        control_plane = kind.node_names(self.datacenter)[0]
        answer = self.docker.exec(control_plane, "bash", "-c", script, check=False).split()
        return len(answer) == 8 and int(answer[3]) & 15 == 0 and int(answer[7]) > 0

    def _write_kubeconfig(self) -> None:
        """kind's kubeconfig, or, for a private daemon, with the node's own address in place of its loopback."""
        text = self.kind_kubeconfig.read_text()
        if self.docker.private:
            control_plane = kind.node_names(self.datacenter)[0]
            template = '{{(index .NetworkSettings.Networks "' + kind.network_name(self.name) + '").IPAddress}}'
            address = self.docker.run("inspect", "--format", template, control_plane).stdout.strip()
            lines = [
                f"{line.partition('server:')[0]}server: https://{address}:6443" if "server:" in line else line
                for line in text.splitlines()
            ]
            text = "\n".join([*lines, ""])
        if not self.kubeconfig.exists() or self.kubeconfig.read_text() != text:
            self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
            self.kubeconfig.touch(mode=0o600)
            self.kubeconfig.write_text(text)

    # Asking it

    def kubectl(self, *arguments: str, check: bool = True, text: str | None = None) -> str:
        """Run kubectl with `text` as its input; what it printed.

        :raises DatacenterError: it failed, and `check` is set.
        """
        result = self._kubectl(*arguments, text=text)
        if check and result.returncode != 0:
            shown = " ".join(arguments)[:300]
            raise DatacenterError(f"{self.name}: kubectl {shown} failed: {result.stderr.strip()[-2000:]}")
        return result.stdout

    def _kubectl(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(tool("kubectl", self.log)), "--kubeconfig", str(self.kubeconfig), *arguments]
        return subprocess.run(command, capture_output=True, text=True, input=text or "", check=False, timeout=300)

    def nodes(self) -> list[Node] | None:
        """The nodes, None when the API server does not answer."""
        result = self._kubectl("get", "nodes", "--output=json", "--request-timeout=5s")
        return [parse_node(item) for item in json.loads(result.stdout)["items"]] if result.returncode == 0 else None


def parse_node(item: dict[str, Any]) -> Node:
    """A node from the API server's document."""
    status, metadata = item["status"], item["metadata"]
    found = [entry["address"] for entry in status.get("addresses", []) if entry["type"] == "InternalIP"]
    ready: dict[str, str] = next((entry for entry in status.get("conditions", []) if entry["type"] == "Ready"), {})
    return Node(
        name=metadata["name"],
        ready=ready.get("status") == "True",
        address=found[0] if found else "",
        pod_range=item["spec"].get("podCIDR", ""),
        accelerator=metadata.get("labels", {}).get(ACCELERATOR_LABEL),
        gpus=int(status.get("allocatable", {}).get("nvidia.com/gpu", "0")),
        heard=seconds(ready["lastHeartbeatTime"]) if "lastHeartbeatTime" in ready else 0.0,
    )


def seconds(moment: str) -> float:
    """`2026-01-31T10:00:00.123456789Z` as seconds since the epoch."""
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def last_line(file: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
