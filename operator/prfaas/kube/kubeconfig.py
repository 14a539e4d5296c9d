"""Kubeconfigs that come from a Secret, read with suspicion.

Whoever can write such a Secret must not gain what our process can do: so no exec or auth-provider plugins, no paths to
files of ours, https only, certificates always verified, and a bound on size. An unknown or refused member is an error
that names its path, never ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import yaml

from prfaas.kube.errors import BadCredentials

MAX_BYTES = 64 * 1024

_CLUSTER_MEMBERS = {"server", "certificate-authority-data", "tls-server-name"}
_USER_MEMBERS = {"token", "client-certificate-data", "client-key-data"}


@dataclass(frozen=True)
class Credentials:
    """Where an API server is, how it is recognised, and how we prove who we are. Secrets stay out of the repr."""

    server: str
    ca: str | None = None
    """PEM; None: the system's trust store."""
    tls_server_name: str | None = None
    token: str | None = field(default=None, repr=False)
    client_certificate: str | None = field(default=None, repr=False)
    client_key: str | None = field(default=None, repr=False)

    @property
    def expires_at(self) -> datetime | None:
        """When the bearer token says that it ends (its `exp` claim); None if it does not say."""
        return _token_expiry(self.token) if self.token else None


def parse_kubeconfig(document: str | bytes | Mapping[str, Any]) -> Credentials:
    """The credentials of the current context. Raises BadCredentials with the path of what is wrong."""
    config = _load(document)
    context_name = _text(config, "current-context", "current-context")
    context = _entry(config, "contexts", "context", context_name)
    where = f"contexts[{context_name}].context"
    cluster_name = _text(context, "cluster", f"{where}.cluster")
    user_name = _text(context, "user", f"{where}.user")
    cluster = _entry(config, "clusters", "cluster", cluster_name)
    user = _entry(config, "users", "user", user_name)
    _only(cluster, _CLUSTER_MEMBERS, f"clusters[{cluster_name}].cluster")
    _only(user, _USER_MEMBERS, f"users[{user_name}].user")

    at = f"clusters[{cluster_name}].cluster"
    server = _server(_text(cluster, "server", f"{at}.server"), f"{at}.server")
    ca = _pem(cluster, "certificate-authority-data", at)
    tls_server_name = _text(cluster, "tls-server-name", at) if "tls-server-name" in cluster else None

    at = f"users[{user_name}].user"
    token = _token(user, at) if "token" in user else None
    certificate = _pem(user, "client-certificate-data", at)
    key = _pem(user, "client-key-data", at)
    if (certificate is None) != (key is None):
        raise BadCredentials(f"{at}: client-certificate-data and client-key-data go together")
    if token is None and certificate is None:
        raise BadCredentials(f"{at}: holds neither a token nor a client certificate")
    return Credentials(server, ca, tls_server_name, token, certificate, key)


def write_kubeconfig(credentials: Credentials, *, name: str, namespace: str) -> str:
    """The YAML of a kubeconfig with this one context. It holds the secrets: print it only where they belong."""
    cluster: dict[str, Any] = {"server": credentials.server}
    if credentials.ca:
        cluster["certificate-authority-data"] = base64.b64encode(credentials.ca.encode()).decode()
    if credentials.tls_server_name:
        cluster["tls-server-name"] = credentials.tls_server_name
    user: dict[str, Any] = {}
    if credentials.token:
        user["token"] = credentials.token
    if credentials.client_certificate and credentials.client_key:
        user["client-certificate-data"] = base64.b64encode(credentials.client_certificate.encode()).decode()
        user["client-key-data"] = base64.b64encode(credentials.client_key.encode()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        "current-context": name,
    }
    return yaml.safe_dump(config, sort_keys=False)


def _load(document: str | bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(document, Mapping):
        return document
    raw = document.encode() if isinstance(document, str) else document
    if len(raw) > MAX_BYTES:
        raise BadCredentials(f"kubeconfig is larger than {MAX_BYTES} bytes")
    try:
        config = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        # The parser's own message quotes the text, which holds secrets.
        raise BadCredentials("kubeconfig is not valid YAML") from None
    if not isinstance(config, dict):
        raise BadCredentials("kubeconfig is not a mapping")
    return config


def _entry(config: Mapping[str, Any], plural: str, singular: str, name: str) -> Mapping[str, Any]:
    entries = config.get(plural)
    if not isinstance(entries, list):
        raise BadCredentials(f"{plural}: must be a list")
    found = [entry for entry in entries if isinstance(entry, dict) and entry.get("name") == name]
    if len(found) != 1:
        raise BadCredentials(f"{plural}: needs exactly one entry named {name}, has {len(found)}")
    value = found[0].get(singular)
    if not isinstance(value, dict):
        raise BadCredentials(f"{plural}[{name}].{singular}: must be a mapping")
    return value


def _only(value: Mapping[str, Any], allowed: set[str], path: str) -> None:
    refused = sorted(str(member) for member in value if member not in allowed)
    if refused:
        raise BadCredentials(f"{path}.{refused[0]}: not accepted here; allowed: {', '.join(sorted(allowed))}")


def _text(value: Mapping[str, Any], member: str, path: str) -> str:
    text = value.get(member)
    if not isinstance(text, str) or not text:
        raise BadCredentials(f"{path}: must be a non-empty string")
    return text


def _token(user: Mapping[str, Any], at: str) -> str:
    token = _text(user, "token", f"{at}.token").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadCredentials(f"{at}.token: holds characters that no bearer token has")
    return token


def _server(url: str, path: str) -> str:
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        raise BadCredentials(f"{path}: is not a URL") from None
    if parts.scheme != "https":
        raise BadCredentials(f"{path}: must begin with https://")
    if not parts.hostname or not port_is_valid or parts.username is not None or parts.query or parts.fragment:
        raise BadCredentials(f"{path}: must be https://host[:port][/path]")
    return url.rstrip("/")


def _pem(value: Mapping[str, Any], member: str, at: str) -> str | None:
    if member not in value:
        return None
    text = _text(value, member, f"{at}.{member}")
    try:
        pem = base64.b64decode("".join(text.split()), validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        raise BadCredentials(f"{at}.{member}: is not base64 of a PEM document") from None
    if "-----BEGIN " not in pem:
        raise BadCredentials(f"{at}.{member}: is not base64 of a PEM document")
    return pem


def _token_expiry(token: str) -> datetime | None:
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return datetime.fromtimestamp(int(claims["exp"]), UTC)
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None
