"""`prfaas worker serve MODEL ...`: the fake vLLM worker, with the arguments of `vllm serve` and three of its own.

A flag that vLLM 0.33 has and that changes nothing here is accepted; one that neither knows is an error, as with vLLM.
"""

from __future__ import annotations

import argparse
import re
import sys

IGNORED = (
    "--data-parallel-size",
    "--download-dir",
    "--generation-config",
    "--gpu-memory-utilization",
    "--load-format",
    "--max-num-batched-tokens",
    "--pipeline-parallel-size",
    "--quantization",
    "--revision",
    "--seed",
    "--tokenizer",
    "--uvicorn-log-level",
)
IGNORED_SWITCHES = (
    "--enable-expert-parallel",
    "--enable-log-requests",
    "--enable-prefix-caching",
    "--trust-remote-code",
)
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("worker", help="a vLLM worker without a GPU: real HTTP and KV bytes, modelled time")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="serve a model, with the arguments of `vllm serve`")
    _add_flags(serve)
    serve.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 2 for values that vLLM would refuse too, 1 when it cannot listen."""
    import asyncio
    import os

    from prfaas import logs
    from prfaas.worker.flags import read_config
    from prfaas.worker.serve import run as serve

    try:
        config = read_config(args, os.environ)
    except ValueError as error:
        print(f"prfaas worker serve: error: {error}", file=sys.stderr)
        return 2
    logs.set_up()
    try:
        asyncio.run(serve(config))
    except OSError as error:  # a port is taken, or an address is not of this machine
        print(f"prfaas worker serve: {error}", file=sys.stderr)
        return 1
    return 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model, as the engine loads it")
    own = parser.add_argument_group("the fake worker's own")
    own.add_argument("--profile", required=True, help="a shipped profile (H200x8, H20x8) or a file")
    own.add_argument("--time-scale", type=float, help="divides every modelled time; above 0")
    own.add_argument("--kv-byte-scale", type=float, help="bytes on the wire per byte of KV; above 0")
    vllm = parser.add_argument_group("vLLM's, with effect")
    vllm.add_argument("--served-model-name", nargs="+")
    vllm.add_argument("--host")
    vllm.add_argument("--port", type=int)
    vllm.add_argument("--max-model-len", type=_context)
    vllm.add_argument("--max-num-seqs", type=int)
    vllm.add_argument("--max-num-queued-reqs", type=int)
    vllm.add_argument("--max-num-queued-tokens", type=_count)
    vllm.add_argument("--tensor-parallel-size", "-tp", type=int)
    vllm.add_argument("--block-size", type=int)
    vllm.add_argument("--num-gpu-blocks-override", type=int)
    vllm.add_argument("--dtype", choices=("auto", "bfloat16", "float", "float16", "float32", "half"))
    vllm.add_argument("--kv-cache-dtype")
    vllm.add_argument("--attention-backend")
    vllm.add_argument("--kv-transfer-config")
    vllm.add_argument("--shutdown-timeout", type=int)
    vllm.add_argument("--api-key", nargs="+")
    for switch in (
        "--enable-prompt-tokens-details",
        "--enable-force-include-usage",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
    ):
        vllm.add_argument(switch, action=argparse.BooleanOptionalAction)
    ignored = parser.add_argument_group("vLLM's, accepted without effect")
    for flag in IGNORED:
        ignored.add_argument(flag, help=argparse.SUPPRESS)
    for switch in IGNORED_SWITCHES:
        ignored.add_argument(switch, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)


def _context(text: str) -> int | None:
    """A context length; `auto` and -1 leave it to the model."""
    return None if text in ("auto", "-1") else _count(text)


def _count(text: str) -> int:
    """vLLM's numbers of tokens: 8192, 8k (8000), 8K (8192), 1.5k."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 8192, 8k or 8K")
    number, suffix = match.groups()
    return int(float(number) * _SUFFIXES[suffix]) if suffix else int(float(number))
