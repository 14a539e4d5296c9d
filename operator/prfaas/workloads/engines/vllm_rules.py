"""What a user may not tell vLLM, since prefill and decode would part without an error, or end with one.

Each rule names the field, what happens, and what to write instead. Where a public report tells of it, its number
follows. `docs/engine.md` has them in a table, and each has a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import eq
from typing import Any

from prfaas.api.labels import PORT_KV
from prfaas.api.pd_cluster import PDClusterSpec
from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines import flags, vllm, vllm_kv_rules
from prfaas.workloads.engines.base import engine_of, image_name, roles_of
from prfaas.workloads.engines.findings import (
    Arguments,
    Finding,
    Variable,
    arguments_of,
    environment_of,
    variables_of,
    warning,
)
from prfaas.workloads.engines.flags import Given

FIELDS = {
    "--model": "spec.model.name",
    "--served-model-name": "spec.model.servedName",
    "--revision": "spec.model.revision",
    "--port": "spec.engine.port",
    "--tensor-parallel-size": "spec.engine.parallelism.tensor",
    "--pipeline-parallel-size": "spec.engine.parallelism.pipeline",
    "--data-parallel-size": "spec.engine.parallelism.data",
    "--nnodes": "spec.nodesPerInstance",
    "--node-rank": "spec.nodesPerInstance",
    "--master-addr": "spec.nodesPerInstance",
    "--headless": "spec.nodesPerInstance",
    "--shutdown-timeout": "spec.engine.shutdownTimeout",
    "--enable-prefix-caching": "spec.engine.prefixCaching",
    "--ssl-keyfile": "spec.engine.tls",
    "--ssl-certfile": "spec.engine.tls",
}
"""Flags whose value more depends on than the engine: Services, probes, pods, routers, the peer."""
BREAKS = {
    "--kv-offloading-size": (
        "replaces kv_connector and kv_role of --kv-transfer-config: prefill and decode would no longer exchange KV "
        "cache, and vLLM does not say so",
        "leave it out",
    ),
    "--uds": ("makes the engine listen on a file instead of a port: nothing could reach it", "leave it out"),
    "--grpc": ("replaces the HTTP server that probes and routers talk to", "leave it out"),
    "--prefill-context-parallel-size": (
        "multiplies the GPUs that the engine looks for, and NIXL ends with an error where it decodes",
        "leave it out; spec.engine.parallelism uses all GPUs",
    ),
    **dict.fromkeys(
        (
            "--data-parallel-rank",
            "--data-parallel-start-rank",
            "--data-parallel-external-lb",
            "--data-parallel-hybrid-lb",
            "--data-parallel-multi-port-external-lb",
        ),
        (
            "gives each data parallel rank a server of its own, and an instance has one address",
            "set spec.engine.parallelism.data, or make each rank an instance",
        ),
    ),
}
"""Flags that part prefill and decode whatever their value."""
WITH_FIELD = {
    "--dtype": ("dtype", "auto"),
    "--kv-cache-dtype": ("kv_cache_dtype", "auto"),
    "--attention-backend": ("attention_backend", None),
    "--block-size": ("block_size", None),
}
"""Flags that may stand in either place: field of the engine and its default."""
BLOCK_SIZES: Mapping[str, tuple[str, Callable[[int], bool]]] = {
    **{backend: (str(size), partial(eq, size)) for backend, size in vllm.BLOCK_SIZES.items()},
    "FLASHINFER_MLA": ("32 or 64", lambda size: size in (32, 64)),
    **{
        backend: ("a multiple of 16", lambda size: size % 16 == 0)
        for backend in ("FLASH_ATTN", "FLASH_ATTN_MLA", "TRITON_ATTN")
    },
}
"""Attention backend -> block sizes that it takes."""
OLDEST = (0, 33)
_LOOPBACK = re.compile(r"^(localhost|127\..*|::1|0\.0\.0\.0|::)?$")
_ADDRESSES = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_HOST_IP")
_WORKERS_OWN = "--profile"
"""A flag of the GPU-less worker's, which vLLM would take for the beginning of --profiler-config."""
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def findings(spec: PoolSpec) -> Iterator[Finding]:
    """All that vLLM would not forgive, and what a person should know."""
    yield from _image(spec)
    yield from _command(spec)
    for arguments in arguments_of(spec):
        reading = flags.read(arguments.words)
        for word in reading.stray:
            yield Finding(
                arguments.path,
                f"{word!r} belongs to no flag: vLLM ends with an error",
                "write it behind its flag; the model is spec.model.name",
            )
        for given in reading.given:
            yield from _flag(spec, arguments, reading, given)
    for variable in variables_of(spec):
        yield from _variable(spec, variable)
    for role in roles_of(spec):
        shape = vllm.shape(spec, role, environment_of(spec, role))
        yield from _known_values(spec, shape)
        yield from _block_size(spec, shape)
    yield from _layers(spec)


def _image(spec: PoolSpec) -> Iterator[Finding]:
    """A version gate, where the image's tag says the version."""
    found = _version(spec)
    if found is None:
        return
    if found < OLDEST:
        yield Finding(
            "spec.engine.image",
            f"vLLM {found[0]}.{found[1]} is too old: it does not know all flags used here, and hybrid models fail in "
            "it where prefill and decode are apart (vllm #41860, #43508, #46453, #48195; dynamo #10741)",
            "use vLLM 0.33 or later",
        )
    elif _newer(spec):
        yield warning(
            "spec.engine.image",
            f"the command line is that of vLLM 0.33, and the image is {found[0]}.{found[1]}",
            "try it on one pool first",
        )


def _version(spec: PoolSpec) -> tuple[int, int] | None:
    """vLLM's version as far as the image's tag says it."""
    name, _, tag = image_name(spec.engine).partition(":")
    found = re.match(r"v?(\d+)\.(\d+)", tag)
    return (int(found[1]), int(found[2])) if found and name.startswith("vllm") else None


def _newer(spec: PoolSpec) -> bool:
    return (_version(spec) or OLDEST) > OLDEST


def _command(spec: PoolSpec) -> Iterator[Finding]:
    words = list(spec.engine.command_words)
    after = words[words.index("serve") + 1 :] if "serve" in words else words
    given = flags.read([*after, spec.model.name]).given
    if given and given[-1].known and spec.model.name in given[-1].values:
        yield Finding(
            "spec.engine.command",
            f"{given[-1].written} takes the words after it, and would take the model's name too",
            "write flags in spec.engine.args",
        )
    for each in given:
        if each.known and each.written != _WORKERS_OWN:
            yield Finding(
                "spec.engine.command",
                f"{each.written} is a flag of vLLM's: what the operator knows of the engine, and says to peers, would "
                "be untrue",
                "write flags in spec.engine.args",
            )


def _flag(spec: PoolSpec, arguments: Arguments, reading: flags.Reading, given: Given) -> Iterator[Finding]:
    where, name = arguments.path, given.written
    if given.flag == "--enable-prefix-caching" and given.negated != spec.engine.prefix_caching:
        return  # what the operator says anyway
    if given.flag in FIELDS:
        yield Finding(where, f"{name} is decided elsewhere, and more depends on it", f"set {FIELDS[given.flag]}")
    elif given.flag in BREAKS:
        problem, remedy = BREAKS[given.flag]
        yield Finding(where, f"{name} {problem}", remedy)
    elif not given.known and name.replace("_", "-") in flags.removed():
        yield Finding(where, f"vLLM 0.33 has no {name} any more and ends with an error", "leave it out")
    elif given.flag == "--config":
        yield from _config_file(where, given, f"{name}=" in " ".join(arguments.words))
    elif given.flag == "--kv-transfer-config":
        yield from vllm_kv_rules.transfer(spec, arguments, given)
    elif given.flag == "--kv-events-config":
        yield from vllm_kv_rules.events(where, given)
    elif given.flag == "--attention-config":
        config = reading.json("--attention-config")
        if isinstance(config, dict) and "backend" in config:
            yield Finding(where, f"{name} names an attention backend", "set spec.engine.attentionBackend")
    elif given.flag in WITH_FIELD:
        field, default = WITH_FIELD[given.flag]
        said = getattr(spec.engine, field)
        if said != default and str(said) != given.value:
            camel = {"kv_cache_dtype": "kvCacheDtype", "attention_backend": "attentionBackend"}
            path = f"spec.engine.{camel.get(field, field if field == 'dtype' else 'blockSize')}"
            yield Finding(where, f"{name} is {given.value!r} and {path} is {said!r}", "say it once")
    else:
        yield from _unwise(spec, where, given)


def _config_file(where: str, given: Given, joined: bool) -> Iterator[Finding]:
    if joined:
        yield Finding(where, "vLLM accepts --config=FILE and does not read the file", "write its flags here")
    else:
        yield warning(where, f"what is in {given.value} is not looked into", "write its flags here")


def _unwise(spec: PoolSpec, where: str, given: Given) -> Iterator[Finding]:
    """Flags that break nothing and still surprise."""
    name = given.written
    if given.flag == "--api-key":
        yield warning(where, "whoever may read pods can read the key", "set spec.engine.apiKeySecretRef")
    elif given.flag == "--host" and _LOOPBACK.match(given.value or "") and given.value not in ("0.0.0.0", "::"):
        yield Finding(where, f"{name} {given.value}: nothing outside the pod could reach the engine", "leave it out")
    elif given.flag == "--disable-hybrid-kv-cache-manager" and not given.negated:
        yield warning(
            where,
            "without the hybrid KV cache manager models with state space or linear layers do not start "
            "(vllm #42024), and peers must do without it too",
            "leave it out",
        )
    elif given.flag == "--disable-log-stats":
        yield warning(where, "without statistics there are no metrics of the engine", "leave it out")
    elif not given.known and name.startswith("--") and spec.engine.command is None:
        yield warning(where, f"vLLM 0.33 has no {name}", "see `vllm serve --help=all` of the image")


def _variable(spec: PoolSpec, variable: Variable) -> Iterator[Finding]:
    name, value = variable.name, variable.value
    if value is None:
        return
    if name in _ALLOCATORS and re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
        if not all(_own_allocator(spec, role) for role in variable.roles):
            yield Finding(
                variable.path,
                f"{name} has expandable_segments:True, which moves memory that the KV connector has registered: vLLM "
                "refuses to start, or transfers fail",
                "leave it out, or add --enable-cumem-allocator to spec.engine.args",
            )
    elif name == "VLLM_PORT" and not value.isdecimal():
        yield Finding(
            variable.path,
            f"VLLM_PORT is {value!r}: it is a port for vLLM, and what Kubernetes sets for a Service called vllm is not",
            "leave it out",
        )
    elif name in _ADDRESSES and _LOOPBACK.match(value):
        yield Finding(
            variable.path,
            f"{name} is {value!r}: it is the address at which decode instances look for KV cache",
            "leave it out: spec.network decides it",
        )
    elif name == "VLLM_NIXL_SIDE_CHANNEL_PORT" and value != str(PORT_KV):
        yield warning(
            variable.path,
            f"Services, and whatever counts or guards the line, know port {PORT_KV} only",
            "leave it out",
        )
    elif name == "VLLM_NIXL_ABORT_REQUEST_TIMEOUT":
        yield warning(variable.path, f"vLLM 0.33 does not read {name} any more", "set spec.engine.kvLease")
    elif name == "VLLM_SERVER_DEV_MODE" and value not in ("", "0"):
        yield warning(variable.path, "anyone who reaches the engine can put it to sleep or empty it", "leave it out")


def _own_allocator(spec: PoolSpec, role: str) -> bool:
    given = flags.read(engine_of(spec, role).args)
    return bool(given.switch("--enable-cumem-allocator") or given.switch("--enable-sleep-mode"))


def _known_values(spec: PoolSpec, shape: Mapping[str, Any]) -> Iterator[Finding]:
    for flag, field, default in (
        ("--kv-cache-dtype", "kvCacheDtype", "auto"),
        ("--attention-backend", "attentionBackend", "AUTO"),
    ):
        value = shape[flag]
        if value != default and value not in flags.values(flag):
            yield Finding(
                f"spec.engine.{field}",
                f"vLLM 0.33 does not know {value}",
                "see `vllm serve --help=all` of the image for what it knows",
                refused=not _newer(spec),
            )


def _block_size(spec: PoolSpec, shape: Mapping[str, Any]) -> Iterator[Finding]:
    backend, size = shape["--attention-backend"], shape["--block-size"]
    if size is None or backend not in BLOCK_SIZES:
        return
    text, fits = BLOCK_SIZES[backend]
    if not str(size).isdecimal() or not fits(int(size)):
        where = "spec.engine.blockSize" if spec.engine.block_size is not None else "spec.engine.args"
        yield Finding(
            where, f"{backend} takes blocks of {text} tokens, not of {size}", f"write {text}, or leave it out"
        )


def _layers(spec: PoolSpec) -> Iterator[Finding]:
    engine = spec.engine
    if engine.lanes == 1:
        yield warning(
            "spec.engine.lanes",
            "one TCP connection does not fill a fast line (vllm #52607, #26382; openucx #10854)",
            "4 or more, or leave it out",
        )
    if engine.parallelism.pipeline > 1 and engine.connector == "Nixl":
        where = "spec.engine.parallelism.pipeline"
        if isinstance(spec, PDClusterSpec):
            yield Finding(
                where,
                "the NIXL connector has no pipeline stages on the decode side: vLLM ends with an error",
                "1 for a PDCluster; divide layers with tensor parallelism",
            )
        else:
            yield warning(where, "vLLM refuses pipeline stages with NIXL for hybrid models", "1 for hybrid models")
    if vllm.shape(spec, roles_of(spec)[-1], {})["--attention-backend"] == "AUTO":
        yield warning(
            "spec.engine.attentionBackend",
            "is not set: each side's vLLM chooses by its GPU, and sides that choose differently refuse each other",
            "set it, equal at both ends",
        )
