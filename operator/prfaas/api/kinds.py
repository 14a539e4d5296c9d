"""The three kinds, by name."""

from __future__ import annotations

from prfaas.api.inter_cluster_link import InterClusterLink
from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.api.resource import ApiObject

KINDS: dict[str, type[ApiObject]] = {
    "PrfaaSCluster": PrfaaSCluster,
    "PDCluster": PDCluster,
    "InterClusterLink": InterClusterLink,
}
