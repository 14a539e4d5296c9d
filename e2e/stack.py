"""The operator in every datacenter, the samples applied, everything Ready: what the demo and the scenarios stand on.

Each step is what a person would do with helm, kubectl and `prfaas link offer`, run with the same programs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.client import Target
from e2e.datacenters.build import tool
from e2e.datacenters.cache import Log, say
from e2e.datacenters.datacenters import DatacenterError, Datacenters, parallel
from e2e.images import SAMPLES_REFERENCE
from e2e.report import LineUse, Scales
from prfaas.api import labels
from prfaas.api.base import GROUP
from prfaas.api.common import bits_per_second

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "manifests" / "samples" / "demo"
NAMESPACE = "prfaas"
"""Namespace of the samples."""
SYSTEM = "prfaas-system"
"""Namespace of the operator."""
EXCHANGE = "prfaas-exchange"
"""Namespace that peers may read."""
KINDS = "prfaasclusters.prfaas.io,pdclusters.prfaas.io,interclusterlinks.prfaas.io"
OPERATOR = "prfaas-operator"
"""Name of the operator's Deployment."""
OPERATOR_PODS = f"{labels.LABEL_COMPONENT}=operator"
OPERATOR_PORT = 8080
"""Port of the operator's health and metrics."""
ROUTER_PORT = 30080
"""Node port of the sample's router, in west."""
KV_SENT = 'prfaas_worker_kv_wire_bytes_total{direction="sent"}'
"""The workers' own count of bytes that they sent on the KV port."""


class StackError(RuntimeError):
    """The operator could not be installed or did not become ready; the message says where to look."""


@dataclass(frozen=True)
class Stack:
    """The installed operator in the datacenters that are up."""

    datacenters: Datacenters
    image: str
    """Reference of the operator's image, present on every node."""
    replicas: int = 1
    """Operator pods in each datacenter."""
    log: Log = say

    @property
    def names(self) -> list[str]:
        """The datacenters, in the topology's order."""
        return [datacenter.name for datacenter in self.datacenters.topology.datacenters]

    def helm(self, datacenter: str, *arguments: str) -> None:
        """Run helm against one datacenter. Raises StackError with what it printed."""
        command = [str(tool("helm", self.log)), "--kubeconfig", str(self.datacenters.kubeconfig(datacenter))]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            raise StackError(f"{datacenter}: helm {' '.join(arguments[:3])} failed:\n{done.stderr.strip()[-3000:]}")

    def install(self) -> None:
        """CRDs and operator in every datacenter, by Helm; links offered and accepted both ways."""
        parallel(self._install, self.names)
        self.log("helm: prfaas-crds and prfaas-operator installed in " + " and ".join(self.names))
        for line in self.datacenters.topology.lines:
            for host, guest in (line.between, line.between[::-1]):
                self._offer(host, guest)
        self.log("links: each datacenter may read the other's exchange namespace, and nothing else")

    def _install(self, datacenter: str) -> None:
        repository, _, tag = self.image.rpartition(":")
        charts = ROOT / "charts"
        values = {
            "clusterID": datacenter,
            "image.repository": repository,
            "image.tag": tag,
            "image.pullPolicy": "Never",
            "replicas": str(self.replicas),
            "namespaces[0]": NAMESPACE,
        }
        settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        self.helm(datacenter, "upgrade", "--install", "prfaas-crds", str(charts / "prfaas-crds"), "-n", "default")
        self.apply(datacenter, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        release = ("upgrade", "--install", "prfaas", str(charts / "prfaas-operator"), "-n", SYSTEM)
        self.helm(datacenter, *release, "--create-namespace", *settings)

    def _offer(self, host: str, guest: str) -> None:
        """`host` lets `guest` read its exchange: a Secret with a kubeconfig, made in one and applied in the other."""
        kubeconfig = self.datacenters.kubeconfig(host)
        server = self.datacenters.api_server(host)
        offer = [sys.executable, "-m", "prfaas.cli.main", "link", "offer", "--peer", guest, "--server", server]
        offer += ["--kubeconfig", str(kubeconfig), "--secret-name", f"peer-{host}", "--secret-namespace", SYSTEM]
        done = subprocess.run(offer, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != 0:
            raise StackError(f"{host}: prfaas link offer failed: {done.stderr.strip()[-2000:]}")
        # On the server's side: client-side apply would keep a copy of the token in an annotation.
        self.datacenters.kubectl(guest, "apply", "--server-side", "--force-conflicts", "-f", "-", text=done.stdout)

    def apply(self, datacenter: str, *objects: Mapping[str, Any]) -> None:
        """Apply objects as they are."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.datacenters.kubectl(datacenter, "apply", "-f", "-", text=json.dumps(listed))

    def apply_samples(self) -> None:
        """The demo's samples in every datacenter, with the image that was built."""
        for datacenter in self.names:
            samples = self.datacenters.kubectl(datacenter, "kustomize", str(SAMPLES / datacenter))
            text = samples.replace(SAMPLES_REFERENCE, self.image)
            self.datacenters.kubectl(datacenter, "apply", "-f", "-", text=text)

    def settle(self) -> None:
        """Back to what `install` and `apply_samples` made: nodes up, line up, operators running, samples Ready."""
        for line in self.datacenters.topology.lines:
            self.datacenters.set_line(*line.between, rate=line.rate, up=True)
        for each in self.datacenters.status()["datacenters"]:
            for node, running in each["containers"].items():
                if not running:
                    self.datacenters.node(node, "start")
        for datacenter in self.names:
            self.scale_operator(datacenter, self.replicas)
            for item in self.objects(datacenter, KINDS):
                if item["spec"].get("paused"):
                    self.patch(datacenter, item["kind"], item["metadata"]["name"], {"spec": {"paused": False}})
        self.apply_samples()
        self.wait_ready()

    def scale_operator(self, datacenter: str, replicas: int) -> None:
        """Number of operator pods; waits until they are ready, or gone."""
        kubectl = self.datacenters.kubectl
        kubectl(datacenter, "-n", SYSTEM, "scale", f"deployment/{OPERATOR}", f"--replicas={replicas}")
        if replicas:
            kubectl(datacenter, "-n", SYSTEM, "rollout", "status", f"deployment/{OPERATOR}", "--timeout=120s")
        else:
            kubectl(datacenter, "-n", SYSTEM, "wait", "pod", "-l", OPERATOR_PODS, "--for=delete", "--timeout=60s")

    def patch(self, datacenter: str, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """A merge patch of one object in the samples' namespace."""
        command = ("patch", kind, name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(change))
        self.datacenters.kubectl(datacenter, *command)

    def reconciles(self, datacenter: str, kind: str) -> float:
        """Reconciles of a kind that the operators running now have ended, whatever the outcome."""
        total = 0.0
        for pod in self.objects(datacenter, "pods", "-l", OPERATOR_PODS, namespace=SYSTEM):
            path = f"/api/v1/namespaces/{SYSTEM}/pods/{pod['metadata']['name']}:{OPERATOR_PORT}/proxy/metrics"
            text = self.datacenters.kubectl(datacenter, "get", "--raw", path)
            counts = re.findall(rf'^prfaas_reconciles_total{{kind="{kind}",[^}}]*}} (\S+)$', text, re.MULTILINE)
            total += sum(map(float, counts))
        return total

    def nudge(self, datacenter: str, kind: str, name: str) -> None:
        """Wake the reconcile of one object, and return when one has ended since. Raises StackError after 30 s."""
        before = self.reconciles(datacenter, kind)
        self.patch(datacenter, kind, name, {"metadata": {"annotations": {f"{GROUP}/nudge": str(before)}}})
        woken = f"{datacenter}: {kind} {name} was not reconciled"
        eventually(lambda: self.reconciles(datacenter, kind) > before, 30, woken)

    def objects(self, datacenter: str, kind: str, *arguments: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """Objects of a kind (or several, comma-separated), as the API server has them."""
        listed = self.datacenters.kubectl(datacenter, "get", kind, "-n", namespace, "-o", "json", *arguments)
        items: list[dict[str, Any]] = json.loads(listed)["items"]
        return items

    def get(self, datacenter: str, kind: str, name: str, namespace: str = NAMESPACE) -> dict[str, Any]:
        """One object. Raises DatacenterError if it is not there."""
        found: dict[str, Any] = json.loads(
            self.datacenters.kubectl(datacenter, "get", kind, name, "-n", namespace, "-o", "json")
        )
        return found

    def not_ready(self) -> list[str]:
        """What keeps the samples from being Ready and as specified, one text per object; empty when all are."""
        problems = []
        for datacenter in self.names:
            for item in self.objects(datacenter, KINDS):
                state = condition(item, "Ready")
                if state.get("status") == "True":
                    # A pool stays Ready while a rollout goes on.
                    on_its_way = condition(item, "Reconciling")
                    state = on_its_way if on_its_way.get("status") == "True" else state
                seen = state.get("observedGeneration") == item["metadata"]["generation"]
                if not seen or (state["type"], state["status"]) != ("Ready", "True"):
                    reason = state.get("reason", "") if seen else "not seen by the operator yet"
                    problems.append(f"{datacenter} {item['kind']} {item['metadata']['name']}: {reason}")
        return problems

    def wait_ready(self, seconds: float = 180.0) -> None:
        """Until every sample is Ready; says what it waits for when that changes.

        Raises StackError: not in time; the message has each condition that is not as it should be.
        """
        said: list[str] = []

        def look() -> bool:
            nonlocal said
            problems = self.not_ready()
            if problems and problems != said:
                said = problems
                self.log("waiting: " + "; ".join(problems))
            return not problems

        try:
            eventually(look, seconds, "the samples are not Ready")
        except StackError as error:
            raise StackError(f"{error}\n{self.explain()}") from None
        self.log("all resources are Ready")

    def explain(self) -> str:
        """Conditions that are not as they should be, and pods that are not running: for an error message."""
        rows = []
        for datacenter in self.names:
            for item in self.objects(datacenter, KINDS):
                rows += [
                    f"  {datacenter} {item['kind']}/{item['metadata']['name']} {state['type']}={state['status']} "
                    f"{state['reason']}: {state.get('message', '')}"
                    for state in item.get("status", {}).get("conditions", [])
                ]
            rows.append(self.datacenters.kubectl(datacenter, "get", "pods", "-A", "-o", "wide", check=False))
            logs = ("logs", "-n", SYSTEM, "-l", OPERATOR_PODS, "--tail=15")
            rows.append(self.datacenters.kubectl(datacenter, *logs, check=False))
        return "\n".join(rows)

    def target(self) -> Target:
        """West's router as clients reach it from this machine, and the model behind it."""
        address = next(iter(self.datacenters.node_addresses("west").values()))
        model = self.get("west", "pdcluster", "h20")["spec"]["model"]
        return Target(f"http://{address}:{ROUTER_PORT}", model["servedName"], model["name"])

    def threshold(self) -> int:
        """Tokens above which west's routers send a prompt to east, as the policy in force says."""
        tokens: int = self.get("west", "pdcluster", "h20")["status"]["policy"]["thresholds"][0]["tokens"]
        return tokens

    def scales(self) -> Scales:
        """Scales in force, from the engines' arguments, the link and the line. Raises StackError if they disagree."""
        pool = self.get("west", "pdcluster", "h20")["spec"]["engine"]["args"]
        flags = dict(zip(pool[::2], pool[1::2], strict=False))
        link = self.get("west", "interclusterlink", "east")["spec"]["network"]
        scales = Scales(
            time=float(flags.get("--time-scale", 0)),
            kv_bytes=float(flags.get("--kv-byte-scale", 0)),
            line_gbps=self.datacenters.line("east", "west").bits_per_second / 1e9,
            capacity_gbps=bits_per_second(link["capacity"]) / 1e9,
        )
        try:
            scales.check()
        except ValueError as error:
            raise StackError(f"pdcluster h20 in west: {error}") from error
        return scales

    def pods(self) -> dict[str, dict[str, int]]:
        """Running pods by datacenter and by role and accelerator, for the table."""
        found: dict[str, dict[str, int]] = {}
        for datacenter in self.names:
            counts: Counter[str] = Counter()
            for pod in self.objects(datacenter, "pods", "-l", labels.ROLE):
                if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
                    role = pod["metadata"]["labels"][labels.ROLE]
                    selector = pod["spec"].get("nodeSelector", {})
                    pool = selector.get(f"{GROUP}/accelerator")
                    counts[f"{role} ({pool})" if pool else role] += 1
            found[datacenter] = dict(sorted(counts.items()))
        return found

    def kill(self, datacenter: str, pod: Mapping[str, Any]) -> None:
        """SIGKILL every process of a pod, in its node: a crash, of which the API server is told by the kubelet only."""
        uid = pod["metadata"]["uid"].replace("-", "[-_]")
        script = (
            f"for p in $(grep -lE 'pod{uid}' /proc/[0-9]*/cgroup | cut -d/ -f3); do "
            "[ $(cat /proc/$p/comm) = pause ] || kill -9 $p && echo $p; done"
        )
        if not self.datacenters.exec_in_node(pod["spec"]["nodeName"], "bash", "-c", script).strip():
            raise StackError(f"{datacenter}: {pod['metadata']['name']} has no process to kill")

    def routable(self, role: str) -> int:
        """Local instances of a role that west's router may choose now, by the picker's own gauge."""
        gauge = rf'^prfaas_router_endpoints{{link="",role="{role}",state="ready"}} (\S+)$'
        return int(float(re.findall(gauge, self.router_metrics(), re.MULTILINE)[0]))

    def router_metrics(self) -> str:
        """The picker's metrics, of west's router."""
        router = self.objects("west", "pods", "-l", f"{labels.ROLE}=router")[0]["metadata"]["name"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{router}:{labels.PORT_ROUTER_ADMIN}/proxy/metrics"
        return self.datacenters.kubectl("west", "get", "--raw", path)

    def kv_sent(self, datacenter: str) -> dict[str, float]:
        """KV bytes that each prefill pod of a datacenter says it has sent, by pod."""
        sent = {}
        for pod in self.objects(datacenter, "pods", "-l", f"{labels.ROLE}=prefill"):
            name = pod["metadata"]["name"]
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:{labels.PORT_HTTP}/proxy/metrics"
            text = self.datacenters.kubectl(datacenter, "get", "--raw", path)
            sent[name] = sum(
                float(line.removeprefix(KV_SENT)) for line in text.splitlines() if line.startswith(KV_SENT)
            )
        return sent


class LineMeter:
    """What crosses the line between east and west from its making on, by the kernel's count and the workers'."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._before = self._read()

    def _read(self) -> tuple[int, int, dict[str, float]]:
        counters = self._stack.datacenters.line_counters("east", "west").values()
        # Without headers: how many packets the kernel made of the bytes is not what the workers can know.
        kv = sum(traffic.kv_payload for traffic in counters)
        other = sum(traffic.other_bytes for traffic in counters)
        return kv, other, self._stack.kv_sent("east")

    def use(self) -> LineUse:
        """Bytes since the making. A pod that is new since then counts from 0."""
        kv_before, other_before, sent_before = self._before
        kv, other, sent = self._read()
        by_workers = sum(count - sent_before.get(pod, 0) for pod, count in sent.items())
        return LineUse(kv=kv - kv_before, kv_sent=round(by_workers), other=other - other_before)


def condition(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """One condition of an object, or an empty one."""
    found: list[dict[str, Any]] = item.get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == kind), {})


def eventually(look: Callable[[], bool], seconds: float, problem: str, pause: float = 0.5) -> None:
    """Return once `look` is true. Raises StackError with `problem` if it is not within `seconds`.

    A datacenter that does not answer counts as not yet.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            if look():
                return
            trouble = ""
        except DatacenterError as error:
            trouble = f" ({error})"
        if time.monotonic() > deadline:
            raise StackError(f"{problem} after {seconds:.0f} s{trouble}")
        time.sleep(pause)
