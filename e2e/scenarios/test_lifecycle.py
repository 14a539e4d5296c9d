"""Place, edit, pause and delete, for each kind: exactly the named children change, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.stack import EXCHANGE, SYSTEM, Stack, condition, eventually


def uids(stack: Stack, datacenter: str, kind: str) -> dict[str, str]:
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in stack.objects(datacenter, kind)}


def role_of(stack: Stack, name: str) -> str:
    labels: dict[str, str] = stack.get("west", "deployment", name)["metadata"]["labels"]
    return labels["prfaas.io/role"]


def mirrored(stack: Stack) -> list[str]:
    """Addresses of east's prefill instances as west's routers see them."""
    slices = stack.objects("west", "endpointslices", "-l", "prfaas.io/link=east")
    return sorted(
        address
        for each in slices
        for endpoint in each["endpoints"] or []
        if endpoint["conditions"]["ready"]
        for address in endpoint["addresses"]
    )


def pod_addresses(stack: Stack, datacenter: str, role: str) -> list[str]:
    pods = stack.objects(datacenter, "pods", "-l", f"prfaas.io/role={role}")
    return sorted(pod["status"]["podIP"] for pod in pods if "deletionTimestamp" not in pod["metadata"])


def test_the_samples_are_placed_as_they_say(stack: Stack) -> None:
    assert sorted(uids(stack, "east", "deployments")) == ["h200-0", "h200-1"]
    assert sorted(uids(stack, "west", "deployments")) == ["h20-0", "h20-1", "h20-2", "h20-router"]
    assert [role_of(stack, f"h20-{index}") for index in range(3)].count("prefill") == 1
    for datacenter, kind, name in (
        ("east", "prfaascluster", "h200"),
        ("east", "interclusterlink", "west"),
        ("west", "pdcluster", "h20"),
        ("west", "interclusterlink", "east"),
    ):
        stack.datacenters.kubectl(datacenter, "wait", "--for=condition=Ready", kind, name, "-n", "prfaas")
    policy = stack.get("west", "pdcluster", "h20")["status"]["policy"]
    assert policy["thresholds"] == [{"link": "east", "tokens": 19_400}]
    assert policy["routersAcknowledged"] == policy["routersTotal"] == 1
    assert mirrored(stack) == pod_addresses(stack, "east", "prefill")


def test_a_smaller_pool_loses_one_instance_here_and_at_the_peer(stack: Stack) -> None:
    before = uids(stack, "east", "deployments")
    stack.datacenters.kubectl("east", "scale", "prfaascluster", "h200", "-n", "prfaas", "--replicas=1")
    eventually(lambda: uids(stack, "east", "deployments") == {"h200-0": before["h200-0"]}, 60, "h200-1 did not go")
    eventually(
        lambda: mirrored(stack) == pod_addresses(stack, "east", "prefill"), 60, "west still has the old endpoints"
    )
    assert len(mirrored(stack)) == 1


def test_one_more_prefill_instance_converts_exactly_one_child_in_place(stack: Stack) -> None:
    before = {name: (uid, role_of(stack, name)) for name, uid in uids(stack, "west", "deployments").items()}
    stack.patch("west", "pdcluster", "h20", {"spec": {"pool": {"initialPrefill": 2}}})

    def converted() -> bool:
        roles = stack.get("west", "pdcluster", "h20").get("status", {}).get("roles", {})
        return bool(roles.get("prefill", {}).get("ready") == 2 and roles.get("decode", {}).get("ready") == 1)

    eventually(converted, 120, "Np did not become 2 and Nd 1")
    after = {name: (uid, role_of(stack, name)) for name, uid in uids(stack, "west", "deployments").items()}
    assert {name: uid for name, (uid, _) in after.items()} == {name: uid for name, (uid, _) in before.items()}
    changed = [name for name in before if before[name] != after[name]]
    assert len(changed) == 1
    assert (before[changed[0]][1], after[changed[0]][1]) == ("decode", "prefill")


@pytest.mark.parametrize(
    ("datacenter", "kind", "name", "child"),
    [
        ("east", "PrfaaSCluster", "h200", "poddisruptionbudget/h200-prefill"),
        ("west", "PDCluster", "h20", "poddisruptionbudget/h20-decode"),
        ("west", "InterClusterLink", "east", "service/east-remote-prefill"),
    ],
)
def test_a_paused_object_keeps_what_is_and_a_resumed_one_repairs_it(
    stack: Stack, datacenter: str, kind: str, name: str, child: str
) -> None:
    stack.patch(datacenter, kind, name, {"spec": {"paused": True}})

    def says_paused() -> bool:
        return any(
            each["reason"] == "Paused" for each in stack.get(datacenter, kind, name)["status"].get("conditions", [])
        )

    eventually(says_paused, 30, f"{kind} {name} does not say that it is paused")
    child_kind, child_name = child.split("/")
    stack.datacenters.kubectl(datacenter, "delete", child_kind, child_name, "-n", "prfaas")
    # An annotation wakes the reconcile; when it has been seen, the paused operator has had its chance to write.
    stack.nudge(datacenter, kind, name)
    assert child_name not in uids(stack, datacenter, child_kind), f"a paused {kind} had its {child_kind} made again"
    stack.patch(datacenter, kind, name, {"spec": {"paused": False}})
    eventually(lambda: child_name in uids(stack, datacenter, child_kind), 30, f"{child} did not come back")


def test_a_link_edited_to_name_another_peer_carries_nothing_until_it_is_put_right(stack: Stack) -> None:
    stack.patch("west", "interclusterlink", "east", {"spec": {"peer": {"clusterID": "north"}}})
    eventually(lambda: mirrored(stack) == [], 60, "endpoints of a peer with another identity stay mirrored")
    link = stack.get("west", "interclusterlink", "east")
    assert condition(link, "Compatible")["reason"] == "ClusterIDMismatch"
    assert "north" in condition(link, "Compatible")["message"]
    stack.patch("west", "interclusterlink", "east", {"spec": {"peer": {"clusterID": "east"}}})
    eventually(lambda: mirrored(stack) == pod_addresses(stack, "east", "prefill"), 60, "the link did not heal")


def test_a_child_edited_by_hand_is_put_right(stack: Stack) -> None:
    edit = {"spec": {"template": {"spec": {"nodeSelector": {"prfaas.io/accelerator": "H100"}}}}}
    stack.patch("east", "deployment", "h200-1", edit)

    def selector() -> dict[str, str]:
        template: dict[str, Any] = stack.get("east", "deployment", "h200-1")["spec"]["template"]
        found: dict[str, str] = template["spec"]["nodeSelector"]
        return found

    eventually(lambda: selector() == {"prfaas.io/accelerator": "H200"}, 30, "the edit was not put right")


def test_deleting_the_prefill_pool_takes_its_children_and_nothing_else(stack: Stack) -> None:
    others = uids(stack, "west", "deployments")
    stack.datacenters.kubectl("east", "delete", "prfaascluster", "h200", "-n", "prfaas", "--wait=true", "--timeout=60s")
    eventually(lambda: uids(stack, "east", "deployments") == {}, 60, "children outlived their PrfaaSCluster")
    eventually(
        lambda: stack.objects("east", "configmaps", "-l", "prfaas.io/origin", namespace=EXCHANGE) == [],
        60,
        "the pool is still published",
    )
    eventually(lambda: mirrored(stack) == [], 60, "west still sends prompts to a pool that is gone")
    link = stack.get("west", "interclusterlink", "east")
    assert condition(link, "Ready")["status"] == "False"
    assert uids(stack, "west", "deployments") == others
    assert "west" in uids(stack, "east", "interclusterlinks")


def test_deleting_the_pd_pool_takes_its_children_and_nothing_else(stack: Stack) -> None:
    stack.datacenters.kubectl("west", "delete", "pdcluster", "h20", "-n", "prfaas", "--wait=true", "--timeout=60s")
    eventually(lambda: uids(stack, "west", "deployments") == {}, 60, "children outlived their PDCluster")

    def left() -> list[str]:
        kinds = ("services", "poddisruptionbudgets", "rolebindings", "serviceaccounts")
        return [name for kind in kinds for name in uids(stack, "west", kind) if name.startswith("h20")]

    eventually(lambda: left() == [], 60, "children outlived their PDCluster")
    assert "east" in uids(stack, "west", "interclusterlinks")
    assert sorted(uids(stack, "east", "deployments")) == ["h200-0", "h200-1"]


def test_deleting_a_link_takes_its_mirror_and_short_prompts_go_on(stack: Stack) -> None:
    stack.datacenters.kubectl(
        "west", "delete", "interclusterlink", "east", "-n", "prfaas", "--wait=true", "--timeout=60s"
    )
    eventually(lambda: "east-remote-prefill" not in uids(stack, "west", "services"), 60, "the mirror outlived its link")
    eventually(lambda: mirrored(stack) == [], 60, "mirrored endpoints outlived their link")
    pool = stack.get("west", "pdcluster", "h20")
    assert condition(pool, "RouterReady")["status"] == "True"
    # The credential is the person's, not the link's.
    assert "peer-east" in {item["metadata"]["name"] for item in stack.objects("west", "secrets", namespace=SYSTEM)}
