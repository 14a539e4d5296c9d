"""Kopf's settings: outlast outages, notice silent watches, never write anything."""

from __future__ import annotations

import random
from collections.abc import Iterator

import kopf

from prfaas.kube.resources import LEADER_WORKER_SET
from prfaas.operator.handlers import CHILD_KINDS, OURS


class EndlessBackoff:
    """Waits between tries of Kopf's requests: for ever, growing to half a minute, jittered. May be iterated again."""

    def __iter__(self) -> Iterator[float]:
        wait = 0.5
        while True:
            yield wait * random.uniform(0.5, 1.0)
            wait = min(30.0, wait * 2)


def kopf_settings(identity: str) -> kopf.OperatorSettings:
    """Settings for one leadership."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    # CRDs are installed before the operator; looking for new ones would need rights on all of them.
    settings.scanning.disabled = True
    settings.networking.error_backoffs = EndlessBackoff()
    settings.networking.connect_timeout = 10.0
    settings.networking.request_timeout = 30.0
    settings.networking.enforce_retry_after = True
    settings.networking.trust_env = False
    settings.watching.connect_timeout = 10.0
    settings.watching.server_timeout = 300  # whole seconds: a fraction is refused by the API server
    settings.watching.client_timeout = 310.0
    settings.watching.inactivity_timeout = 70.0
    settings.watching.reconnect_backoff = 1.0
    for resource in (*CHILD_KINDS, LEADER_WORKER_SET):
        settings.watching.label_selectors[resource.group, resource.plural] = OURS
    settings.queueing.error_delays = (1, 2, 5, 10, 30, 60)
    settings.queueing.exit_timeout = 2.0
    settings.posting.enabled = False
    settings.posting.reporting_component = "prfaas-operator"
    settings.posting.reporting_instance = identity
    settings.process.ultimate_exiting_timeout = None
    return settings
