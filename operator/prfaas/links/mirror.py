"""The peer's prefill endpoints as Kubernetes objects here: a Service without selector, and EndpointSlices by key.

Pure. Whoever routes requests watches these slices and needs no peer. Readiness is passed on as published. An address
that cannot lie in another datacenter (loopback, link-local, multicast, unspecified) is left out and named: a peer must
not be able to direct our requests at our own nodes' local services.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from prfaas.api import labels
from prfaas.api.exchange import PublishedEndpoint
from prfaas.kube.resources import ENDPOINT_SLICE, SERVICE, Object

ENDPOINTS_PER_SLICE = 100
"""What Kubernetes' own controller puts in a slice by default."""
MANAGED_BY_LABEL = "endpointslice.kubernetes.io/managed-by"


@dataclass(frozen=True)
class Mirrored:
    """The usable endpoints, and why each other one is not."""

    endpoints: tuple[PublishedEndpoint, ...]
    refused: tuple[str, ...] = ()


def usable(endpoints: Iterable[PublishedEndpoint]) -> Mirrored:
    """Sorts published endpoints into those that may be mirrored and those that may not; one address and port once."""
    good: dict[tuple[str, int], PublishedEndpoint] = {}
    refused: list[str] = []
    for endpoint in sorted(endpoints, key=lambda each: each.name):
        address = endpoint.address
        if why := _unusable(address):
            refused.append(f"endpoint {endpoint.name}: {address} is {why}")
        elif (str(address), endpoint.port) in good:
            refused.append(f"endpoint {endpoint.name}: {address} port {endpoint.port} is published twice")
        else:
            good[str(address), endpoint.port] = endpoint
    return Mirrored(tuple(good.values()), tuple(refused))


def mirrored_objects(
    link: str,
    namespace: str,
    endpoints: Sequence[PublishedEndpoint],
    *,
    owner_labels: Mapping[str, str],
    owner_reference: Mapping[str, object],
) -> list[Object]:
    """The Service and the slices of a link's usable endpoints, each with its key; without endpoints only the Service.

    `owner_labels` and `owner_reference` make them the link's children, so that they go with it.
    """
    name = labels.mirror_service(link)
    common = {**owner_labels, labels.LINK: link, labels.ROLE: labels.ROLE_PREFILL, labels.LABEL_PART_OF: labels.PART_OF}
    service: Object = {
        "apiVersion": SERVICE.api_version,
        "kind": SERVICE.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": common,
            "ownerReferences": [dict(owner_reference)],
        },
        "spec": {"clusterIP": "None", "ports": [{"name": "http", "port": labels.PORT_HTTP, "protocol": "TCP"}]},
    }
    slices: list[Object] = []
    for (key, family, port), members in _groups(endpoints).items():
        for start in range(0, len(members), ENDPOINTS_PER_SLICE):
            metadata: Object = {
                "name": f"{name}-{key[:10]}-{family.lower()}-{port}-{start // ENDPOINTS_PER_SLICE}",
                "namespace": namespace,
                "labels": {
                    **common,
                    labels.COMPATIBILITY_KEY: key,
                    labels.SERVICE_NAME: name,
                    MANAGED_BY_LABEL: labels.MANAGED_BY,
                },
                "ownerReferences": [dict(owner_reference)],
            }
            slices.append(
                {
                    "apiVersion": ENDPOINT_SLICE.api_version,
                    "kind": ENDPOINT_SLICE.kind,
                    "metadata": metadata,
                    "addressType": family,
                    "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
                    "endpoints": [_endpoint(each) for each in members[start : start + ENDPOINTS_PER_SLICE]],
                }
            )
    return [service, *slices]


def _groups(endpoints: Sequence[PublishedEndpoint]) -> dict[tuple[str, str, int], list[PublishedEndpoint]]:
    """A slice has one compatibility key, by our choice, and one address family and set of ports, by Kubernetes'."""
    groups: dict[tuple[str, str, int], list[PublishedEndpoint]] = {}
    for each in sorted(endpoints, key=lambda each: each.name):
        family = "IPv4" if isinstance(each.address, IPv4Address) else "IPv6"
        groups.setdefault((each.compatibility_key or "", family, each.port), []).append(each)
    return dict(sorted(groups.items()))


def _endpoint(endpoint: PublishedEndpoint) -> Object:
    written: Object = {
        "addresses": [str(endpoint.address)],
        "conditions": {"ready": endpoint.ready, "serving": endpoint.ready, "terminating": False},
    }
    if len(endpoint.name) <= 63 and "." not in endpoint.name:  # else it is no host name
        written["hostname"] = endpoint.name
    return written


def _unusable(address: IPv4Address | IPv6Address) -> str:
    # An IPv4 address in IPv6 clothes is judged as what it is.
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    plain = inner or address
    kinds = {
        "a loopback address": plain.is_loopback,
        "a link-local address": plain.is_link_local,
        "a multicast address": plain.is_multicast,
        "the unspecified address": plain.is_unspecified,
        "a broadcast address": plain == IPv4Address("255.255.255.255"),
        "an IPv4 address written as IPv6": inner is not None,
    }
    return next((text for text, holds in kinds.items() if holds), "")
