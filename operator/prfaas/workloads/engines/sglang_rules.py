"""What a user may not tell SGLang: flags whose value the operator decides, since more depends on them."""

from __future__ import annotations

from collections.abc import Iterator

from prfaas.api.pool import PoolSpec
from prfaas.workloads.engines.findings import Finding, arguments_of, warning

FIELDS = {
    "--model-path": "spec.model.name",
    "--model": "spec.model.name",
    "--served-model-name": "spec.model.servedName",
    "--revision": "spec.model.revision",
    "--host": "spec.network",
    "--port": "spec.engine.port",
    "--tp-size": "spec.engine.parallelism.tensor",
    "--tensor-parallel-size": "spec.engine.parallelism.tensor",
    "--pp-size": "spec.engine.parallelism.pipeline",
    "--pipeline-parallel-size": "spec.engine.parallelism.pipeline",
    "--dp-size": "spec.engine.parallelism.data",
    "--data-parallel-size": "spec.engine.parallelism.data",
    "--nnodes": "spec.nodesPerInstance",
    "--node-rank": "spec.nodesPerInstance",
    "--dist-init-addr": "spec.nodesPerInstance",
    "--nccl-init-addr": "spec.nodesPerInstance",
    "--disaggregation-transfer-backend": "spec.engine.connector and transport",
    "--kv-events-config": "spec.engine.kvEvents",
    "--disable-radix-cache": "spec.engine.prefixCaching",
    "--page-size": "spec.engine.blockSize",
    "--dtype": "spec.engine.dtype",
    "--kv-cache-dtype": "spec.engine.kvCacheDtype",
    "--attention-backend": "spec.engine.attentionBackend",
    "--ssl-keyfile": "spec.engine.tls",
    "--ssl-certfile": "spec.engine.tls",
    "--api-key": "spec.engine.apiKeySecretRef",
}
BREAKS = {
    "--disaggregation-mode": ("is the instance's role", "leave it out"),
    "--disaggregation-bootstrap-port": ("is the port that decode instances are told", "leave it out"),
    "--enable-pd-role-switch": ("lets an instance change its role behind the operator's back", "leave it out"),
}
_MODULE = "sglang.launch_server"
_SHORTEST = len("--tp")
CACHE_TYPES = ("auto", "bf16", "bfloat16", "fp4_mx_block16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4")


def findings(spec: PoolSpec) -> Iterator[Finding]:
    """All that would part prefill and decode, and what a person should know."""
    for arguments in arguments_of(spec):
        for word in arguments.words:
            written = word.partition("=")[0]
            name = _meant(written)
            if name in FIELDS:
                yield Finding(arguments.path, f"{written} is decided elsewhere", f"set {FIELDS[name]}")
            elif name in BREAKS:
                problem, remedy = BREAKS[name]
                yield Finding(arguments.path, f"{written} {problem}", remedy)
    words = spec.engine.command_words
    for word in words[words.index(_MODULE) + 1 :] if _MODULE in words else ():
        if word.startswith("--"):
            yield Finding(
                "spec.engine.command",
                f"{word} is a flag: what the operator knows of the engine, and says to peers, would be untrue",
                "write flags in spec.engine.args",
            )
    if spec.engine.kv_cache_dtype not in CACHE_TYPES:
        yield Finding(
            "spec.engine.kvCacheDtype",
            f"SGLang does not know {spec.engine.kv_cache_dtype}",
            f"one of {', '.join(CACHE_TYPES)}",
        )
    if spec.engine.attention_backend is None:
        yield warning(
            "spec.engine.attentionBackend",
            "is not set: each side's SGLang chooses by its GPU, and KV cache laid out differently is read wrongly",
            "set it, equal at both ends",
        )


def _meant(written: str) -> str:
    """The flag of ours that a word means: SGLang's parser takes a beginning of a flag for it (`--tp 8`)."""
    name = written.replace("_", "-")
    if not name.startswith("--") or len(name) < _SHORTEST or name in FIELDS or name in BREAKS:
        return name
    return next((flag for flag in (*FIELDS, *BREAKS) if flag.startswith(name)), name)
