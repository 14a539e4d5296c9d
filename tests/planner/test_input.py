"""PlanInput and manifests: what they become, and what is said of each mistake."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prfaas.cli.documents import read
from prfaas.planner.errors import PlanError
from prfaas.planner.input import Planning, read_documents
from prfaas.planner.plan import plan
from prfaas.planner.setting import Setting, Split
from prfaas.planner.topology import Link
from prfaas.planner.variation import Change, changed, parse_sweep, parse_what_if
from tests.planner.cases import PAPER_FILE, ROOT, topology, workload

SAMPLES = [str(ROOT / "manifests/samples" / name) for name in ("west/pdcluster.yaml", "west/link.yaml")]
SAMPLES += [str(ROOT / "manifests/samples" / name) for name in ("east/prfaascluster.yaml", "east/link.yaml")]
WORKLOAD = {"logNormal": {"mu": 9.9, "sigma": 1.0, "minTokens": 128, "maxTokens": 131072}, "outputTokens": 1024}


def document(**changes: Any) -> dict[str, Any]:
    """The case study, with members replaced."""
    content: dict[str, Any] = yaml.safe_load(PAPER_FILE.read_text())
    return {**content, **changes}


def parsed(*contents: dict[str, Any]) -> Planning:
    """What documents become."""
    return read_documents((f"file, document {i}", content) for i, content in enumerate(contents, start=1))


def test_the_example_is_the_case_study() -> None:
    planning = parsed(document())
    assert planning.workload == workload()
    assert planning.objective.service_time == "representative"
    assert planning.present is None
    expected = topology()
    assert planning.topology.pd == expected.pd
    assert planning.topology.links == expected.links
    assert planning.topology.prfaas[0].gpu_price == 2.0


def test_manifests_bring_pools_links_and_the_present_setting() -> None:
    contents = [(each.title, each.content) for each in read(SAMPLES)]
    planning = read_documents([("input", {"kind": "PlanInput", "workload": WORKLOAD}), *contents])
    assert [(pool.name, pool.instances, pool.profile.accelerator) for pool in planning.topology.prfaas] == [
        ("h200", 2, "H200")
    ]
    assert [(pool.name, pool.instances) for pool in planning.topology.pd] == [("h20", 3)]
    assert planning.topology.links == (Link("east", "h200", "h20", 100.0, "east-west"),)
    assert planning.present == Setting({"h20": Split(1, 2)}, {"east": 19_400}, {"h20": 1.0})
    assert planning.objective.service_time == "mean"
    found = plan(planning.workload, planning.topology, planning.objective, planning.present)
    assert found.staying is not None
    assert found.staying.loss > 0.2
    # One end of the link is enough, either one.
    for left_out in (1, 3):
        some = [each for i, each in enumerate(contents) if i != left_out]
        again = read_documents([("input", {"kind": "PlanInput", "workload": WORKLOAD}), *some])
        assert again.topology == planning.topology


def test_bounds_of_manifests_bind_the_plan() -> None:
    (title, content), *rest = [(each.title, each.content) for each in read(SAMPLES)]
    content["spec"]["pool"] = {"instances": 8, "prefill": {"min": 2, "max": 2}}
    content["spec"]["remotePrefill"][0] |= {"maxThreshold": 19_400, "minThreshold": 19_000}
    planning = read_documents([("input", {"kind": "PlanInput", "workload": WORKLOAD}), (title, content), *rest])
    found = plan(planning.workload, planning.topology, planning.objective, planning.present)
    assert found.setting.splits["h20"] == Split(2, 6)
    assert 19_000 <= found.setting.thresholds["east"] <= 19_400


def test_a_speed_that_was_promised_bounds_the_batch() -> None:
    steps = {"steps": [{"batch": 1, "seconds": 0.010}, {"batch": 101, "seconds": 0.060}], "maxBatch": 101}
    profile = {**parsed(document()).topology.pd[0].profile.to_wire(), "decode": steps}
    pd = [{"name": "h20", "profile": profile, "instances": 8}]
    for speed, batch in ((20, 81), (40, 31), (100, 1)):
        planning = parsed(document(pd=pd, slo={"tokensPerSecond": speed}))
        assert planning.topology.pd[0].profile.decode.max_batch == batch
    with pytest.raises(PlanError, match=r"slo\.tokensPerSecond: H20 cannot decode 200 tokens/s even for one answer"):
        parsed(document(pd=pd, slo={"tokensPerSecond": 200}))


def test_a_histogram_is_joint() -> None:
    buckets = [
        {"minTokens": 0, "maxTokens": 1_000, "count": 3, "outputTokens": 10},
        {"minTokens": 1_000, "maxTokens": 9_000, "count": 1, "cachedTokens": 500},
    ]
    of = parsed(document(workload={"histogram": buckets, "outputTokens": 100})).workload
    assert of.share(1_000) == 0.25
    assert of.output == pytest.approx((3 * 10 + 100) / 4)
    assert of.cached == pytest.approx(125)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Deployment"}, r"file, document 1: kind: must be one of PlanInput, PrfaaSCluster"),
        ({"workload": {"outputTokens": 1}}, r"document 1: workload: exactly one of logNormal and histogram"),
        ({"workload": WORKLOAD | {"outputTokens": -1}}, r"workload\.outputTokens: .*greater than or equal to 0"),
        ({"workload": WORKLOAD | {"outputTokens": float("nan")}}, r"workload\.outputTokens: .*"),
        ({"workload": WORKLOAD | {"outputSeconds": 1}}, r"workload\.outputSeconds: Extra inputs are not permitted"),
        ({"serviceTime": "median"}, r"serviceTime: .*'mean' or 'representative'"),
        ({"objective": "latency"}, r"rate: is needed for the objective latency"),
        ({"prfaas": [{"name": "a", "profile": "H9x9", "instances": 1}]}, r"prfaas\[0\]\.profile: no shipped profile"),
        ({"prfaas": []}, r"links\[0\]\.prfaas: there is no pool 'h200'"),
        ({"pd": []}, r"pd: there must be at least one PD pool"),
        ({"pd": [{"name": "h20", "profile": "H20x8", "instances": 1}]}, r"pd\[0\]\.instances: 1 cannot be divided"),
        (
            {"pd": [{"name": "h20", "profile": "H20x8", "instances": 8}] * 2},
            r"pd: the name 'h20' is there 2 times",
        ),
        (
            {"links": [{"name": "l", "prfaas": "h200", "pd": "h20", "capacityGbps": 0}]},
            r"links\[0\]\.capacityGbps: .*greater than 0",
        ),
    ],
)
def test_a_mistake_is_said_with_its_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parsed(document(**change))


def test_profiles_say_how_far_they_were_measured() -> None:
    points = [{"tokens": 1_000, "seconds": 0.5}, {"tokens": 32_000, "seconds": 5.0}]
    profile = {**parsed(document()).topology.pd[0].profile.to_wire(), "prefill": {"points": points}}
    planning = parsed(document(pd=[{"name": "h20", "profile": profile, "instances": 8}]))
    with pytest.raises(PlanError, match=r"h20\.profile\.prefill\.points: end at 32000 tokens, .* up to 131,072"):
        plan(planning.workload, planning.topology, planning.objective)
    short = WORKLOAD | {"logNormal": {"mu": 9, "sigma": 1, "minTokens": 128, "maxTokens": 32_000}}
    planning = parsed(document(workload=short, pd=[{"name": "h20", "profile": profile, "instances": 8}]))
    assert plan(planning.workload, planning.topology, planning.objective).expected.lambda_max > 0


def test_documents_that_do_not_fit_together() -> None:
    with pytest.raises(PlanError, match="PlanInput: exactly one such document is needed, there are 0"):
        parsed()
    with pytest.raises(PlanError, match="exactly one such document is needed, there are 2"):
        parsed(document(), document())
    contents = [(each.title, each.content) for each in read(SAMPLES[:2])]
    with pytest.raises(PlanError, match=r"spec\.remote\.name: there is no PrfaaSCluster 'h200' in the files"):
        read_documents([("input", {"kind": "PlanInput", "workload": WORKLOAD}), *contents])
    contents[0][1]["spec"]["nodePool"]["accelerator"] = "B300"
    with pytest.raises(PlanError, match=r"nodePool\.accelerator: there is no shipped profile 'B300x8'.*profiles\.h20"):
        read_documents([("input", {"kind": "PlanInput", "workload": WORKLOAD}), *contents])
    contents[0][1]["spec"]["pool"]["instances"] = -1
    with pytest.raises(PlanError, match=r"pdcluster\.yaml .*: spec\.pool\.instances: .*greater than or equal to 0"):
        read_documents([("input", {"kind": "PlanInput", "workload": WORKLOAD}), *contents])


def test_changes_are_read_and_made() -> None:
    assert parse_what_if("prfaas=+2,link=25") == [Change("prfaas", 2, relative=True), Change("link", 25)]
    assert [each.value for each in parse_sweep("link=100,7.5")] == [100, 7.5]
    on = topology(measured_gbps=40.0)
    assert changed(on, Change("h200", -1, relative=True)).prfaas[0].instances == 3
    assert changed(on, Change("pd", 12)).pd[0].instances == 12
    assert changed(on, Change("link", 5, relative=True)).links[0].usable_gbps == 45
    assert changed(on, Change("east", 7.5)).links[0].usable_gbps == 7.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_what_if("prfaas"), "'prfaas' is not NAME=NUMBER"),
        (lambda: parse_what_if("prfaas=many"), "'many' is not a number"),
        (lambda: parse_sweep("link=1,nan"), "'nan' is not a number"),
        (lambda: parse_sweep("link=" + ",".join("1" * 201)), "has 201 points, at most 200"),
        (lambda: changed(topology(), Change("west", 1)), "west: there is no such pool or link: h200, h20, east"),
        (lambda: changed(topology(), Change("h200", 0.5)), "h200: would leave 0.5 instances"),
        (lambda: changed(topology(), Change("east", -100, relative=True)), "east: would leave 0 Gbit/s"),
    ],
)
def test_changes_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
