"""Ten minutes of traffic while things are killed, one after the other, in an order drawn from a seed."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import pytest

from e2e.stack import NAMESPACE, OPERATOR_PODS, SYSTEM, Stack
from e2e.traffic import traffic

SECONDS = 600.0
SEED = 20_260_604
GROWTH_MIB = 40.0
"""No process of ours may have grown by more when the traffic ends."""


def kill(stack: Stack, datacenter: str, selector: str, rng: random.Random, namespace: str = NAMESPACE) -> str:
    pods = stack.objects(datacenter, "pods", "-l", selector, namespace=namespace)
    if not pods:
        return f"{datacenter}: nothing to kill"
    name: str = rng.choice(pods)["metadata"]["name"]
    stack.datacenters.kubectl(datacenter, "delete", "pod", name, "-n", namespace, "--force", "--grace-period=0")
    return f"{datacenter}: killed {name}"


def cut(stack: Stack, seconds: float) -> str:
    stack.datacenters.set_line("east", "west", up=False)
    time.sleep(seconds)
    stack.datacenters.set_line("east", "west", up=True)
    return f"line cut for {seconds:.0f} s"


def memory(stack: Stack) -> dict[str, float]:
    """Resident MiB by pod and container that have not restarted, from the kubelets."""
    found = {}
    for datacenter in stack.names:
        for node in stack.datacenters.node_addresses(datacenter):
            text = stack.datacenters.kubectl(
                datacenter, "get", "--raw", f"/api/v1/nodes/{node}/proxy/metrics/resource", check=False
            )
            pattern = (
                r'^container_memory_working_set_bytes{container="([^"]+)",namespace="prfaas[^"]*",pod="([^"]+)"} (\S+)'
            )
            for container, pod, value in re.findall(pattern, text, re.MULTILINE):
                found[f"{datacenter}/{pod}/{container}"] = float(value) / 2**20
    return found


@pytest.mark.long
def test_nothing_is_ever_answered_wrongly_and_all_is_well_in_the_end(stack: Stack) -> None:
    rng = random.Random(SEED)
    faults: list[Callable[[], str]] = [
        lambda: kill(stack, "west", "prfaas.io/role=decode", rng),
        lambda: kill(stack, "west", "prfaas.io/role=prefill", rng),
        lambda: kill(stack, "east", "prfaas.io/role=prefill", rng),
        lambda: kill(stack, "west", "prfaas.io/role=router", rng),
        lambda: kill(stack, "west", OPERATOR_PODS, rng, SYSTEM),
        lambda: kill(stack, "east", OPERATOR_PODS, rng, SYSTEM),
        lambda: cut(stack, rng.uniform(5, 40)),
    ]
    before = memory(stack)
    done = []
    with traffic(stack.target(), [500, 8_000, 30_000, 90_000], streams=6) as flow:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(rng.uniform(10, 30))
            done.append(rng.choice(faults)())
        settled = flow.mark()
        stack.wait_ready()
        flow.wait_for(lambda seen: len(seen) > 40 and all(o.verified for o in seen[-20:]), settled, 120)
    print("\n".join(done))
    wrong = [outcome.error for outcome in flow.outcomes if outcome.error and outcome.error.startswith("wrong text")]
    assert wrong == []
    answered = sum(outcome.verified for outcome in flow.outcomes)
    print(f"{answered} of {len(flow.outcomes)} requests answered and verified through {len(done)} faults")
    assert answered > 0.8 * len(flow.outcomes)
    after = memory(stack)
    grown = {name: after[name] - before[name] for name in before if name in after}
    assert {name: mib for name, mib in grown.items() if mib > GROWTH_MIB} == {}
