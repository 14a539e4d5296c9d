"""`prfaas router`: the two commands of a router pod."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prfaas.api import labels, router_pod
from prfaas.cli.arguments import count, kubeconfig_file, port, seconds


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `router bootstrap` and `router serve`."""
    router = subparsers.add_parser("router", help="the data plane of a PDCluster").add_subparsers(
        dest="router_command", required=True, metavar="COMMAND"
    )
    bootstrap = router.add_parser("bootstrap", help="write Envoy's configuration")
    bootstrap.add_argument("--out", type=Path, required=True, metavar="FILE")
    bootstrap.add_argument("--run-dir", type=Path, default=Path(router_pod.RUN_DIR), help="shared with Envoy")
    bootstrap.add_argument("--listen", default="0.0.0.0", metavar="ADDRESS")
    bootstrap.add_argument("--port", type=port, default=labels.PORT_ROUTER)
    bootstrap.add_argument("--max-body-bytes", type=count, default=router_pod.DEFAULT_MAX_BODY_BYTES)
    bootstrap.add_argument("--picker-timeout", type=seconds, default=3.0, help="seconds until a silent picker is a 504")
    bootstrap.set_defaults(run=_bootstrap)

    serve = router.add_parser("serve", help="decide where requests go (Envoy's external processor)")
    serve.add_argument("--namespace", required=True)
    serve.add_argument("--cluster", required=True, metavar="PDCLUSTER")
    serve.add_argument("--run-dir", type=Path, default=Path(router_pod.RUN_DIR), help="shared with Envoy")
    serve.add_argument("--admin-host", default="0.0.0.0", metavar="ADDRESS")
    serve.add_argument("--admin-port", type=port, default=labels.PORT_ROUTER_ADMIN)
    serve.add_argument("--policy-writer", action="append", default=[], metavar="USER", help="may use /v1/policy")
    serve.add_argument("--max-body-bytes", type=count, default=router_pod.DEFAULT_MAX_BODY_BYTES)
    serve.add_argument("--prefill-timeout", type=seconds, default=300.0, help="seconds of one prefill leg")
    serve.add_argument(
        "--kubeconfig",
        type=kubeconfig_file,
        metavar="FILE",
        help="outside of a pod; default: the pod's service account",
    )
    serve.set_defaults(run=_serve)


def _bootstrap(args: argparse.Namespace) -> int:
    from prfaas.router.bootstrap import Bootstrap, write

    config = Bootstrap(
        run_dir=args.run_dir,
        listen=args.listen,
        port=args.port,
        max_body_bytes=args.max_body_bytes,
        message_timeout_s=args.picker_timeout,
    )
    try:
        write(config, args.out)
    except OSError as error:
        print(f"prfaas router bootstrap: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from prfaas import logs
    from prfaas.kube.errors import BadCredentials
    from prfaas.router.main import serve
    from prfaas.router.prefill import LegTimes
    from prfaas.router.serve import Settings

    logs.set_up()
    settings = Settings(
        run_dir=args.run_dir,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        policy_writers=frozenset(args.policy_writer),
        max_body_bytes=args.max_body_bytes,
        leg=LegTimes(total=args.prefill_timeout),
    )
    try:
        asyncio.run(serve(settings, args.namespace, args.cluster, args.kubeconfig))
    except (BadCredentials, OSError) as error:  # what goes wrong later comes as a group, and with its traceback
        hint = (
            "; outside of a pod give --kubeconfig" if isinstance(error, BadCredentials) and not args.kubeconfig else ""
        )
        print(f"prfaas router serve: {getattr(error, 'message', error)}{hint}", file=sys.stderr)
        return 1
    return 0
