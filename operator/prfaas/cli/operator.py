"""`prfaas operator`: the operator's process. Its flags are what the chart's values become."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.arguments import kubeconfig_file, label, port, seconds

if TYPE_CHECKING:
    from prfaas.workloads.router import RouterSettings

DEFAULT_ENVOY = "docker.io/envoyproxy/envoy:v1.40.0"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("operator", help="run the operator of one datacenter")
    parser.add_argument("--cluster-id", type=label, required=True, help="identity of this datacenter towards its peers")
    parser.add_argument(
        "--namespace", required=True, help="namespace of the operator: its Lease and the links' Secrets"
    )
    parser.add_argument(
        "--watch-namespace", action="append", default=[], metavar="NAMESPACE", help="act here only; may be repeated"
    )
    parser.add_argument("--exchange-namespace", default="prfaas-exchange", help="what peers may read of us is here")
    parser.add_argument("--image", required=True, help="image of this program, for the routers' pods")
    add_router_arguments(parser)
    parser.add_argument("--router-token", type=Path, help="file with a token of audience prfaas-router")
    parser.add_argument(
        "--kubeconfig", type=kubeconfig_file, metavar="FILE", help="absent: the pod's own service account"
    )
    parser.add_argument("--port", type=port, default=8080, help="port of /livez, /readyz and /metrics")
    parser.add_argument(
        "--resync", type=seconds, default=300.0, metavar="SECONDS", help="look at everything this often"
    )
    parser.add_argument(
        "--read-nodes", action="store_true", help="list nodes, and fetch models to every node of a pool"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.set_defaults(run=_run)


def add_router_arguments(parser: argparse._ActionsContainer) -> None:
    """What an installation decides about routers, but for the image, which has no default of its own here."""
    parser.add_argument("--envoy-image", default=DEFAULT_ENVOY, help="image of Envoy, where a PDCluster names none")
    parser.add_argument("--image-pull-policy", default="IfNotPresent", choices=["Always", "IfNotPresent", "Never"])
    parser.add_argument("--router-cluster-role", default="prfaas-router", help="ClusterRole with the routers' rights")
    parser.add_argument("--service-account", default="prfaas-operator", help="the operator's own service account")


def router_settings(args: argparse.Namespace, namespace: str) -> RouterSettings:
    """The same as the operator's code has it; `namespace` is the operator's."""
    from prfaas.workloads.router import RouterSettings

    return RouterSettings(
        operator_image=args.image,
        envoy_image=args.envoy_image,
        cluster_role=args.router_cluster_role,
        policy_writers=(f"system:serviceaccount:{namespace}:{args.service_account}",),
        image_pull_policy=args.image_pull_policy,
    )


def _run(args: argparse.Namespace) -> int:
    import asyncio
    from uuid import uuid4

    from prfaas import logs
    from prfaas.operator.config import Config
    from prfaas.operator.run import run

    logs.set_up(args.log_level)
    config = Config(
        cluster_id=args.cluster_id,
        namespace=args.namespace,
        # Unique to this process: a pod whose container restarts must not take its own old term for its own.
        identity=f"{os.environ.get('POD_NAME') or os.uname().nodename}_{uuid4().hex[:8]}",
        routers=router_settings(args, args.namespace),
        exchange_namespace=args.exchange_namespace,
        namespaces=tuple(args.watch_namespace),
        kubeconfig=args.kubeconfig,
        read_nodes=args.read_nodes,
        router_token=args.router_token,
        port=args.port,
        resync=args.resync,
    )
    try:
        return asyncio.run(run(config))
    except OSError as error:  # the port is taken, most likely; what other servers do comes as a KubeError
        print(f"prfaas operator: {error}", file=sys.stderr)
        return 1
