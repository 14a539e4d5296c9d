"""Reconcile of an InterClusterLink: have the peer read, mirror its prefill endpoints, say how the link does.

What the link's state is, and what is to be mirrored, `links.assess` says; here it is read, written and reported.
Deleting a link needs no peer: what it mirrored is its child, and goes with it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

from pydantic import ValidationError

from prfaas.api import labels
from prfaas.api.conditions import Reason, Type, Verdict, timestamp
from prfaas.api.inter_cluster_link import InterClusterLink, InterClusterLinkStatus, PeerStatus
from prfaas.api.kinds import KINDS as MODELS
from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.kube.apply import plan
from prfaas.kube.errors import KubeError, NotFound
from prfaas.kube.resources import ENDPOINT_SLICE, PD_CLUSTER, PRFAAS_CLUSTER, SECRET, SERVICE, Key, Object
from prfaas.links.assess import Assessment, assess
from prfaas.links.document import LocalEnd
from prfaas.links.mirror import mirrored_objects
from prfaas.operator.objects import fetch, parse
from prfaas.operator.pools import LEFTOVER_SECONDS, OBSTACLE_SECONDS, belongs_to_another, without_conditions
from prfaas.operator.report import read_conditions, report
from prfaas.operator.verdicts import Obstacle, conditions, summary, write_obstacle
from prfaas.operator.world import KINDS, Result, World, key_for
from prfaas.workloads.engine import compatibility_key
from prfaas.workloads.meta import Owner, selector_text


async def reconcile(world: World, key: Key) -> Result:
    """Brings one InterClusterLink a step nearer to its spec. Raises KubeError when it should be tried again."""
    live = await fetch(world, key)
    if live is None:
        world.peers.remove(key)
        world.secrets.forget(key)
        await _wake_pools(world, key, None)
        return Result()
    link = await parse(world, live, InterClusterLink)
    if link is None:
        return Result()
    before = read_conditions(live)
    known = link.status.peer
    peer = world.peers.ensure(key, link.spec, await _kubeconfig(world, key, link))
    assessment = assess(
        link.spec,
        peer,
        await _local_end(world, link),
        before=before,
        lost_since=known.lost_since if known else None,
    )
    wrote = await _mirror(world, link, assessment)
    found = [unless_refused(each, wrote.retry) for each in assessment.findings]
    needed = [each for each in found if each.type is not Type.ENCRYPTED]
    verdicts = [
        *summary(needed, obstacle=wrote.obstacle, paused=link.spec.paused),
        *found,
    ]
    status = InterClusterLinkStatus(
        observed_generation=link.metadata.generation,
        peer=PeerStatus(
            cluster_id=assessment.cluster_id or (known.cluster_id if known else None),
            version=assessment.version or (known.version if known else None),
            lost_since=assessment.lost_since,
            compatibility_key=assessment.compatibility_key if peer.read or known is None else known.compatibility_key,
            groups=assessment.groups if peer.read or known is None else known.groups,
        ),
        credentials_expire_at=timestamp(peer.credentials_expire_at) if peer.credentials_expire_at else None,
        endpoints=wrote.endpoints,
    )
    observed = conditions(verdicts, link.metadata.generation, world.now())
    # Which endpoints are ready is in the slices alone.
    if await report(world, live, without_conditions(status), observed) or wrote.changed:
        await _wake_pools(world, key, link)
    if wrote.retry is not None and wrote.obstacle is None:
        raise wrote.retry
    return Result(wrote.again_after)


async def _wake_pools(world: World, key: Key, link: InterClusterLink | None) -> None:
    """Has the PDClusters looked at that name the link, and the prefill pool that it joins: it came, changed or went."""
    if link is None:
        for pool in (await world.client.list(PRFAAS_CLUSTER, key.namespace)).items:
            world.enqueue(key_for(PRFAAS_CLUSTER.kind, key.namespace, pool["metadata"]["name"]))
    elif link.spec.local.kind == PRFAAS_CLUSTER.kind:
        world.enqueue(key_for(PRFAAS_CLUSTER.kind, key.namespace, link.spec.local.name))
    for pool in (await world.client.list(PD_CLUSTER, key.namespace)).items:
        remotes = (pool.get("spec") or {}).get("remotePrefill") or []
        if any(remote.get("linkRef") == key.name for remote in remotes):
            world.enqueue(key_for(PD_CLUSTER.kind, key.namespace, pool["metadata"]["name"]))


def unless_refused(finding: Verdict, error: KubeError | None) -> Verdict:
    """What was found; of the mirror only if it could be written, too."""
    if finding.type is not Type.ENDPOINTS_MIRRORED or error is None:
        return finding
    return Verdict(finding.type, False, Reason.API_ERROR, f"not written as wanted: {error.message}")


class _Wrote:
    """What mirroring did: endpoints that are mirrored now, and what stood in the way."""

    def __init__(self, objects: Iterable[Object]) -> None:
        slices = [obj for obj in objects if obj["kind"] == ENDPOINT_SLICE.kind]
        self.endpoints = sum(len(each.get("endpoints") or []) for each in slices)
        self.changed = False
        self.obstacle: Obstacle | None = None
        self.retry: KubeError | None = None
        self.again_after: float | None = None


async def _mirror(world: World, link: InterClusterLink, assessment: Assessment) -> _Wrote:
    """Makes the Service and EndpointSlices hold what the assessment says; None leaves them as they are."""
    owner = Owner.of(link)
    ours = {labels.KIND: owner.kind.lower(), labels.LINK: owner.name, labels.LABEL_MANAGED_BY: labels.MANAGED_BY}
    current = [
        obj
        for resource in (SERVICE, ENDPOINT_SLICE)
        for obj in (await world.client.list(resource, owner.namespace, labels=selector_text(ours))).items
    ]
    if link.spec.paused or assessment.mirror is None:
        return _Wrote(current)
    if any(belongs_to_another(obj, owner) for obj in current):
        wrote = _Wrote(current)
        wrote.again_after = LEFTOVER_SECONDS
        return wrote
    wanted = mirrored_objects(
        owner.name,
        owner.namespace,
        assessment.mirror.endpoints,
        owner_labels={**ours, labels.LABEL_NAME: f"{labels.PART_OF}-mirror", labels.LABEL_INSTANCE: owner.name},
        owner_reference=owner.reference,
    )
    if link.spec.remote.kind != "PrfaaSCluster":
        wanted = []
    outcome = await world.appliers[owner.kind].execute(plan(current, wanted), owner=ours)
    wrote = _Wrote(outcome.after(current).values())
    wrote.changed = bool(outcome.created or outcome.applied or outcome.deleted)
    wrote.obstacle = write_obstacle(outcome.failed.values())
    wrote.retry = next(iter(outcome.failed.values()), None)
    wrote.again_after = OBSTACLE_SECONDS if wrote.obstacle else None
    return wrote


async def _kubeconfig(world: World, key: Key, link: InterClusterLink) -> bytes | None:
    """The kubeconfig in the link's Secret; None where it, or the key in it, is not there."""
    reference = link.spec.peer.source.kube_config_secret_ref
    world.secrets.uses(key, reference.name if reference else None)
    if reference is None:
        return None
    try:
        secret = await world.client.get(SECRET, reference.name, world.config.namespace)
        return base64.b64decode((secret.get("data") or {})[reference.key])
    except (NotFound, KeyError, binascii.Error):
        return None


async def _local_end(world: World, link: InterClusterLink) -> LocalEnd | None:
    """What the pool at this end needs of the other; None when there is no such pool, or none that can be read."""
    local = link.spec.local
    try:
        live = await world.client.get(KINDS[local.kind], local.name, link.metadata.namespace)
        pool = MODELS[local.kind].model_validate(live)
    except (NotFound, ValidationError):
        return None
    assert isinstance(pool, PrfaaSCluster | PDCluster)
    model, keys = pool.spec.model, frozenset(group.compatibility_key for group in pool.status.groups)
    return LocalEnd(model.name, model.revision, compatibility_key(pool.spec), keys)
