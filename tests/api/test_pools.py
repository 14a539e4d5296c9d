"""What the pool models compute: how instances divide between roles, and the engine of a role."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.common import EnvVar, Resources
from prfaas.api.pd_cluster import PDCluster, Pool, RoleBounds
from prfaas.api.prfaas_cluster import PrfaaSCluster
from tests.api.documents import REMOVE, example


def pd_cluster(**changes: object) -> PDCluster:
    """The full example with changed members; `a__b` stands for `spec.a.b`."""
    paths = {"spec." + name.replace("__", "."): value for name, value in changes.items()}
    return PDCluster.model_validate(example("PDCluster", {**paths, "metadata.namespace": "default"}))


@st.composite
def bounds(draw: st.DrawFn) -> RoleBounds:
    """Bounds of a role, with or without a maximum."""
    lowest = draw(st.integers(1, 6))
    return RoleBounds(min=lowest, max=draw(st.none() | st.integers(lowest, lowest + 6)))


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Any pool that the rules accept, and that is not off."""
    prefill, decode = draw(bounds()), draw(bounds())
    lowest = prefill.min + decode.min
    highest = prefill.max + decode.max if prefill.max and decode.max else lowest + 10
    initial = draw(st.none() | st.integers(prefill.min, prefill.max or prefill.min + 20))
    instances = draw(st.integers(lowest, highest))
    return Pool(instances=instances, prefill=prefill, decode=decode, initial_prefill=initial)


@given(pools(), st.none() | st.integers(0, 30))
def test_every_accepted_pool_divides_within_all_bounds(pool: Pool, wanted: int | None) -> None:
    prefill = pool.prefill_instances(wanted)
    decode = pool.instances - prefill

    for count, bounds in ((prefill, pool.prefill), (decode, pool.decode)):
        assert bounds.min <= count
        assert bounds.max is None or count <= bounds.max


@given(pools(), st.integers(0, 30))
def test_the_division_is_the_one_nearest_to_what_was_wanted(pool: Pool, wanted: int) -> None:
    allowed = [
        count
        for count in range(pool.instances + 1)
        if pool.prefill.min <= count <= (pool.prefill.max or count)
        and pool.decode.min <= pool.instances - count <= (pool.decode.max or pool.instances)
    ]

    assert pool.prefill_instances(wanted) == min(allowed, key=lambda count: abs(count - wanted))


def test_a_pool_that_is_off_has_no_instances_of_either_role() -> None:
    assert Pool(instances=0, initial_prefill=4).prefill_instances() == 0


def test_the_division_begins_with_initial_prefill_or_the_fewest() -> None:
    assert pd_cluster().spec.pool.prefill_instances() == 3
    assert pd_cluster(pool__initialPrefill=REMOVE).spec.pool.prefill_instances() == 2


def test_a_roles_engine_adds_arguments_and_overrides_environment_and_resources() -> None:
    spec = pd_cluster(
        engine__args=["--a"],
        engine__env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        roles__decode={"args": ["--b"], "env": [{"name": "B", "value": "3"}, {"name": "C"}]},
        roles__prefill={"resources": {"limits": {"memory": "1Gi"}}},
    ).spec

    decode, prefill = spec.engine_for("decode"), spec.engine_for("prefill")

    assert decode.args == ("--a", "--b")
    assert decode.env == (EnvVar(name="A", value="1"), EnvVar(name="B", value="3"), EnvVar(name="C"))
    assert decode.resources == spec.engine.resources
    assert prefill.args == ("--a",)
    assert prefill.env == spec.engine.env
    assert prefill.resources == Resources(limits={"memory": "1Gi"})


def test_a_model_is_asked_for_by_its_served_name_or_its_name() -> None:
    assert pd_cluster().spec.model.client_name == "long"
    assert pd_cluster(model__servedName=REMOVE).spec.model.client_name == "org/long-model"


def test_a_status_of_a_newer_release_can_be_read() -> None:
    document = example("PrfaaSCluster", {"metadata.namespace": "default", "status": {"instances": 2, "novel": 1}})

    assert PrfaaSCluster.model_validate(document).status.instances == 2
