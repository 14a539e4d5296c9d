"""Kubeconfigs from Secrets: what is accepted, and what is refused with its path."""

from __future__ import annotations

import base64
import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from prfaas.kube.errors import BadCredentials
from prfaas.kube.kubeconfig import MAX_BYTES, Credentials, parse_kubeconfig, write_kubeconfig

PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
GOOD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "https://east.example:6443"}}],
    "users": [{"name": "u", "user": {"token": "secret-token"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "prfaas-exchange"}}],
    "current-context": "x",
}


def variant(path: str, value: object) -> dict[str, Any]:
    """GOOD with the member at `path` set, or removed when `value` is ...; integers in the path index lists."""
    config = copy.deepcopy(GOOD)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    target: Any = config
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return config


def test_a_good_one() -> None:
    assert parse_kubeconfig(yaml.safe_dump(GOOD)) == Credentials("https://east.example:6443", token="secret-token")


def test_what_is_written_is_read_back() -> None:
    full = Credentials("https://[fd00::1]:6443/k8s", PEM, "east", "t", PEM, PEM)
    assert parse_kubeconfig(write_kubeconfig(full, name="east", namespace="ns")) == full


REFUSED = {
    "an exec plugin": (
        variant("users/0/user/exec", {"command": "sh"}),
        r"users\[u\].user.exec: not accepted here; allowed: client-certificate-data, client-key-data, token",
    ),
    "an auth provider": (variant("users/0/user/auth-provider", {"name": "gcp"}), "auth-provider: not accepted"),
    "a token in a file of ours": (variant("users/0/user/tokenFile", "/etc/shadow"), "tokenFile: not accepted"),
    "a key in a file of ours": (variant("users/0/user/client-key", "/key"), "client-key: not accepted"),
    "a password": (variant("users/0/user/password", "x"), "password: not accepted"),
    "a CA in a file of ours": (
        variant("clusters/0/cluster/certificate-authority", "/ca"),
        "certificate-authority: not accepted",
    ),
    "an unverified server": (
        variant("clusters/0/cluster/insecure-skip-tls-verify", True),
        "insecure-skip-tls-verify: not accepted",
    ),
    "a proxy": (variant("clusters/0/cluster/proxy-url", "http://p"), "proxy-url: not accepted"),
    "plain http": (
        variant("clusters/0/cluster/server", "http://east.example"),
        r"clusters\[c\].cluster.server: must begin with https://",
    ),
    "a user in the URL": (variant("clusters/0/cluster/server", "https://u:p@east"), "must be https://host"),
    "no host": (variant("clusters/0/cluster/server", "https://:443"), "must be https://host"),
    "a port that is none": (variant("clusters/0/cluster/server", "https://east:port"), "is not a URL"),
    "port zero": (variant("clusters/0/cluster/server", "https://east:0"), "must be https://host"),
    "no server": (variant("clusters/0/cluster/server", ...), r"clusters\[c\].cluster.server: must be a non-empty"),
    "no credentials": (variant("users/0/user/token", ...), "neither a token nor a client certificate"),
    "half a certificate": (
        variant("users/0/user/client-key-data", base64.b64encode(PEM.encode()).decode()),
        "client-certificate-data and client-key-data go together",
    ),
    "a token with a line break": (variant("users/0/user/token", "a\nHost: b"), "token: holds characters"),
    "a CA that is not base64": (
        variant("clusters/0/cluster/certificate-authority-data", "%%%"),
        "certificate-authority-data: is not base64 of a PEM document",
    ),
    "a CA that is not PEM": (
        variant("clusters/0/cluster/certificate-authority-data", base64.b64encode(b"xx").decode()),
        "is not base64 of a PEM document",
    ),
    "no current context": (variant("current-context", ...), "current-context: must be a non-empty string"),
    "an unknown context": (variant("current-context", "y"), "contexts: needs exactly one entry named y, has 0"),
    "two users of one name": (
        variant("users", [GOOD["users"][0], GOOD["users"][0]]),
        "users: needs exactly one entry named u, has 2",
    ),
    "clusters that are no list": (variant("clusters", "c"), "clusters: must be a list"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCredentials, match=message) as caught:
        parse_kubeconfig(yaml.safe_dump(config))
    assert "secret-token" not in str(caught.value)


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", "a: [", "- a", "", "[" * 5000, "x" * (MAX_BYTES + 1)])
def test_refused_text(text: str | bytes) -> None:
    with pytest.raises(BadCredentials):
        parse_kubeconfig(text)


def test_secrets_are_not_in_the_repr() -> None:
    credentials = Credentials("https://e", token="top-secret", client_certificate="cert-pem", client_key="key-pem")
    assert not any(word in repr(credentials) for word in ("top-secret", "cert-pem", "key-pem"))


def test_a_token_says_when_it_ends() -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 1893456000}).encode()).decode().rstrip("=")
    assert Credentials("https://e", token=f"h.{claims}.s").expires_at == datetime(2030, 1, 1, tzinfo=UTC)
    for token in ("opaque", "a.b.c", "a.!!.c", f"h.{base64.urlsafe_b64encode(b'[]').decode()}.s"):
        assert Credentials("https://e", token=token).expires_at is None
