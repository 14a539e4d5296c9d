"""The list of decode endpoints that Envoy may connect to, as a file that it watches.

It is the guard of the data plane: a destination that is not on the list is refused by Envoy whoever named it. Envoy
reads the file when another is renamed onto it, so it never sees half a list.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prfaas.routing.world import Endpoint

CLUSTER = "decode"
"""Name of the cluster in Envoy's bootstrap."""


def path(run_dir: Path) -> Path:
    """Where the list is, below the directory shared with Envoy."""
    return run_dir / "eds" / "decode.json"


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Envoy's DiscoveryResponse for these endpoints; the same endpoints give the same document."""
    listed = sorted({(endpoint.host, endpoint.port) for endpoint in endpoints})
    hosts = [{"endpoint": {"address": {"socket_address": {"address": h, "port_value": p}}}} for h, p in listed]
    return {
        "version_info": hashlib.sha256(repr(listed).encode()).hexdigest()[:16],
        "resources": [
            {
                "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
                "cluster_name": CLUSTER,
                "endpoints": [{"lb_endpoints": hosts}],
            }
        ],
    }


def write(run_dir: Path, endpoints: Iterable[Endpoint]) -> None:
    """Replace the list at once. Raises OSError."""
    target = path(run_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The watched directory is watched for renames; the new text is written outside of it.
    fresh = run_dir / "decode.json.new"
    fresh.write_text(json.dumps(document(endpoints)))
    os.replace(fresh, target)


def ensure(run_dir: Path) -> None:
    """Write an empty list where none is yet: a restarted container must not wipe the list of a running Envoy."""
    if not path(run_dir).exists():
        write(run_dir, ())
