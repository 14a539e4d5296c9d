"""What a person writes to have it planned: a PlanInput document, the three kinds' manifests, or both together.

    PlanInput           workload, objective, and any pools and links that no manifest describes
    PrfaaSCluster       a remote prefill pool
    PDCluster           a PD pool; its spec's threshold and split are the present setting
    InterClusterLink    a link, if the PDCluster's spec names it (either end will do)

A pool's profile is the one that `profiles` gives for its name, else the shipped one of its accelerator and GPU count.
Whatever is wrong is said with the document and the path of the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from prfaas.api.base import API_VERSION, ApiModel
from prfaas.api.profile import Profile
from prfaas.api.profiles import shipped, shipped_names
from prfaas.planner.errors import PlanError
from prfaas.planner.setting import Objective, ServiceTime, Setting, Split
from prfaas.planner.topology import Link, PDPool, PrfaaSPool, Topology
from prfaas.planner.workload import Bucket, Histogram, Workload

PoolName = Annotated[str, Field(min_length=1, max_length=253)]
Count = Annotated[int, Field(ge=0, le=100_000)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Length = Annotated[float, Field(ge=0, le=1e8)]
Gbps = Annotated[float, Field(gt=0, le=1e6)]
AnyProfile = Annotated[str, Field(min_length=1)] | Profile
KINDS = ("PlanInput", "PrfaaSCluster", "PDCluster", "InterClusterLink")


class LogNormalInput(ApiModel):
    """Uncached lengths, log-normal between two bounds and renormalised."""

    mu: Annotated[float, Field(ge=-20, le=20)]
    """Mean of ln(tokens)."""
    sigma: Annotated[float, Field(ge=0.01, le=5)]
    """Deviation of ln(tokens)."""
    min_tokens: Annotated[float, Field(ge=1, le=1e8)]
    """Shortest, tokens."""
    max_tokens: Annotated[float, Field(ge=1, le=1e8)]
    """Longest, tokens."""


class BucketInput(ApiModel):
    """Requests of uncached length above `minTokens` and up to `maxTokens`."""

    min_tokens: Length
    """Lower edge, tokens."""
    max_tokens: Length
    """Upper edge, tokens."""
    count: Annotated[float, Field(ge=0, le=1e15)]
    """How many, or any weight."""
    cached_tokens: Length = 0.0
    """Mean cached prefix, tokens."""
    output_tokens: Length | None = None
    """Mean output, tokens; absent: the workload's."""


class WorkloadInput(ApiModel):
    """What requests look like: exactly one of logNormal and histogram."""

    log_normal: LogNormalInput | None = None
    """Lengths by a distribution."""
    histogram: Annotated[tuple[BucketInput, ...], Field(min_length=1, max_length=10_000)] | None = None
    """Lengths as counted."""
    output_tokens: Annotated[float, Field(ge=0, le=1e7)]
    """Mean output, tokens."""
    cached_tokens: Length = 0.0
    """Cached prefix of every request, tokens; with a histogram its buckets say it."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.log_normal is None) == (self.histogram is None):
            raise ValueError("exactly one of logNormal and histogram must be set")
        return self

    def workload(self) -> Workload:
        """The workload. Raises PlanError for numbers that are no distribution."""
        if self.log_normal is not None:
            f = self.log_normal
            return Workload.log_normal(
                mu=f.mu,
                sigma=f.sigma,
                lo=f.min_tokens,
                hi=f.max_tokens,
                output=self.output_tokens,
                cached=self.cached_tokens,
            )
        assert self.histogram is not None
        buckets = []
        for each in self.histogram:
            output = self.output_tokens if each.output_tokens is None else each.output_tokens
            sums = each.cached_tokens * each.count, output * each.count
            buckets.append(Bucket(each.min_tokens, each.max_tokens, each.count, *sums))
        return Histogram(tuple(buckets)).workload()


class PrfaaSInput(ApiModel):
    """A remote prefill pool."""

    name: PoolName
    """Its name."""
    profile: AnyProfile
    """Name of a shipped profile, or a Profile."""
    instances: Count
    """Prefill instances."""
    gpu_price: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Price of a GPU in any unit."""


class BoundsInput(ApiModel):
    """Bounds on the instances of a role."""

    min: Count = 1
    """Fewest."""
    max: Count | None = None
    """Most; absent: what the other role leaves."""


class PDInput(PrfaaSInput):
    """A PD pool."""

    prefill: BoundsInput = BoundsInput()
    """Bounds on Np."""
    decode: BoundsInput = BoundsInput()
    """Bounds on Nd."""
    rdma_gbps: Gbps = 800.0
    """What a KV transfer within the pool gets, Gbit/s."""
    demand: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Its part of the traffic relative to the others'; absent: the plan divides the traffic."""


class LinkInput(ApiModel):
    """A link from a PrfaaS pool to a PD pool."""

    name: PoolName
    """Its name."""
    prfaas: PoolName
    """The pool that prefills."""
    pd: PoolName
    """The pool that decodes."""
    line: PoolName | None = None
    """Physical line; links over one line share its rate."""
    capacity_gbps: Gbps
    """What the line was built for, Gbit/s."""
    measured_gbps: Gbps | None = None
    """What it was measured to carry."""
    flow_gbps: Gbps | None = None
    """What one transfer gets at most."""
    headroom: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    """Share of the rate kept free for loss and bursts."""
    allowance: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests that may leave over it."""
    min_threshold: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Lowest threshold, tokens."""
    max_threshold: Annotated[int, Field(ge=0, le=100_000_000)] | None = None
    """Highest threshold, tokens; absent: the link need not be used."""


class SLOInput(ApiModel):
    """What clients were promised."""

    ttft_p90_seconds: Annotated[float | None, Field(gt=0, le=86_400, alias="ttftP90Seconds")] = None
    """P90 of the time to first token, seconds."""
    tokens_per_second: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Speed of every answer; bounds the decode batch."""


class PlanInput(ApiModel):
    """Everything that a plan needs and the three kinds do not say."""

    api_version: Literal["prfaas.io/v1alpha1"] = API_VERSION  # type: ignore[assignment]  # a str constant, as in Profile
    """Version of this document's format."""
    kind: Literal["PlanInput"] = "PlanInput"
    """Always PlanInput."""
    workload: WorkloadInput
    """What requests look like."""
    service_time: ServiceTime = "mean"
    """`mean`: work is E[T(L)]. `representative`: T(E[L]), as the paper computes."""
    objective: Literal["throughput", "latency", "cost"] = "throughput"
    """What the plan is for."""
    rate: Positive | None = None
    """Offered requests/s."""
    slo: SLOInput = SLOInput()
    """What clients were promised."""
    profiles: dict[str, AnyProfile] = Field(default_factory=dict)
    """Profiles of the manifests' pools, by pool."""
    prfaas: tuple[PrfaaSInput, ...] = ()
    """Remote prefill pools."""
    pd: tuple[PDInput, ...] = ()
    """PD pools."""
    links: tuple[LinkInput, ...] = ()
    """Links."""


@dataclass(frozen=True)
class Planning:
    """What `plan` takes."""

    workload: Workload
    topology: Topology
    objective: Objective
    present: Setting | None = None
    """What the manifests say is so now; None: there are none."""


def read_documents(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> Planning:
    """Everything in some documents, each with the place where it stands. Raises PlanError."""
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {kind: [] for kind in KINDS}
    for place, content in documents:
        kind = content.get("kind")
        if kind == "Kustomization":
            continue  # in a folder of manifests it stands beside them
        if kind not in found:
            raise PlanError(f"{place}: kind", f"must be one of {', '.join(KINDS)}, got {kind!r}")
        found[kind].append((place, content))
    if len(found["PlanInput"]) != 1:
        raise PlanError("PlanInput", f"exactly one such document is needed, there are {len(found['PlanInput'])}")
    place, content = found["PlanInput"][0]
    written = _parsed(PlanInput, place, content)
    pools = _Pools(written, place)
    for place, content in found["PrfaaSCluster"]:
        pools.add_prfaas(place, content)
    for place, content in found["PDCluster"]:
        pools.add_pd(place, content)
    for place, content in found["InterClusterLink"]:
        pools.add_link(place, content)
    return Planning(written.workload.workload(), pools.topology(), _objective(written), pools.present())


def _objective(written: PlanInput) -> Objective:
    return Objective(written.objective, written.rate, written.slo.ttft_p90_seconds, written.service_time)


class _Pools:
    """Pools and links from both kinds of document."""

    def __init__(self, written: PlanInput, place: str) -> None:
        self.written = written
        speed = written.slo.tokens_per_second
        self.prfaas = [
            PrfaaSPool(
                each.name, _profile(f"{place}: prfaas[{i}].profile", each.profile), each.instances, each.gpu_price
            )
            for i, each in enumerate(written.prfaas)
        ]
        self.pd = [
            PDPool(
                each.name,
                _within(_profile(f"{place}: pd[{i}].profile", each.profile), speed, f"{place}: slo.tokensPerSecond"),
                each.instances,
                each.prefill.min,
                each.prefill.max,
                each.decode.min,
                each.decode.max,
                each.rdma_gbps,
                each.demand,
                each.gpu_price,
            )
            for i, each in enumerate(written.pd)
        ]
        self.links = [Link(**each.model_dump()) for each in written.links]
        self.named: dict[tuple[str, str], Any] = {}
        self.splits: dict[str, Split] = {}
        self.ends: dict[tuple[str, str], tuple[str, str, Any]] = {}

    def add_prfaas(self, place: str, content: Mapping[str, Any]) -> None:
        """A PrfaaSCluster."""
        from prfaas.api.prfaas_cluster import PrfaaSClusterSpec

        name, spec = _spec(PrfaaSClusterSpec, place, content)
        self.prfaas.append(PrfaaSPool(name, self._profile_of(place, name, spec), spec.instances))

    def add_pd(self, place: str, content: Mapping[str, Any]) -> None:
        """A PDCluster, and the setting that its spec asks for."""
        from prfaas.api.pd_cluster import PDClusterSpec

        name, spec = _spec(PDClusterSpec, place, content)
        profile = _within(
            self._profile_of(place, name, spec), self.written.slo.tokens_per_second, "PlanInput: slo.tokensPerSecond"
        )
        pool = spec.pool
        bounds = pool.prefill.min, pool.prefill.max, pool.decode.min, pool.decode.max
        self.pd.append(PDPool(name, profile, pool.instances, *bounds))
        prefill = pool.prefill_instances()
        self.splits[name] = Split(prefill, pool.instances - prefill)
        for remote in spec.remote_prefill:
            self.named[name, remote.link_ref] = remote

    def add_link(self, place: str, content: Mapping[str, Any]) -> None:
        """One end of a link; the PD pool's end gives the name."""
        from prfaas.api.inter_cluster_link import InterClusterLinkSpec

        name, spec = _spec(InterClusterLinkSpec, place, content)
        here, there = spec.local.name, spec.remote.name
        mine = spec.local.kind == "PDCluster"
        key = (there, here) if mine else (here, there)
        if mine or key not in self.ends:
            self.ends[key] = (place, name if mine else "", spec)

    def topology(self) -> Topology:
        """All pools and links. Raises PlanError."""
        links = list(self.links)
        for (prfaas, pd), (place, name, spec) in self.ends.items():
            mine = {link: remote for (pool, link), remote in self.named.items() if pool == pd}
            remote = mine.get(name)
            if not name and len(mine) == 1:  # only the other end is here; the pool has one link, so it is that one
                name, remote = next(iter(mine.items()))
            if remote is None:
                continue  # the pool's spec does not send prompts over this link
            if prfaas not in {pool.name for pool in self.prfaas}:
                raise PlanError(f"{place}: spec.remote.name", f"there is no PrfaaSCluster {prfaas!r} in the files")
            from prfaas.api.common import quantity_value

            links.append(
                Link(
                    name,
                    prfaas,
                    pd,
                    float(quantity_value(spec.network.capacity)) / 1e9,
                    spec.network.line,
                    min_threshold=remote.min_threshold or 0,
                    max_threshold=remote.max_threshold,
                )
            )
        return Topology(tuple(self.prfaas), tuple(self.pd), tuple(links))

    def present(self) -> Setting | None:
        """The setting that the manifests ask for; None where not every PD pool has one."""
        if not self.splits or len(self.splits) != len(self.pd):
            return None
        names = {link.name for link in self.topology().links}
        cuts = {link: remote.initial_threshold for (_, link), remote in self.named.items() if link in names}
        share = 1 / len(self.splits)
        return Setting(dict(self.splits), cuts, dict.fromkeys(self.splits, share))

    def _profile_of(self, place: str, name: str, spec: Any) -> Profile:
        given = self.written.profiles.get(name)
        if given is not None:
            return _profile(f"PlanInput: profiles.{name}", given)
        accelerator = spec.node_pool.accelerator
        wanted = f"{accelerator}x{spec.gpus_per_instance}"
        if accelerator is None or wanted not in shipped_names():
            raise PlanError(
                f"{place}: spec.nodePool.accelerator",
                f"there is no shipped profile {wanted!r} ({', '.join(shipped_names())}): give one in the PlanInput's"
                f" profiles.{name}",
            )
        return shipped(wanted)


def _profile(path: str, given: str | Profile) -> Profile:
    if isinstance(given, Profile):
        return given
    try:
        return shipped(given)
    except KeyError as error:
        raise PlanError(path, str(error.args[0])) from None


def _within(profile: Profile, speed: float | None, path: str) -> Profile:
    """The profile with the batch that keeps `speed` tokens/s for every answer."""
    if speed is None:
        return profile
    batch = profile.decode.batch_within(speed)
    if batch < 1:
        raise PlanError(path, f"{profile.accelerator} cannot decode {speed:g} tokens/s even for one answer at a time")
    return profile.model_copy(update={"decode": profile.decode.model_copy(update={"max_batch": batch})})


Spec = TypeVar("Spec", bound=BaseModel)


def _spec(model: type[Spec], place: str, content: Mapping[str, Any]) -> tuple[str, Spec]:
    metadata = content.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        raise PlanError(f"{place}: metadata.name", "is missing")
    return name, _parsed(model, place, content.get("spec", {}), "spec")


def _parsed(model: type[Spec], place: str, content: Any, prefix: str = "") -> Spec:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        complaint = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = prefix + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in complaint["loc"])
        problem = complaint["msg"].removeprefix("Value error, ")
        raise PlanError(f"{place}: {path.lstrip('.') or 'document'}", problem) from None


def with_objective(planning: Planning, **changes: Any) -> Planning:
    """The same with parts of the objective that a flag says otherwise."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(planning, objective=replace(planning.objective, **given)) if given else planning


def names_of(planning: Planning) -> Sequence[str]:
    """Names that a variation may use: pools and links."""
    topology = planning.topology
    return [each.name for group in (topology.prfaas, topology.pd, topology.links) for each in group]
