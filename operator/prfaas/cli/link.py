"""`prfaas link offer`: let another datacenter read this one's exchange, and print the Secret that it needs for that."""

from __future__ import annotations

import argparse
import asyncio
import sys
from urllib.parse import urlsplit

from prfaas.cli.arguments import existing_file, kubeconfig_file, users_kubeconfig

EXAMPLE = """\
With kubectl pointing here (east), for west to read, and kubectl's context `west` pointing there:

  prfaas link offer --peer west --server https://east.example:6443 --secret-name peer-east \\
    | kubectl --context west -n prfaas-system apply --server-side -f -

Server-side, or kubectl copies the token into an annotation. Then the link in west says
`peer.source.kubeConfigSecretRef.name: peer-east`. Run it again to renew the token before it ends.
To withdraw the offer: kubectl -n prfaas-exchange delete serviceaccount peer-west
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    link = subparsers.add_parser("link", help="join datacenters")
    commands = link.add_subparsers(dest="link_command", required=True, metavar="COMMAND")
    offer = commands.add_parser(
        "offer",
        help="let a peer read this datacenter's exchange; prints a Secret for the peer",
        description="Make a read-only identity for a peer in this datacenter's exchange namespace, and print a Secret "
        "with a kubeconfig for it to standard output. It holds a token: pipe it to where it belongs.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    offer.add_argument("--peer", required=True, metavar="NAME", help="the datacenter that may read")
    offer.add_argument(
        "--server", metavar="URL", help="this API server, as the peer reaches it (default: as the kubeconfig does)"
    )
    offer.add_argument(
        "--ca-file", type=existing_file, metavar="FILE", help="PEM that verifies it (default: the kubeconfig's)"
    )
    offer.add_argument("--tls-server-name", metavar="NAME", help="name in its certificate, where --server has another")
    offer.add_argument("--namespace", default="prfaas-exchange", help="exchange namespace (default: %(default)s)")
    offer.add_argument(
        "--duration", default="8760h", help="life of the token, which the server may shorten (%(default)s)"
    )
    offer.add_argument("--secret-name", default="prfaas-peer", metavar="NAME", help="its name there (%(default)s)")
    offer.add_argument("--secret-namespace", metavar="NS", help="its namespace there (default: kubectl's)")
    offer.add_argument(
        "--kubeconfig", type=kubeconfig_file, metavar="FILE", help="default: $KUBECONFIG or ~/.kube/config"
    )
    offer.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    offer.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the offer: 0, or 1 with one line on standard error."""
    from prfaas.kube.errors import KubeError

    try:
        manifest, expires = asyncio.run(_offer(args))
    except KubeError as error:
        print(f"prfaas link offer: {error.message}", file=sys.stderr)
        return 1
    print(manifest, end="")
    print(f"the token for {args.peer} ends at {expires}", file=sys.stderr)
    return 0


async def _offer(args: argparse.Namespace) -> tuple[str, str]:
    from datetime import timedelta

    from prfaas.api.common import duration_seconds
    from prfaas.kube.client import KubeClient
    from prfaas.kube.errors import Invalid
    from prfaas.links.offer import Offer, local_address, make_offer

    try:
        lifetime = timedelta(seconds=duration_seconds(args.duration))
    except ValueError as error:
        raise Invalid(f"--duration: {error}") from error
    try:
        ca = args.ca_file.read_text() if args.ca_file else None
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--ca-file: {error}") from error
    try:
        path = args.kubeconfig or users_kubeconfig()
    except ValueError as error:
        raise Invalid(str(error)) from error
    async with await KubeClient.from_kubeconfig_file(path, context=args.context) as client:
        server, local_ca = local_address(client)
        if args.server is None and urlsplit(server).hostname in ("127.0.0.1", "localhost", "::1"):
            raise Invalid(f"{server} reaches this machine only: give --server, this API server as the peer reaches it")
        offer = Offer(
            peer=args.peer,
            server=args.server or server,
            ca=ca or local_ca,
            exchange_namespace=args.namespace,
            lifetime=lifetime,
            secret_name=args.secret_name,
            secret_namespace=args.secret_namespace,
            tls_server_name=args.tls_server_name,
        )
        made = await make_offer(client, offer)
        return made.manifest, made.expires
