"""The operator as it runs in a cluster: a process, with the chart's service account and exactly its rights."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from e2e.apiserver import ApiServer, free_ports
from e2e.datacenters.build import tool
from tests.operator.bench import eventually

ROOT = Path(__file__).parents[2]


@cache
def rendered(namespace: str) -> list[dict[str, Any]]:
    """The chart's objects for an operator in `<namespace>-system` that acts in `namespace` alone."""
    command = [str(tool("helm")), "template", "prfaas", str(ROOT / "charts/prfaas-operator")]
    command += ["--namespace", f"{namespace}-system", "--set", "clusterID=here", "--set", f"namespaces[0]={namespace}"]
    command += ["--set", f"exchange.namespace={namespace}-exchange"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def install(server: ApiServer, namespace: str) -> dict[str, Any]:
    """Applies the chart without its Deployment; returns a kubeconfig of the operator's service account."""
    system = f"{namespace}-system"
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}
    documents = [made, *(each for each in rendered(namespace) if each["kind"] != "Deployment")]
    applied = server.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(documents))
    assert applied.returncode == 0, applied.stderr
    path = f"/api/v1/namespaces/{system}/serviceaccounts/prfaas-operator/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = server.request("POST", path, request)
    assert answer.status == 201, answer.message
    return server.kubeconfig_for(answer.body["status"]["token"])


@dataclass
class Operator:
    """One process."""

    namespace: str
    home: Path
    kubeconfig: dict[str, Any]
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    port: int = field(default_factory=lambda: free_ports(1)[0])

    def start(self) -> None:
        self.home.mkdir(exist_ok=True)
        (self.home / "kubeconfig").write_text(yaml.safe_dump(self.kubeconfig))
        command = [sys.executable, "-m", "prfaas.cli.main", "operator", "--cluster-id=here"]
        command += [f"--namespace={self.namespace}-system", f"--exchange-namespace={self.namespace}-exchange"]
        command += [f"--watch-namespace={self.namespace}", f"--kubeconfig={self.home / 'kubeconfig'}"]
        command += ["--image=registry.example/prfaas:0.1.0", f"--port={self.port}", *self.arguments]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT / "operator"), "POD_NAME": self.home.name},
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self, seconds: float = 30.0) -> int:
        """Waits for the process to end; returns its status."""
        assert self.process is not None
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), seconds)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    async def probe(self, path: str) -> tuple[int, str]:
        """Status and text of an HTTP path; 0 while nothing listens."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}{path}", timeout=aiohttp.ClientTimeout(total=5)) as response,
            ):
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, ""

    async def leads(self) -> bool:
        return "prfaas_leader 1.0" in (await self.probe("/metrics"))[1]

    async def ready(self) -> None:
        """Waits until the process does its part, leading or not."""

        async def check() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            return (await self.probe("/readyz"))[0] == 200

        await eventually(check, what=f"{self.home.name} is ready")

    def log(self) -> str:
        return (self.home / "log").read_text()

    def lines(self) -> list[dict[str, Any]]:
        """The log as it is meant to be: one JSON object per line."""
        return [json.loads(line) for line in self.log().splitlines()]
