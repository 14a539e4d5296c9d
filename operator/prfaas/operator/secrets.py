"""Which links use which Secret, so that new credentials are taken up when they come.

Of the Secrets themselves nothing but their names is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from prfaas.kube.client import KubeClient
from prfaas.kube.informer import Change, Informer, log_transitions
from prfaas.kube.resources import SECRET, Key, Object

log = logging.getLogger("prfaas.operator")


class SecretUsers:
    """Link -> name of the Secret that it uses."""

    def __init__(self) -> None:
        self._used: dict[Key, str] = {}

    def uses(self, link: Key, secret: str | None) -> None:
        """The link uses this Secret, and no other."""
        if secret is None:
            self.forget(link)
        else:
            self._used[link] = secret

    def forget(self, link: Key) -> None:
        """The link is gone, or uses none."""
        self._used.pop(link, None)

    def of(self, secret: str) -> list[Key]:
        """The links that use a Secret."""
        return [link for link, name in self._used.items() if name == secret]


def watch(client: KubeClient, namespace: str, users: SecretUsers, enqueue: Callable[[Key], None]) -> Informer:
    """An informer, to be run, that has the users of a changed Secret looked at."""

    def changed(change: Change) -> None:
        for link in users.of(change.name[1]):
            enqueue(link)

    informer = Informer(client, SECRET, namespace=namespace, keep=_without_content)
    informer.on_change(changed)
    log_transitions(informer, log, f"Secrets in {namespace}")
    return informer


def _without_content(secret: Object) -> Object:
    return {"metadata": {name: secret["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}}
