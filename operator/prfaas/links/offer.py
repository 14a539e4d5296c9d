"""Let a peer read this datacenter's exchange, and nothing else: an identity of its own, and a kubeconfig for it.

Each peer gets a service account `peer-<name>` in the exchange namespace, so that the audit log tells who read what and
one peer can be cut off alone (delete its service account). Its token ends; offering again makes a new one, which takes
over in the other datacenter without a restart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import yaml

from prfaas.api import labels
from prfaas.api.common import DNS_LABEL
from prfaas.kube.apply import Applier
from prfaas.kube.client import KubeClient
from prfaas.kube.errors import BadCredentials, Invalid, NotFound
from prfaas.kube.kubeconfig import Credentials, parse_kubeconfig, write_kubeconfig
from prfaas.kube.resources import (
    CONFIG_MAP,
    ENDPOINT_SLICE,
    LEASE,
    NAMESPACE,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE_ACCOUNT,
    Object,
)

READABLE = (CONFIG_MAP, ENDPOINT_SLICE, LEASE)
SECRET_KEY = "kubeconfig"


@dataclass(frozen=True)
class Offer:
    """What is offered to whom, and under which address they reach us."""

    peer: str
    """Name of the datacenter that may read; a DNS label."""
    server: str
    """URL of this datacenter's API server as the peer reaches it."""
    ca: str | None
    """PEM by which the peer recognises it; None: by its system's trust store."""
    exchange_namespace: str
    lifetime: timedelta
    secret_name: str
    secret_namespace: str | None = None
    tls_server_name: str | None = None

    def check(self) -> None:
        """Raises Invalid for what no server would refuse as clearly."""
        for option, value in (("--peer", self.peer), ("--secret-name", self.secret_name)):
            if not re.fullmatch(DNS_LABEL, value) or len(value) > 50:
                raise Invalid(f"{option} {value}: must be lower case letters, digits and dashes, at most 50")
        if self.lifetime < timedelta(minutes=10):
            raise Invalid("--duration: at least 10m, which is what API servers grant")


@dataclass(frozen=True)
class Made:
    """The Secret for the other datacenter. It holds the token: show it to nobody else."""

    manifest: str
    expires: str
    """When the token ends (RFC 3339), as the API server decided."""


def objects(offer: Offer) -> list[Object]:
    """Identity and rights of the peer in the exchange namespace."""
    metadata = {"name": f"peer-{offer.peer}", "namespace": offer.exchange_namespace, "labels": _labels(offer)}
    rules = [
        {"apiGroups": [each.group], "resources": [each.plural], "verbs": ["get", "list", "watch"]} for each in READABLE
    ]
    subject = {"kind": SERVICE_ACCOUNT.kind, "name": metadata["name"], "namespace": offer.exchange_namespace}
    role = {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": metadata["name"]}
    return [
        {
            "apiVersion": SERVICE_ACCOUNT.api_version,
            "kind": SERVICE_ACCOUNT.kind,
            "metadata": metadata,
            "automountServiceAccountToken": False,
        },
        {"apiVersion": ROLE.api_version, "kind": ROLE.kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": ROLE_BINDING.api_version,
            "kind": ROLE_BINDING.kind,
            "metadata": metadata,
            "roleRef": role,
            "subjects": [subject],
        },
    ]


async def make_offer(client: KubeClient, offer: Offer) -> Made:
    """Makes or repairs identity and rights, and a new token. Raises KubeError; NameTaken if the names are in use."""
    offer.check()
    try:
        await client.get(NAMESPACE, offer.exchange_namespace)
    except NotFound:
        text = f"there is no namespace {offer.exchange_namespace}: install the chart prfaas-operator here first"
        raise NotFound(text) from None
    applier = Applier(client, field_manager="prfaas-link-offer")
    for wanted in objects(offer):
        await applier.ensure(wanted, owner=_labels(offer))
    account = f"peer-{offer.peer}"
    seconds = int(offer.lifetime.total_seconds())
    token, expires = await client.create_token(account, offer.exchange_namespace, seconds=seconds)
    credentials = Credentials(offer.server, offer.ca, offer.tls_server_name, token)
    kubeconfig = write_kubeconfig(credentials, name=account, namespace=offer.exchange_namespace)
    parse_kubeconfig(kubeconfig)  # what the other side would refuse is refused here, where it can be put right
    return Made(_secret(offer, kubeconfig), expires)


def local_address(client: KubeClient) -> tuple[str, str | None]:
    """URL and CA (PEM) of the API server that `client` talks to."""
    file = client.api.configuration.ssl_ca_cert
    try:
        return client.server, Path(file).read_text() if file else client.api.configuration.ca_cert_data
    except OSError as error:
        raise BadCredentials(f"the CA certificate cannot be read: {error}") from error


def _labels(offer: Offer) -> dict[str, str]:
    return {
        labels.LABEL_NAME: f"{labels.PART_OF}-peer",
        labels.LABEL_INSTANCE: offer.peer,
        labels.LABEL_COMPONENT: "exchange",
        labels.LABEL_PART_OF: labels.PART_OF,
    }


def _secret(offer: Offer, kubeconfig: str) -> str:
    metadata: Object = {"name": offer.secret_name}
    if offer.secret_namespace:
        metadata["namespace"] = offer.secret_namespace
    metadata["labels"] = {labels.LABEL_NAME: f"{labels.PART_OF}-peer", labels.LABEL_PART_OF: labels.PART_OF}
    secret = {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": metadata,
        "type": "Opaque",
        "stringData": {SECRET_KEY: kubeconfig},
    }
    return yaml.safe_dump(secret, sort_keys=False)
