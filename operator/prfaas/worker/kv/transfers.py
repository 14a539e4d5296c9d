"""Which connector an engine has: by `--kv-transfer-config`."""

from __future__ import annotations

from prfaas.worker.kv.connector import Connector, Services
from prfaas.worker.kv.mooncake import Mooncake
from prfaas.worker.kv.nixl_pull import NixlPull
from prfaas.worker.kv.nixl_push import NixlPush

_CONNECTORS = {"pull": NixlPull, "push": NixlPush, "mooncake": Mooncake}


def connector(services: Services) -> Connector:
    """The connector of the engine that these services belong to."""
    transfer = services.config.kv_transfer
    return Connector(services) if transfer is None else _CONNECTORS[transfer.mode](services, transfer)
