"""Envoy's bootstrap: the data plane's whole configuration, rendered once when the pod starts.

Nothing in it changes while the pod lives but the list of decode endpoints, which the picker writes to a file that Envoy
watches. Everything else that may change (policy, thresholds, links) the picker reads for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from prfaas.api import labels, router_pod
from prfaas.router import eds

ROUTES: Final = (
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/models", "GET"),
    ("/health", "GET"),
)
"""What clients may ask for; anything else is answered with 404 by Envoy itself."""

BODY_SLACK: Final = 4 * 1024 * 1024
"""Bytes. Room above the largest client body for what the picker adds to it (a KV descriptor lists every block)."""


@dataclass(frozen=True)
class Bootstrap:
    """Everything that the template needs. Seconds and bytes."""

    run_dir: Path = Path(router_pod.RUN_DIR)
    listen: str = "0.0.0.0"
    port: int = labels.PORT_ROUTER
    max_body_bytes: int = router_pod.DEFAULT_MAX_BODY_BYTES
    message_timeout_s: float = 3.0
    """A picker that says nothing for so long is taken for hung: 504. Shorter, and a busy node costs requests."""
    max_message_timeout_s: float = 900.0
    """Above the longest prefill leg, which the picker itself bounds."""
    connect_timeout_s: float = 1.0
    """To decode instances, which are in this datacenter."""
    idle_s: int = 3600
    """A stream on which nothing moves for so long is given up."""


def render(bootstrap: Bootstrap) -> str:
    """The bootstrap as YAML."""
    environment = Environment(
        loader=PackageLoader("prfaas.router"), undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    return environment.get_template("envoy.yaml.j2").render(
        vars(bootstrap) | {"buffer_bytes": bootstrap.max_body_bytes + BODY_SLACK},
        routes=ROUTES,
        # (status, error type, message); the first that matches is used, status 0 matches all.
        local_errors=(
            (413, "RequestTooLargeError", f"The request body is larger than {bootstrap.max_body_bytes} bytes."),
            (503, "Service Unavailable", "No instance could take the request (%RESPONSE_FLAGS%). Try again."),
            (504, "GatewayTimeoutError", "The router did not decide in time. Try again."),
            (0, "RouterError", "The router could not handle the request (%RESPONSE_CODE_DETAILS%)."),
        ),
    )


def write(bootstrap: Bootstrap, out: Path) -> None:
    """Write the bootstrap, and an empty endpoint list if there is none: Envoy does not start without the file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(bootstrap))
    eds.ensure(bootstrap.run_dir)
