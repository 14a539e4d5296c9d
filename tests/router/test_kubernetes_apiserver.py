"""The whole router against a real API server: it watches for itself, with no more rights than it asks for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from e2e.apiserver import ApiServer
from e2e.local_router import EnvoyProcess, free_port
from prfaas.api import labels, router_pod
from prfaas.api.policy import RoutingPolicy
from prfaas.router.main import serve
from prfaas.router.serve import Settings
from prfaas.routing.world import Endpoint
from tests.router.rig import (
    DEADLINE,
    LINK,
    engine,
    own_address,
    policy,
    until,
)

pytestmark = [pytest.mark.apiserver, pytest.mark.envoy]

CLUSTER = "west"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def put(server: ApiServer, path: str, body: dict[str, Any]) -> None:
    answer = server.apply(path, body)
    assert answer.status in (200, 201), answer.message


def endpoint_slice(
    namespace: str, role: str, *endpoints: Endpoint, ready: bool = True, link: str = "", key: str = ""
) -> Any:
    """As Kubernetes makes it of a Service of ours, or a link of what its peer publishes."""
    marks = {labels.LABEL_PART_OF: labels.PART_OF, labels.ROLE: role}
    marks |= {labels.LINK: link} if link else {labels.KIND: "pdcluster", labels.CLUSTER: CLUSTER}
    marks |= {labels.COMPATIBILITY_KEY: key} if key else {}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": slice_name(role, link, key), "namespace": namespace, "labels": marks},
        "addressType": "IPv4",
        # A slice has one port: here, one engine.
        "ports": [{"name": "http", "port": endpoints[0].port if endpoints else 1}],
        "endpoints": [{"addresses": [found.host], "conditions": {"ready": ready}} for found in endpoints],
    }


def slice_name(role: str, link: str, key: str) -> str:
    return "-".join(filter(None, (link or CLUSTER, role, key)))


@dataclass
class Cluster:
    """One namespace of the API server, as the operator would fill it."""

    server: ApiServer
    namespace: str

    def serves(self, role: str, *endpoints: Endpoint, ready: bool = True, link: str = "", key: str = "") -> None:
        body = endpoint_slice(self.namespace, role, *endpoints, ready=ready, link=link, key=key)
        name = body["metadata"]["name"]
        put(self.server, f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices/{name}", body)

    def policy(self, document: RoutingPolicy | str) -> None:
        text = document if isinstance(document, str) else json.dumps(document.to_wire())
        name = labels.policy_config_map(CLUSTER)
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": self.namespace},
            "data": {labels.POLICY_KEY: text},
        }
        put(self.server, f"/api/v1/namespaces/{self.namespace}/configmaps/{name}", body)

    def service_account(self, name: str) -> str:
        """Make a service account; its user name."""
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": self.namespace}}
        put(self.server, f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{name}", body)
        return f"system:serviceaccount:{self.namespace}:{name}"

    def token(self, name: str, *audiences: str) -> str:
        answer = self.server.request(
            "POST",
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{name}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"audiences": list(audiences) or None},
            },
        )
        assert answer.status == 201, answer.message
        return str(answer.body["status"]["token"])

    def grant(self, user_name: str) -> None:
        """Exactly the rights that the router's pod is given."""
        subject = {"kind": "ServiceAccount", "name": user_name, "namespace": self.namespace}
        for kind, scope, rules, name in (
            ("Role", f"{RBAC}/namespaces/{self.namespace}/", router_pod.role_rules(), "router"),
            ("ClusterRole", f"{RBAC}/", router_pod.cluster_role_rules(), f"router-{self.namespace}"),
        ):
            where = {"namespace": self.namespace} if kind == "Role" else {}
            head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name, **where}}
            put(self.server, f"{scope}{kind.lower()}s/{name}", {**head, "kind": kind, "rules": rules})
            binding = {
                **head,
                "kind": f"{kind}Binding",
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
                "subjects": [subject],
            }
            put(self.server, f"{scope}{kind.lower()}bindings/{name}", binding)


@dataclass
class Running:
    """A router that runs on the cluster's watches."""

    cluster: Cluster
    envoy: EnvoyProcess
    admin: str
    session: aiohttp.ClientSession
    user: str
    """Who may put the policy."""

    async def ready(self) -> bool:
        with suppress(aiohttp.ClientConnectorError):
            async with self.session.get(f"{self.admin}/readyz") as response:
                return response.status == 200
        return False

    async def metric(self, line: str) -> bool:
        with suppress(aiohttp.ClientConnectorError):
            async with self.session.get(f"{self.admin}/metrics") as response:
                return line in (await response.text()).splitlines()
        return False

    async def post(self, prompt: str = "x") -> tuple[int, str, Any]:
        url = f"{self.envoy.url}/v1/completions"
        async with self.session.post(url, json={"prompt": prompt}) as response:
            return response.status, response.headers.get("x-prfaas-decision", ""), json.loads(await response.read())

    async def decides(self, decision: str) -> bool:
        """Whether a long prompt is decided so now."""
        return (await self.post("y" * 4000))[1] == decision

    async def put_policy(self, document: RoutingPolicy, token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        async with self.session.put(f"{self.admin}/v1/policy", json=document.to_wire(), headers=headers) as response:
            return response.status


@asynccontextmanager
async def running(cluster: Cluster, envoy: EnvoyProcess, folder: Path) -> AsyncIterator[Running]:
    cluster.service_account("router")
    cluster.grant("router")
    user = cluster.service_account("operator")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(cluster.server.kubeconfig_for(cluster.token("router"))))
    port = free_port()
    settings = Settings(
        run_dir=envoy.run_dir, admin_host="127.0.0.1", admin_port=port, policy_writers=frozenset({user}), grace_s=0
    )
    task = asyncio.create_task(serve(settings, cluster.namespace, CLUSTER, kubeconfig))
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE), connector=connector) as session:
        try:
            yield Running(cluster, envoy, f"http://127.0.0.1:{port}", session, user)
            assert not task.done(), "the router ended by itself"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str) -> Cluster:
    return Cluster(apiserver, namespace)


async def test_a_router_finds_everything_by_itself(
    cluster: Cluster, running_envoy: EnvoyProcess, tmp_path: Path
) -> None:
    host = own_address()
    async with (
        engine("p", host=host) as p,
        engine("d", host=host) as d,
        engine("e", host=host) as e,
        running(cluster, running_envoy, tmp_path) as router,
    ):
        # Nothing there yet: not ready, and clients are told so.
        await until("it watches", lambda: router.metric("prfaas_router_policy_epoch 0.0"))
        assert not await router.ready()
        assert (await router.post())[0] == 503

        cluster.serves("prefill", p.endpoint)
        cluster.serves("decode", d.endpoint)
        cluster.policy(policy(threshold=100))
        await until("ready", router.ready)

        async def served() -> bool:
            return (await router.post())[:2] == (200, "local; reason=Short")

        await until("the instances are known", served)
        assert (await router.post("y" * 4000))[1] == "local; reason=RemoteUnavailable"

        cluster.serves("prefill", e.endpoint, link=LINK)

        async def remote() -> bool:
            return (await router.post("y" * 4000))[1] == f"remote; link={LINK}; reason=Long"

        await until("the mirrored instance is known", remote)

        cluster.policy(policy(threshold=10_000, version=2))

        async def follows() -> bool:
            return (await router.post("y" * 4000))[1] == "local; reason=Short"

        await until("the new threshold is followed", follows)

        cluster.policy("{}")
        await until(
            "the bad document was seen",
            lambda: router.metric('prfaas_router_policies_total{result="Invalid",source="configmap"} 1.0'),
        )
        assert (await router.post("y" * 4000))[1] == "local; reason=Short", "the last good one stays in force"


async def test_a_mirrored_instance_of_another_key_is_not_used_until_one_of_the_same_key_is_there(
    cluster: Cluster, running_envoy: EnvoyProcess, tmp_path: Path
) -> None:
    host = own_address()
    async with (
        engine("p", host=host) as p,
        engine("d", host=host) as d,
        engine("e", host=host) as e,
        engine("n", host=host) as n,
        running(cluster, running_envoy, tmp_path) as router,
    ):
        cluster.serves("prefill", p.endpoint, key="new")
        cluster.serves("decode", d.endpoint, key="new")
        cluster.serves("prefill", e.endpoint, link=LINK, key="old")
        cluster.policy(policy())
        await until("it serves", lambda: router.decides("local; key=new; reason=RemoteUnavailable"))
        cluster.serves("prefill", n.endpoint, link=LINK, key="new")
        await until("the link is used", lambda: router.decides(f"remote; link={LINK}; key=new; reason=Long"))
        assert not e.calls


async def test_an_instance_whose_slice_says_not_ready_is_out_within_two_seconds(
    cluster: Cluster, running_envoy: EnvoyProcess, tmp_path: Path
) -> None:
    """No operator runs here: the router's own watch does it."""
    host = own_address()
    async with (
        engine("p", host=host) as p,
        engine("d", host=host) as d,
        running(cluster, running_envoy, tmp_path) as router,
    ):
        cluster.serves("prefill", p.endpoint)
        cluster.serves("decode", d.endpoint)
        cluster.policy(policy())

        async def served() -> bool:
            return (await router.post())[0] == 200

        await until("it serves", served)
        cluster.serves("decode", d.endpoint, ready=False)
        changed = asyncio.get_running_loop().time()

        async def refused() -> bool:
            return (await router.post())[0] == 503

        await until("it is out of rotation", refused)
        assert asyncio.get_running_loop().time() - changed < 2.0

        async def unlisted() -> bool:
            return await running_envoy.hosts() == set()

        await until("Envoy may not reach it either", unlisted)
        cluster.serves("decode", d.endpoint)
        await until("it is back", served)


async def test_the_api_server_reviews_who_puts_a_policy(
    cluster: Cluster, running_envoy: EnvoyProcess, tmp_path: Path
) -> None:
    async with running(cluster, running_envoy, tmp_path) as router:
        cluster.policy(policy(version=1))
        await until("ready", router.ready)
        cluster.service_account("stranger")
        new = policy(version=2)
        assert await router.put_policy(new, "nonsense") == 401
        assert await router.put_policy(new, cluster.token("operator")) == 401, "a token for the API server itself"
        assert await router.put_policy(new, cluster.token("stranger", labels.ROUTER_AUDIENCE)) == 403
        assert await router.metric("prfaas_router_policy_version 1.0")
        token = cluster.token("operator", labels.ROUTER_AUDIENCE)
        assert await router.put_policy(new, token) == 200
        assert await router.metric("prfaas_router_policy_version 2.0")
        assert await router.put_policy(policy(version=1), token) == 409


async def test_the_command_serves_and_ends_when_told(
    cluster: Cluster, running_envoy: EnvoyProcess, tmp_path: Path
) -> None:
    cluster.service_account("router")
    cluster.grant("router")
    cluster.policy(policy())
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(cluster.server.kubeconfig_for(cluster.token("router"))))
    port = free_port()
    command = [*router_pod.serve_command(cluster.namespace, CLUSTER), "--kubeconfig", str(kubeconfig)]
    command += ["--run-dir", str(running_envoy.run_dir), "--admin-host", "127.0.0.1", "--admin-port", str(port)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prfaas.cli.main",
        *command[1:],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            router = Running(cluster, running_envoy, f"http://127.0.0.1:{port}", session, "")
            await until("ready", router.ready)
            assert (await router.post())[0] == 503  # also opens Envoy's log stream, which is there when it ends
        process.terminate()
        _, errors = await asyncio.wait_for(process.communicate(), DEADLINE)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.decode().splitlines()]
    assert {line["level"] for line in lines} == {"info"}, lines
    assert len(lines) < 10, lines


async def test_a_cluster_made_again_starts_a_new_order(
    cluster: Cluster, running_envoy: EnvoyProcess, tmp_path: Path
) -> None:
    async with running(cluster, running_envoy, tmp_path) as router:
        cluster.policy(policy(epoch=9, version=99))
        await until("the old one is in force", lambda: router.metric("prfaas_router_policy_epoch 9.0"))
        cluster.policy(policy(pd_cluster_uid="uid-2", epoch=1, version=1))
        await until("the new one is", lambda: router.metric("prfaas_router_policy_epoch 1.0"))
