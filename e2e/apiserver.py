"""A real API server for tests: etcd and kube-apiserver on loopback, nothing else, ready in seconds.

What it has: schemas and CEL, server-side apply, RBAC, watches, TokenRequest and TokenReview, an audit log. What it has
not: controllers. So nothing makes EndpointSlices, collects garbage, runs pods or finishes the deletion of a namespace.

`python -m e2e.apiserver` runs one until interrupted and prints its kubeconfig.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode

import yaml

from e2e.datacenters.build import tool

CRDS = Path(__file__).parent.parent / "crds"
ADMIN_TOKEN = "admin"
START_SECONDS = 60.0
"""Longest start that is waited for. It takes about 8 s; a loaded machine may take several times that."""

PORTS = range(20_000, 30_000)

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["ResponseStarted"],
    "rules": [{"level": "Metadata"}],
}


class ApiServerError(RuntimeError):
    """The servers did not start; the message ends with what they logged last."""


@dataclass(frozen=True)
class Answer:
    """What the API server answered."""

    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        """The server's own words about an error, or nothing."""
        return str(self.body.get("message", "")) if self.body.get("kind") == "Status" else ""


@dataclass(frozen=True)
class AuditEvent:
    """One request, as the audit log has it."""

    verb: str
    user: str
    agent: str
    uri: str
    namespace: str | None
    resource: str | None
    subresource: str | None
    name: str | None

    @property
    def is_write(self) -> bool:
        return self.verb not in ("get", "list", "watch")


class AuditLog:
    """Requests in the order in which they arrived. They are logged before they are handled, so none can be missed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mark(self) -> int:
        """A place in the log, for `events(since=...)`."""
        return self.path.stat().st_size if self.path.exists() else 0

    def events(self, since: int = 0) -> Iterator[AuditEvent]:
        """Requests after a mark, without those that the API server makes to itself."""
        with self.path.open("rb") as handle:
            handle.seek(since)
            for line in handle:
                entry = json.loads(line)
                user = entry["user"].get("username", "")
                if entry["stage"] != "RequestReceived" or user == "system:apiserver":
                    continue
                target = entry.get("objectRef", {})
                yield AuditEvent(
                    verb=entry["verb"],
                    user=user,
                    agent=entry.get("userAgent", ""),
                    uri=entry["requestURI"],
                    namespace=target.get("namespace"),
                    resource=target.get("resource"),
                    subresource=target.get("subresource"),
                    name=target.get("name"),
                )

    def writes(self, since: int = 0, namespace: str | None = None) -> list[AuditEvent]:
        """Requests after a mark that write (in one namespace, where one is named)."""
        return [
            event
            for event in self.events(since)
            if event.is_write and (namespace is None or event.namespace == namespace)
        ]


class ApiServer:
    """etcd and kube-apiserver. `start` and `stop` may be called again and again: data, address and tokens stay."""

    def __init__(self, home: Path, find: Callable[[str], Path] = tool) -> None:
        self.home = home
        self.kubeconfig = home / "admin.kubeconfig"
        self.audit = AuditLog(home / "audit.log")
        self._find = find
        self._etcd_port, self._etcd_peer_port, self._port = free_ports(3)
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the API server."""
        return f"https://127.0.0.1:{self._port}"

    @property
    def ca_file(self) -> Path:
        """Certificate that verifies the server; there once it has started."""
        return self.home / "certs" / "apiserver.crt"

    def start(self) -> None:
        """Start what does not run and wait until the server says that it is ready.

        :raises ApiServerError: it ended, or is not ready after START_SECONDS.
        """
        deadline = time.monotonic() + START_SECONDS
        self._prepare()
        if self._etcd is None:
            self._etcd = self._spawn("etcd", self._etcd_arguments())
        if self._server is None:
            self._server = self._spawn("kube-apiserver", self._server_arguments())
        while not self._is_ready():
            for name, process in (("etcd", self._etcd), ("kube-apiserver", self._server)):
                if process.poll() is not None:
                    raise ApiServerError(f"{name} ended with {process.returncode}:\n{self._tail(name)}")
            if time.monotonic() > deadline:
                raise ApiServerError(f"not ready after {START_SECONDS:.0f} s:\n{self._tail('kube-apiserver')}")
            time.sleep(0.1)
        self._write_kubeconfig()

    def stop(self) -> None:
        """Stop the API server alone, as in an outage: connections are refused. etcd keeps the data."""
        end(self._server)
        self._server = None

    def close(self) -> None:
        """Stop both."""
        self.stop()
        end(self._etcd)
        self._etcd = None

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """While in this block the API server accepts connections and never answers."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        token: str = ADMIN_TOKEN,
        timeout: float = 30.0,
    ) -> Answer:
        """One request as the administrator (or another token's owner)."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=context, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(
                method,
                path + ("?" + urlencode(query, quote_via=quote) if query else ""),
                None if body is None else json.dumps(body),
                {"Authorization": f"Bearer {token}", "Content-Type": content_type, "Accept": accept},
            )
            response = connection.getresponse()
            text = response.read()
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = {"text": text.decode()}
        return Answer(response.status, parsed)

    def apply(self, path: str, body: Mapping[str, Any], *, owner: str = "test", force: bool = True) -> Answer:
        """Server-side apply of one object at its path, with strict field validation."""
        query = {"fieldManager": owner, "force": str(force).lower(), "fieldValidation": "Strict"}
        return self.request("PATCH", path, body, query=query, content_type="application/apply-patch+yaml")

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; the caller looks at the return code."""
        return subprocess.run(
            [str(self._find("kubectl")), *arguments],
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.home)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def install_crds(self, folder: Path = CRDS) -> None:
        """Apply every CRD of the folder and wait until the server serves it.

        :raises ApiServerError: a CRD was refused; the message is the server's.
        """
        names = []
        for file in sorted(folder.glob("*.yaml")):
            for crd in yaml.safe_load_all(file.read_text()):
                names.append(crd["metadata"]["name"])
                path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names[-1]}"
                answer = self.apply(path, crd)
                if answer.status not in (200, 201):
                    raise ApiServerError(f"{file.name}: {answer.message}")
        for name in names:
            self._wait_for_crd(name)

    def _wait_for_crd(self, name: str) -> None:
        plural, group = name.split(".", 1)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            served = self.request("GET", f"/apis/{group}").body.get("preferredVersion", {}).get("groupVersion")
            if served and self.request("GET", f"/apis/{served}/{plural}").status == 200:
                return
            time.sleep(0.05)
        raise ApiServerError(f"{name} is not served after 20 s")

    def _prepare(self) -> None:
        files = self.home / "files"
        if files.exists():
            return
        files.mkdir(parents=True)
        (files / "tokens.csv").write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")
        (files / "audit.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))
        # The version is written out, or kubeadm asks the internet for it.
        (files / "kubeadm.yaml").write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "kubeadm.k8s.io/v1beta4",
                    "kind": "ClusterConfiguration",
                    "kubernetesVersion": "v1.37.0",
                    "certificatesDir": str(files),
                }
            )
        )
        made = subprocess.run(
            [str(self._find("kubeadm")), "init", "phase", "certs", "sa", "--config", str(files / "kubeadm.yaml")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if made.returncode != 0:
            raise ApiServerError(f"no key for service account tokens: {made.stderr}")

    def _etcd_arguments(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._etcd_peer_port))
        return [
            f"--data-dir={self.home / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _server_arguments(self) -> list[str]:
        files = self.home / "files"
        return [
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self.home / 'certs'}",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={files / 'sa.key'}",
            f"--service-account-key-file={files / 'sa.pub'}",
            f"--token-auth-file={files / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            # Pods may be created without the `default` service account, which a controller would make.
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
            "--enable-priority-and-fairness=false",
            "--profiling=false",
            f"--audit-policy-file={files / 'audit.yaml'}",
            f"--audit-log-path={self.audit.path}",
            "--audit-log-mode=blocking",
            "--shutdown-delay-duration=0s",
        ]

    def _spawn(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        program = [str(self._find(name)), *arguments]
        if setpriv := shutil.which("setpriv"):
            # A test run that is killed takes its servers with it.
            program = [setpriv, "--pdeathsig", "KILL", "--", *program]
        with (self.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home, start_new_session=True
            )

    def _is_ready(self) -> bool:
        if not self.ca_file.exists():
            return False
        try:
            return self.request("GET", "/readyz", timeout=5).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _tail(self, name: str) -> str:
        return "\n".join((self.home / f"{name}.log").read_text().splitlines()[-20:])

    def _write_kubeconfig(self) -> None:
        self.kubeconfig.write_text(yaml.safe_dump(self.kubeconfig_for(ADMIN_TOKEN)))

    def kubeconfig_for(self, token: str) -> dict[str, Any]:
        """A kubeconfig for the owner of a token (of the administrator, or from a TokenRequest)."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca_file)}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }


def end(process: subprocess.Popen[bytes] | None) -> None:
    """Ask a process to end, and kill it when it does not within ten seconds."""
    if process is None:
        return
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nothing listens on now.

    From below the range that outgoing connections take theirs from: a port is still free after a stop and a pause.
    """
    first = PORTS.start + os.getpid() * count % len(PORTS)
    found: list[int] = []
    for port in (*range(first, PORTS.stop), *range(PORTS.start, first)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise ApiServerError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


def main() -> int:
    """Run one with our CRDs until interrupted."""
    with tempfile.TemporaryDirectory(prefix="prfaas-apiserver-") as home, ApiServer(Path(home)) as server:
        server.install_crds()
        print(f"export KUBECONFIG={server.kubeconfig}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
