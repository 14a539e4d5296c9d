"""The model gets there: from a slow source, interrupted twice, seen on its way, and the pool Ready at the end.

Time passes TIME_SCALE times faster than in life, as in the samples: a fetch of three minutes takes 36 seconds here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import model_source
from e2e.stack import NAMESPACE, Stack, condition, eventually

TIME_SCALE = 5
FETCH_SECONDS = 180
BYTES_A_SECOND = 1_000_000
"""Of the whole model, over the two connections that its two large files take."""
MEGABYTES = FETCH_SECONDS / TIME_SCALE * BYTES_A_SECOND / 1e6
LOST_AT_MOST = 8_000_000
"""What two kills may cost: of each, the pieces of two files that were being filled, and what was on the way."""
POOL, SOURCE = "fetched", "model-source"
FOLDER = "/var/lib/prfaas-models"


def source_objects(image: str) -> list[dict[str, Any]]:
    """The source: one file, run by the Python of our own image."""
    labels = {"app": SOURCE}
    command = ["python3", "/source/model_source.py", "--port=8080", f"--megabytes={MEGABYTES}"]
    container = {
        "name": "source",
        "image": image,
        "imagePullPolicy": "Never",
        "command": [*command, f"--rate={BYTES_A_SECOND / 2}"],
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "source", "mountPath": "/source"}],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": SOURCE, "namespace": NAMESPACE},
            "data": {"model_source.py": Path(model_source.__file__).read_text()},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": SOURCE, "namespace": NAMESPACE},
            "spec": {"selector": labels, "ports": [{"port": 8080}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": SOURCE, "namespace": NAMESPACE, "labels": labels},
            "spec": {
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": 1,
                "containers": [container],
                "volumes": [{"name": "source", "configMap": {"name": SOURCE}}],
            },
        },
    ]


def pool_object(stack: Stack) -> dict[str, Any]:
    """A pool like the sample's, of one instance, whose model is fetched to the nodes."""
    sample = stack.get("east", "prfaascluster", "h200")["spec"]
    model = {
        **sample["model"],
        "source": "hf://demo/model",
        "endpoint": f"http://{SOURCE}.{NAMESPACE}.svc:8080",
        "cache": {"hostPath": {"path": FOLDER}},
    }
    return {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "PrfaaSCluster",
        "metadata": {"name": POOL, "namespace": NAMESPACE},
        "spec": {**sample, "model": model, "instances": 1},
    }


@pytest.fixture
def source(stack: Stack) -> Iterator[Stack]:
    """The source, ready, and room for one more instance in east. Afterwards nothing of this is left."""
    stack.datacenters.kubectl("east", "scale", "prfaascluster", "h200", "-n", NAMESPACE, "--replicas=1")
    clean(stack)
    stack.apply("east", *source_objects(stack.image))
    stack.datacenters.kubectl(
        "east", "wait", "--for=condition=Ready", f"pod/{SOURCE}", "-n", NAMESPACE, "--timeout=60s"
    )
    yield stack
    clean(stack)


def clean(stack: Stack) -> None:
    """Nothing of an earlier run: neither objects nor files."""
    kubectl = stack.datacenters.kubectl
    wait = ("--ignore-not-found", "--wait=true", "--timeout=90s", "-n", NAMESPACE)
    kubectl("east", "delete", "prfaascluster", POOL, *wait)
    kubectl("east", "delete", f"pod/{SOURCE}", f"service/{SOURCE}", f"configmap/{SOURCE}", *wait)
    children = ("deployments,jobs,pods", "-l", f"prfaas.io/cluster={POOL}")
    eventually(lambda: not stack.objects("east", *children), 90, "children outlived their pool")
    for node in stack.datacenters.node_addresses("east"):
        stack.datacenters.exec_in_node(node, "rm", "-rf", FOLDER)


def fetch_pods(stack: Stack) -> list[dict[str, Any]]:
    """Pods of the pool's fetch Jobs, those that are ending included."""
    return stack.objects("east", "pods", "-l", f"prfaas.io/cluster={POOL},prfaas.io/model")


def live(stack: Stack) -> dict[str, Any]:
    """The one that fetches."""
    (pod,) = [
        pod
        for pod in fetch_pods(stack)
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    return pod


def status(stack: Stack, output: str) -> str:
    """What `prfaas status` prints for a person with east's kubeconfig."""
    kubeconfig = str(stack.datacenters.kubeconfig("east"))
    command = [sys.executable, "-m", "prfaas.cli.main", "status", "--kubeconfig", kubeconfig]
    command += ["-n", NAMESPACE, "-o", output]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def progress(stack: Stack) -> int | None:
    """Bytes that are there, as `prfaas status` says; None while it does not know."""
    (pool,) = [each for each in json.loads(status(stack, "json")) if each["name"] == POOL]
    done: list[int | None] = [fetch["done"] for fetch in pool["fetches"]]
    return done[0] if done else None


def sent(stack: Stack) -> int:
    """Bytes of content that the source has written, by its own count."""
    log = stack.datacenters.kubectl("east", "logs", SOURCE, "-n", NAMESPACE, "--tail=1")
    count: int = json.loads(log)["sent"]
    return count


def test_a_slow_fetch_that_is_interrupted_twice_ends_ready_and_is_seen_on_its_way(source: Stack) -> None:
    stack, size = source, sum(map(len, model_source.small_model(MEGABYTES).values()))
    seen: list[int] = []

    def reached(share: float) -> bool:
        done = progress(stack)
        if done is not None:
            seen.append(done)
        return done is not None and done >= share * size

    stack.apply("east", pool_object(stack))
    eventually(lambda: reached(0.2), 120, "prfaas status does not show that a fifth of the model is there")
    state = condition(stack.get("east", "prfaascluster", POOL), "ModelCached")
    assert (state["status"], state["reason"]) == ("False", "Fetching")
    assert "Fetching" in status(stack, "table")

    # First the whole pod goes, as when its node is drained; then its process alone, without warning.
    first = live(stack)["metadata"]["name"]
    stack.datacenters.kubectl("east", "delete", "pod", first, "-n", NAMESPACE, "--grace-period=0", "--force")
    eventually(lambda: reached(0.5), 120, "after the first interruption the fetch does not get to a half")
    second = live(stack)
    assert second["metadata"]["name"] != first
    stack.kill("east", second)

    def ready() -> bool:
        pool = stack.get("east", "prfaascluster", POOL)
        return condition(pool, "Ready").get("status") == "True"

    eventually(ready, 180, "the pool is not Ready after its model was fetched")
    assert seen == sorted(seen), "what was there was fetched again"
    assert len({done for done in seen if 0 < done < size}) >= 2
    assert "100 %" in status(stack, "table")
    assert condition(stack.get("east", "prfaascluster", POOL), "ModelCached")["reason"] == "Cached"

    def counted() -> bool:
        return sent(stack) >= size

    eventually(counted, 15, "the source has not counted what it sent")
    assert sent(stack) <= size + LOST_AT_MOST, "an interrupted fetch began anew"
    (instance,) = stack.objects("east", "pods", "-l", f"prfaas.io/instance={POOL}-0")
    assert instance["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
