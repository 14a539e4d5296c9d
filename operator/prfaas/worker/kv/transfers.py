"""Which connector an engine has: by `--kv-transfer-config`."""

from __future__ import annotations

from prfaas.worker.kv.connector import Connector, Services
from prfaas.worker.kv.nixl_pull import NixlPull


def connector(services: Services) -> Connector:
    """The connector of the engine that these services belong to."""
    transfer = services.config.kv_transfer
    if transfer is None:
        return Connector(services)
    return NixlPull(services, transfer)
