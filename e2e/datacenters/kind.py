"""Command lines and configuration for kind: one cluster per datacenter.

The same configuration serves a stock `kindest/node` and our own image. Pods get addresses from the address plan and
keep them across clusters (no masquerading), which is why kind's own pod network is off and containerd writes one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from e2e.datacenters import addresses
from e2e.datacenters.cache import NODE_FILES
from e2e.datacenters.topology import Datacenter

PREFIX = "prfaas-"
"""Before every name in Docker and kind, so that ours are told from the user's."""
CLUSTER_LABEL = "io.x-k8s.kind.cluster"
DEAD_NODE_SECONDS = 20
"""After so long without a sign of life a node is NotReady, and after as long again its pods are replaced. Kubernetes'
own defaults (50 s and 300 s) would make a demo of a dying node last six minutes."""


def cluster_name(datacenter: str) -> str:
    """Name of the datacenter's cluster in kind; its nodes' names begin with it."""
    return f"{PREFIX}{datacenter}"


def node_names(datacenter: Datacenter) -> list[str]:
    """Names of the nodes as kind gives them, the control plane first."""
    workers = len(datacenter.groups())
    numbered = ["worker", *(f"worker{number}" for number in range(2, workers + 1))][:workers]
    return [f"{cluster_name(datacenter.name)}-{role}" for role in ("control-plane", *numbered)]


def configuration(datacenter: Datacenter, block: addresses.Block, image: str, reduced: bool) -> str:
    """kind's configuration file. `reduced`: the machine may not lower out-of-memory scores (see oci_wrapper)."""
    mount = {
        "hostPath": str(NODE_FILES / "cni.template"),
        "containerPath": "/etc/containerd/cni.template",
        "readOnly": True,
    }
    nodes: list[dict[str, Any]] = [{"role": "control-plane", "image": image, "extraMounts": [mount]}]
    nodes.extend(
        {"role": "worker", "image": image, "extraMounts": [mount], "labels": group.node_labels()}
        for group in datacenter.groups()
    )
    document = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "name": cluster_name(datacenter.name),
        "networking": {
            "disableDefaultCNI": True,
            "kubeProxyMode": "nftables",
            "podSubnet": str(block.pods),
            "serviceSubnet": str(block.services),
        },
        "containerdConfigPatches": [containerd_patch(reduced)],
        "kubeadmConfigPatches": [yaml.safe_dump(patch, sort_keys=False) for patch in kubeadm_patches()],
        "nodes": nodes,
    }
    return yaml.safe_dump(document, sort_keys=False)


def containerd_patch(reduced: bool) -> str:
    """Settings of the nodes' containerd: the pod network's template, and no more than the machine may give."""
    return (
        '[plugins."io.containerd.grpc.v1.cri"]\n'
        f"  restrict_oom_score_adj = {json.dumps(reduced)}\n"
        "  tolerate_missing_hugetlb_controller = true\n"
        '[plugins."io.containerd.grpc.v1.cri".cni]\n'
        '  conf_template = "/etc/containerd/cni.template"\n'
    )


def kubeadm_patches() -> list[dict[str, Any]]:
    """Settings of Kubernetes itself: quick notice of dead nodes, and little work at rest."""

    def arguments(**values: str) -> list[dict[str, str]]:
        return [{"name": name.replace("_", "-"), "value": value} for name, value in values.items()]

    seconds = str(DEAD_NODE_SECONDS)
    alone = arguments(leader_elect="false")  # one of each: nobody to elect, and a Lease less to renew
    cluster = {
        "kind": "ClusterConfiguration",
        "apiServer": {
            "extraArgs": arguments(
                default_not_ready_toleration_seconds=seconds, default_unreachable_toleration_seconds=seconds
            )
        },
        "controllerManager": {"extraArgs": [*alone, *arguments(node_monitor_grace_period=f"{seconds}s")]},
        "scheduler": {"extraArgs": alone},
        # An emulated datacenter need not survive a power cut of the machine.
        "etcd": {"local": {"extraArgs": arguments(unsafe_no_fsync="true")}},
    }
    kubelet = {"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1", "failCgroupV1": False}
    return [cluster, kubelet]


def create_command(kind: Path, configuration_file: Path, kubeconfig: Path) -> list[str]:
    """Command line that creates a cluster. Its readiness is awaited by us, for all clusters at once."""
    return [
        *(str(kind), "create", "cluster", "--config", str(configuration_file)),
        *("--kubeconfig", str(kubeconfig), "--wait", "0s", "--retain"),
    ]


def delete_command(kind: Path, datacenter: str, kubeconfig: Path) -> list[str]:
    """Command line that deletes a cluster, whole or half made."""
    return [str(kind), "delete", "cluster", "--name", cluster_name(datacenter), "--kubeconfig", str(kubeconfig)]


def network_name(datacenter: str) -> str:
    """Docker network of a datacenter's nodes."""
    return f"{PREFIX}{datacenter}"


def network_command(name: str, subnet: object, gateway: object) -> list[str]:
    """Arguments of docker that make a network of a fixed range."""
    return [
        *("network", "create", "--driver", "bridge", "--label", f"{PREFIX}network={name}"),
        *("--subnet", str(subnet), "--gateway", str(gateway), name),
    ]
