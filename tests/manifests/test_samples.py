"""The samples are valid for our models, and the demo's scales are those that the line and the link give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.datacenters.topology import bits_per_second, load_topology
from prfaas.api import common
from prfaas.api.inter_cluster_link import InterClusterLink
from prfaas.api.pd_cluster import PDCluster
from prfaas.api.prfaas_cluster import PrfaaSCluster
from prfaas.api.profile import kv_byte_scale
from prfaas.workloads import strategic
from prfaas.workloads.engine import check, compatibility_key, warnings

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "manifests" / "samples"
KINDS = {"PrfaaSCluster": PrfaaSCluster, "PDCluster": PDCluster, "InterClusterLink": InterClusterLink}


def document(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((SAMPLES / path).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("path", ["east/prfaascluster.yaml", "east/link.yaml", "west/pdcluster.yaml", "west/link.yaml"])
def test_a_sample_is_valid(path: str) -> None:
    sample = document(path)
    sample["metadata"]["namespace"] = "prfaas"  # as its kustomization sets it
    KINDS[sample["kind"]].model_validate(sample)


def pool(path: str, *patches: str) -> PrfaaSCluster | PDCluster:
    """A pool of the samples with patches over it, as kustomize merges them."""
    merged = document(path)
    for patch in patches:
        merged = strategic.merge(merged, document(patch), "sample")
    merged["metadata"]["namespace"] = "prfaas"
    return PrfaaSCluster.model_validate(merged) if path.startswith("east") else PDCluster.model_validate(merged)


@pytest.mark.parametrize("patches", [(), ("demo/{}/engine.yaml",)], ids=["real", "demo"])
def test_both_ends_can_use_each_others_kv_cache_and_nothing_is_warned_of(patches: tuple[str, ...]) -> None:
    ends = [
        pool(path, *(patch.format(path.partition("/")[0]) for patch in patches))
        for path in ("east/prfaascluster.yaml", "west/pdcluster.yaml")
    ]

    for end in ends:
        check(end.spec)
        assert warnings(end.spec) == ()
    assert len({compatibility_key(end.spec) for end in ends}) == 1


@pytest.mark.parametrize(("side", "link"), [("east", "east/link.yaml"), ("west", "west/link.yaml")])
def test_the_demo_scales_are_those_of_its_line(side: str, link: str) -> None:
    args = document(f"demo/{side}/engine.yaml")["spec"]["engine"]["args"]
    flags = dict(zip(args[::2], args[1::2], strict=True))
    line = bits_per_second(load_topology().lines[0].rate)
    capacity = common.bits_per_second(document(link)["spec"]["network"]["capacity"])
    wanted = kv_byte_scale(line / 1e9, capacity / 1e9, float(flags["--time-scale"]))
    assert float(flags["--kv-byte-scale"]) == pytest.approx(wanted)
