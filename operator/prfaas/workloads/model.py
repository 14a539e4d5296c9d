"""The model on its way to the engine: the folder that the engine loads, what mounts it, and the Jobs that fill it.

    cache                    filled by                     an instance before its engine starts
    persistentVolumeClaim    one Job                       waits for the marker (container `model`)
    hostPath                 one Job for each node         waits for the marker
    ephemeral                the instance itself           fetches (container `model`)
    (a source of pvc://)     whoever made the claim        mounts the folder

The engine is given a path that is equal at both ends of a link, since its handshake hashes that string: it is made of
the model's name and revision alone, never of where a datacenter took the model from. A new revision is another folder;
the old one is left where it is.

A Job's name has the hash of its pod template, since a template cannot be changed: what would change it makes another
Job, which finds what the first one left. What waits is a shell in the engine's own image, and the fetcher's image is no
part of a revision: a new operator restarts no engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.api import labels
from prfaas.api.common import quantity_value
from prfaas.api.model import MARKER, ModelCache, Origin
from prfaas.api.pool import ModelSpec, PoolSpec
from prfaas.workloads.meta import Object, Owner, digest, pod_templates

MODELS = "/models"
"""Where the folder of all models is mounted."""
CONTAINER = "model"
"""The init container that waits or fetches."""
FETCHER = "fetch"
"""The container of a Job's pod."""
COMPONENT = "model"
REPORT = "/dev/termination-log"
"""Where a container leaves how it ended: kubelet shows it in the pod's status."""
OFFLINE = "HF_HUB_OFFLINE"
_VOLUME = "model"
_UNKNOWN_IMAGE = "prfaas"
"""Stands for the fetcher's image in a template, until `with_fetcher`."""
_RUN_AS = 65532
_WAIT = 'trap "exit 143" TERM; until [ -f "$0" ]; do sleep 2 & wait $!; done'
"""A shell that is a container's first process hears of SIGTERM only by a trap, and only between two commands."""


@dataclass(frozen=True)
class Fetcher:
    """The image with `prfaas fetch`."""

    image: str
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Place:
    """One place that a Job fills: a node's disk, or (node None) a claim."""

    node: str | None = None

    def __str__(self) -> str:
        return "the claim" if self.node is None else f"node {self.node}"


def engine_model(spec: PoolSpec) -> str:
    """What the engine's command line names."""
    return spec.model.name if spec.model.source is None else f"{MODELS}/{folder(spec.model)}"


def folder(model: ModelSpec) -> str:
    """The model's folder below the folder of all models."""
    return f"{_path(model.name)}/{_segment(model.revision)}"


def marker(spec: PoolSpec) -> str:
    """The file that says, in an instance, that the model is whole."""
    return f"{engine_model(spec)}/{MARKER}"


def identity(spec: PoolSpec) -> str:
    """Hash of what is fetched, and to where: Jobs that are done count for it, whatever else has changed since."""
    cache = spec.model.cache.to_wire() if spec.model.cache else None
    return digest([spec.model.source, spec.model.revision, folder(spec.model), cache])


def shared(cache: ModelCache | None) -> bool:
    """Whether Jobs fill the cache, and not each instance for itself."""
    return cache is not None and cache.ephemeral is None


def attach(spec: PoolSpec, pod: Object) -> Object:
    """An instance's pod with the model in it. The engine is the pod's first container."""
    if spec.model.source is None:
        return pod
    origin = Origin.parse(spec.model.source)
    mount: Object = {"name": _VOLUME, "mountPath": MODELS, "readOnly": True}
    begin: list[Object] = []
    if spec.model.cache is None:
        volume: Object = {"persistentVolumeClaim": {"claimName": origin.place}}
        mount["mountPath"] = engine_model(spec)
        if origin.path:
            mount["subPath"] = origin.path
    else:
        volume = _volume(spec.model.cache)
        begin = [_fetching(spec) if spec.model.cache.ephemeral else _waiting(spec, pod["containers"][0], mount)]
    engine: Object = pod["containers"][0]
    environment: list[Object] = engine.get("env", [])
    if not any(variable["name"] == OFFLINE for variable in environment):
        # What is not in the folder is missing: an engine that asks the network for it starts late, or never.
        environment = [*environment, {"name": OFFLINE, "value": "1"}]
    engine = {**engine, "env": environment, "volumeMounts": [*engine.get("volumeMounts", []), mount]}
    whole = {
        **pod,
        "containers": [engine, *pod["containers"][1:]],
        "volumes": [*pod.get("volumes", []), {"name": _VOLUME, **volume}],
    }
    return {**whole, "initContainers": [*begin, *pod.get("initContainers", [])]} if begin else whole


def with_fetcher(objects: Iterable[Object], fetcher: Fetcher, live: Iterable[Object] = ()) -> list[Object]:
    """Instances with the image of the container that fetches filled in.

    An instance that exists keeps the image that it has until its revision changes for another reason.
    """
    have = {(obj["kind"], obj["metadata"]["name"]): obj for obj in live}

    def filled(obj: Object) -> Object:
        before = have.get((obj["kind"], obj["metadata"]["name"]))
        same = before is not None and _revision(before) == _revision(obj)
        kept = _fetcher_of(before) if same and before is not None else None
        return _replace_image(obj, kept or fetcher)

    return [filled(obj) if _fetcher_of(obj) else obj for obj in objects]


def job(owner: Owner, spec: PoolSpec, place: Place, fetcher: Fetcher) -> Object:
    """The Job that fills one place. It tries until it succeeds: what is wrong may be put right elsewhere."""
    cache = spec.model.cache
    assert cache is not None, "only a cache is filled by Jobs"
    own = owner.labels(COMPONENT, **{labels.MODEL: identity(spec)})
    on_nodes = cache.host_path is not None
    security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if on_nodes:
        # Kubelet makes the folder for root alone; root without capabilities can write there and nowhere else.
        security |= {"runAsUser": 0, "runAsGroup": 0}
    else:
        security |= {"runAsNonRoot": True, "runAsUser": _RUN_AS, "runAsGroup": _RUN_AS, "fsGroup": _RUN_AS}
        security["fsGroupChangePolicy"] = "OnRootMismatch"
    pod: Object = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 10,
        "securityContext": security,
        "containers": [
            {
                "name": FETCHER,
                "image": fetcher.image,
                "imagePullPolicy": fetcher.pull_policy,
                **_program(spec),
                "volumeMounts": [{"name": _VOLUME, "mountPath": MODELS}],
            }
        ],
        "tolerations": [toleration.to_wire() for toleration in spec.node_pool.tolerations],
        "volumes": [{"name": _VOLUME, **_volume(cache)}],
    }
    if spec.engine.image_pull_secrets:
        pod["imagePullSecrets"] = [secret.to_wire() for secret in spec.engine.image_pull_secrets]
    if place.node is not None:
        fields = [{"key": "metadata.name", "operator": "In", "values": [place.node]}]
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    elif spec.node_pool.node_selector:
        # A volume that is made for its first pod is to be where the instances are.
        pod["nodeSelector"] = dict(spec.node_pool.node_selector)
    metadata = owner.metadata(f"{owner.name}-model-{digest(pod)}", own)
    if place.node is not None:
        metadata["annotations"] = {labels.NODE: place.node}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"backoffLimit": 1_000_000, "template": {"metadata": {"labels": own}, "spec": pod}},
    }


# Pieces


def _volume(cache: ModelCache) -> Object:
    if cache.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim.claim_name}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path.path, "type": "DirectoryOrCreate"}}
    assert cache.ephemeral is not None
    limit = cache.ephemeral.size_limit
    return {"emptyDir": {} if limit is None else {"sizeLimit": limit}}


def _program(spec: PoolSpec) -> Object:
    """What is run, with which credentials, and how little it may do."""
    model = spec.model
    assert model.source is not None
    assert model.cache is not None
    command = ["prfaas", "fetch", model.source, f"--to={engine_model(spec)}", f"--revision={model.revision}"]
    if model.endpoint is not None:
        command.append(f"--endpoint={model.endpoint}")
    ephemeral = model.cache.ephemeral
    if ephemeral is not None and ephemeral.size_limit is not None:
        command.append(f"--size-limit={int(quantity_value(ephemeral.size_limit))}")
    program: Object = {
        "command": [*command, f"--report={REPORT}"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": _confined(),
    }
    if model.secret_ref is not None:
        program["envFrom"] = [{"secretRef": {"name": model.secret_ref.name}}]
    return program


def _fetching(spec: PoolSpec) -> Object:
    """The init container that fetches into the pod's own folder."""
    program = _program(spec)
    program["securityContext"] |= {"runAsNonRoot": True, "runAsUser": _RUN_AS, "runAsGroup": _RUN_AS}
    return {
        "name": CONTAINER,
        "image": _UNKNOWN_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        **program,
        "volumeMounts": [{"name": _VOLUME, "mountPath": MODELS}],
    }


def _waiting(spec: PoolSpec, engine: Object, mount: Object) -> Object:
    """The init container that waits for the marker; without a limit: what keeps the model away is told elsewhere."""
    return {
        "name": CONTAINER,
        "image": engine["image"],
        "imagePullPolicy": engine["imagePullPolicy"],
        "command": ["/bin/sh", "-c", _WAIT, marker(spec)],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        "securityContext": _confined(),
        "volumeMounts": [mount],
    }


def _confined() -> Object:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _path(name: str) -> str:
    """A model's name as a path: `org/model` as it is; what a path cannot hold is replaced, and the hash of the whole
    name added, so that two names never meet."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    safe = "/".join(_safe(part) for part in parts)
    return safe if safe == name else f"{safe or 'model'}-{digest(name)}"


def _segment(revision: str) -> str:
    safe = _safe(revision) if revision not in (".", "..") else "revision"
    return safe if safe == revision else f"{safe}-{digest(revision)}"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:128]


def _revision(obj: Mapping[str, Any]) -> str | None:
    found: str | None = (obj["metadata"].get("labels") or {}).get(labels.REVISION)
    return found


def _fetcher_of(obj: Mapping[str, Any]) -> Fetcher | None:
    """The image of the container that fetches, in an instance that has one."""
    for template in pod_templates(obj):
        for container in template["spec"].get("initContainers") or []:
            if container["name"] == CONTAINER and container["command"][:2] == ["prfaas", "fetch"]:
                return Fetcher(container["image"], container["imagePullPolicy"])
    return None


def _replace_image(obj: Object, fetcher: Fetcher) -> Object:
    own = {"image": fetcher.image, "imagePullPolicy": fetcher.pull_policy}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("name") == CONTAINER and value.get("image") == _UNKNOWN_IMAGE:
                return {**value, **own}
            return {name: filled(member) for name, member in value.items()}
        return [filled(item) for item in value] if isinstance(value, list) else value

    return {**obj, "spec": filled(obj["spec"])}
