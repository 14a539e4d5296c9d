"""A reconcile's surroundings for tests: the real API server, and this file in the place of kubelet and controllers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from e2e.apiserver import ApiServer, AuditEvent
from prfaas.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    POD,
    POD_DISRUPTION_BUDGET,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Key,
    Object,
    Resource,
)
from prfaas.links.registry import PeerRegistry
from prfaas.operator.config import Config
from prfaas.operator.routers import Routers
from prfaas.operator.world import KINDS, Result, World, key_for
from prfaas.workloads.router import RouterSettings
from tests.hand import Hand

CHILDREN = (DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET, CONFIG_MAP, JOB, SERVICE_ACCOUNT, ROLE_BINDING)

PRFAAS_CLUSTER: Object = {
    "model": {"name": "example/model"},
    "gpusPerInstance": 8,
    "nodePool": {"nodeSelector": {"gpu": "h200"}},
    "engine": {"image": "registry.example/vllm:0.33.0"},
    "instances": 3,
}
PD_CLUSTER: Object = {
    "model": {"name": "example/model"},
    "gpusPerInstance": 8,
    "engine": {"image": "registry.example/vllm:0.33.0"},
    "pool": {"instances": 3, "initialPrefill": 1},
    "router": {"replicas": 1},
}

RUNNING: Object = {
    "phase": "Running",
    "podIP": "127.0.0.1",
    "conditions": [{"type": "Ready", "status": "True"}],
}
"""Status of a pod that is ready."""


def settings(namespace: str) -> Config:
    """The configuration of an operator that acts in one namespace and publishes in it, too."""
    return Config(
        cluster_id="here",
        namespace=namespace,
        identity="test",
        routers=RouterSettings(
            operator_image="registry.example/prfaas:0.1.0",
            envoy_image="registry.example/envoy:v1.40.0",
            cluster_role="prfaas-router",
            policy_writers=(f"system:serviceaccount:{namespace}:prfaas-operator",),
        ),
        exchange_namespace=namespace,
        namespaces=(namespace,),
    )


@dataclass
class Bench:
    """One namespace of the API server, and one object of ours in it at a time."""

    server: ApiServer
    client: Hand
    namespace: str
    reconcile: Callable[[World, Key], Awaitable[Result]]
    world: World
    enqueued: list[Key] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        server: ApiServer,
        client: Hand,
        namespace: str,
        reconcile: Callable[[World, Key], Awaitable[Result]],
        *,
        routers: Routers | None = None,
        peers: PeerRegistry | None = None,
        epoch: int = 1,
    ) -> Bench:
        enqueued: list[Key] = []
        world = World.create(
            client,
            settings(namespace),
            epoch,
            now=lambda: datetime.now(UTC),
            routers=routers or Routers(None),
            peers=peers or PeerRegistry(client, enqueued.append),
            enqueue=enqueued.append,
        )
        return cls(server, client, namespace, reconcile, world, enqueued)

    # Our objects

    async def place(self, kind: str, name: str, spec: Object) -> Object:
        body = {
            "apiVersion": "prfaas.io/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        return await self.client.create(body)

    async def edit(self, kind: str, name: str, spec: Object) -> None:
        await self.client.patch_merge(KINDS[kind], name, self.namespace, {"spec": spec})

    async def run(self, kind: str, name: str) -> Result:
        """One reconcile."""
        return await self.reconcile(self.world, key_for(kind, self.namespace, name))

    async def settle(self, kind: str, name: str, rounds: int = 20) -> Object:
        """Reconciles and plays the cluster's controllers until a round writes nothing; returns the object then."""
        for _ in range(rounds):
            mark = self.server.audit.mark()
            await self.run(kind, name)
            wrote = self.server.audit.writes(mark, self.namespace)
            moved = await self.play()
            if not wrote and not moved:
                return await self.own(kind, name)
        raise AssertionError(f"not settled after {rounds} rounds: {wrote}")

    async def own(self, kind: str, name: str) -> Object:
        return await self.client.get(KINDS[kind], name, self.namespace)

    async def conditions(self, kind: str, name: str) -> dict[str, tuple[str, str]]:
        """Type -> (status, reason)."""
        status = (await self.own(kind, name)).get("status") or {}
        return {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions") or []}

    async def message(self, kind: str, name: str, condition: str) -> str:
        status = (await self.own(kind, name))["status"]
        return next(str(each.get("message", "")) for each in status["conditions"] if each["type"] == condition)

    # Children

    async def children(self, resource: Resource = DEPLOYMENT) -> dict[str, Object]:
        found = await self.client.list(resource, self.namespace, labels="app.kubernetes.io/managed-by=prfaas-operator")
        return {obj["metadata"]["name"]: obj for obj in found.items}

    async def instances(self) -> dict[str, str]:
        """Instance -> role, from the labels of the Deployments."""
        return {
            name: obj["metadata"]["labels"]["prfaas.io/role"]
            for name, obj in (await self.children()).items()
            if "prfaas.io/instance" in obj["metadata"]["labels"]
        }

    async def versions(self) -> dict[str, str]:
        """Every object in the namespace that is ours -> its resourceVersion."""
        found = {}
        for resource in (*CHILDREN, *KINDS.values()):
            for obj in (await self.client.list(resource, self.namespace)).items:
                found[f"{resource.kind}/{obj['metadata']['name']}"] = obj["metadata"]["resourceVersion"]
        return found

    # The cluster's part

    async def play(self, *, unready: tuple[str, ...] = ()) -> bool:
        """What the Deployment controller, scheduler and kubelet would do; returns whether anything moved."""
        moved = False
        for name, deployment in (await self.children()).items():
            replicas = deployment["spec"]["replicas"]
            available = 0 if name in unready else replicas
            status: dict[str, Any] = {
                "observedGeneration": deployment["metadata"]["generation"],
                "replicas": replicas,
                "updatedReplicas": replicas,
                "availableReplicas": available,
                "readyReplicas": available,
            }
            have = deployment.get("status") or {}
            if any(have.get(member, 0) != value for member, value in status.items()):
                moved = True
                await self.client.patch_merge(
                    DEPLOYMENT, name, self.namespace, {"status": status}, subresource="status"
                )
            moved |= await self._pod_of(deployment)
        return moved

    async def _pod_of(self, deployment: Object) -> bool:
        """One pod for each Deployment, on a node, with the labels of the template."""
        template = deployment["spec"]["template"]
        name = f"{deployment['metadata']['name']}-pod"
        pods = {pod["metadata"]["name"]: pod for pod in (await self.client.list(POD, self.namespace)).items}
        live = pods.get(name)
        if live is not None and live["metadata"]["labels"] == template["metadata"]["labels"]:
            return False
        if live is not None:
            await self.client.delete(POD, name, self.namespace, grace_seconds=0)
        await self.put_pod(name, template["metadata"]["labels"], node="node-1")
        return True

    async def put_pod(
        self, name: str, labels: dict[str, str], *, node: str | None, status: Object | None = None
    ) -> None:
        spec: Object = {"containers": [{"name": "engine", "image": "x"}], "terminationGracePeriodSeconds": 1}
        if node is not None:
            spec["nodeName"] = node
        body: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
            "spec": spec,
        }
        await self.client.create(body)
        await self.client.patch_merge(
            POD,
            name,
            self.namespace,
            {"status": status or RUNNING},
            subresource="status",
        )

    async def finish_job(self, name: str, ago: float = 0.0) -> None:
        """What the Job controller does when a Job's pod has ended well, `ago` seconds ago."""
        ended = {"status": "True", "lastTransitionTime": moment(ago), "lastProbeTime": moment(ago)}
        status = {
            "startTime": moment(ago + 10),
            "completionTime": moment(ago),
            "succeeded": 1,
            "conditions": [{"type": kind, **ended} for kind in ("SuccessCriteriaMet", "Complete")],
        }
        await self.client.patch_merge(JOB, name, self.namespace, {"status": status}, subresource="status")

    def writes_since(self, mark: int) -> list[AuditEvent]:
        return self.server.audit.writes(mark, self.namespace)


def moment(ago: float = 0.0) -> str:
    """A time so many seconds ago, as Kubernetes writes it."""
    return (datetime.now(UTC) - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


async def eventually(check: Callable[[], Awaitable[Any]], *, seconds: float = 60.0, what: str = "") -> Any:
    """Polls until `check` returns something true; returns that."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        found = await check()
        if found:
            return found
        if loop.time() > deadline:
            raise AssertionError(f"not so after {seconds:.0f} s: {what or check}")
        await asyncio.sleep(0.1)
