"""How GPUs, nodes and data parallel ranks share the work: what vLLM demands of it before it builds an engine.

In the order in which vLLM looks: how ranks are launched, then what its parallel configuration says.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from prfaas.worker.commandline.rewrite import CommandLineError

BACKENDS = ("ray", "mp")
EXECUTORS = ("ray", "mp", "uni", "external_launcher")
_CPUS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_LAUNCH = "Invalid data-parallel launch options: "


def check_layout(args: argparse.Namespace) -> None:
    """Raises CommandLineError for a layout that vLLM refuses."""
    world = args.data_parallel_size * args.pipeline_parallel_size * args.tensor_parallel_size
    world *= args.prefill_context_parallel_size
    external = args.data_parallel_external_lb or args.data_parallel_rank is not None
    rank = args.data_parallel_rank
    _need(
        not (args.data_parallel_hybrid_lb and args.data_parallel_external_lb),
        f"{_LAUNCH}`--data-parallel-hybrid-lb` and `--data-parallel-external-lb` cannot be enabled together.",
    )
    if args.nnodes > 1:
        _check_nodes(args, world)
        if args.data_parallel_size > 1 and args.data_parallel_external_lb and rank is None:
            _need(
                args.nnodes % args.data_parallel_size == 0,
                f"{_LAUNCH}`--node-rank` cannot unambiguously identify external data-parallel ranks.",
            )
            rank = args.node_rank * args.data_parallel_size // args.nnodes
    _need(
        not args.enable_fault_tolerance or external,
        "Fault tolerance requires external load balancer mode (--data-parallel-external-lb or --data-parallel-rank).",
    )
    _check_ranks(args, external, rank)
    _check_parallel(args, external, rank or 0)


def _check_nodes(args: argparse.Namespace, world: int) -> None:
    _need(
        args.data_parallel_backend == "mp", f"{_LAUNCH}`--nnodes {args.nnodes}` requires `--data-parallel-backend mp`."
    )
    _need(
        world % args.nnodes == 0,
        f"{_LAUNCH}`--nnodes {args.nnodes}` must evenly divide the total world size ({world}).",
    )
    _need(
        0 <= args.node_rank < args.nnodes,
        f"{_LAUNCH}`--node-rank` must be between 0 and {args.nnodes - 1}; got `--node-rank {args.node_rank}`.",
    )


def _check_ranks(args: argparse.Namespace, external: bool, rank: int | None) -> None:
    local = args.data_parallel_size_local
    if external:
        _need(
            rank is not None,
            f"{_LAUNCH}`--data-parallel-external-lb` requires a data-parallel rank. Set `--data-parallel-rank`.",
        )
        _need(
            local in (1, None),
            f"{_LAUNCH}an external data-parallel rank requires `--data-parallel-size-local 1`; got {local}.",
        )
    elif local is None:
        _need(
            not args.data_parallel_hybrid_lb or args.nnodes > 1,
            f"{_LAUNCH}`--data-parallel-hybrid-lb` requires `--data-parallel-size-local`.",
        )
    _need(
        args.data_parallel_backend in BACKENDS,
        f"data_parallel_backend can only be ray or mp, got {args.data_parallel_backend}",
    )


def _check_parallel(args: argparse.Namespace, external: bool, rank: int) -> None:
    size, local = args.data_parallel_size, 1 if external else args.data_parallel_size_local
    _need(local is None or local <= size, f"data_parallel_size_local ({local}) must be <= data_parallel_size ({size})")
    _need(size > 1 or not external, "data_parallel_external_lb can only be set when data_parallel_size > 1")
    _check_cpus(args)
    tensor, context = args.tensor_parallel_size, args.prefill_context_parallel_size
    if args.enable_eplb:
        _need(args.enable_expert_parallel, "enable_expert_parallel must be True to use EPLB.")
        _need(tensor * context * size > 1, "EPLB requires tensor, prefill-context, or data parallelism.")
    else:
        redundant = (args.eplb_config or {}).get("num_redundant_experts", 0)
        _need(redundant == 0, f"num_redundant_experts is set to {redundant} but EPLB is not enabled.")
    decode = args.decode_context_parallel_size
    if context == 1:
        _need(tensor % decode == 0, f"tp_size={tensor} must be divisible by dcp_size={decode}.")
    else:
        _need(decode in (1, context, tensor * context), f"Got TP={tensor}, PCP={context}, DCP={decode}.")
    if args.enable_elastic_ep:
        _need(args.enable_eplb, "Elastic EP is only supported with enable_eplb=True.")
        _need(args.pipeline_parallel_size == 1, "Elastic EP is not supported with pipeline parallelism.")
    _need(size == 1 or 0 <= rank < size, f"data_parallel_rank ({rank}) must be in the range [0, {size})")
    executor: Any = args.distributed_executor_backend
    if args.nnodes > 1:
        _need(executor in (None, *EXECUTORS[1:]), "nnodes > 1 needs the executor backend mp, uni or external_launcher.")
    _need(
        executor == "ray" or not args.ray_workers_use_nsight,
        "Unable to use nsight profiling unless workers run with Ray.",
    )


def _check_cpus(args: argparse.Namespace) -> None:
    nodes, cpus = args.numa_bind_nodes, args.numa_bind_cpus
    _need(nodes is None or all(node >= 0 for node in nodes), "numa_bind_nodes must contain non-negative integers.")
    for listed in cpus or ():
        _need(
            _CPUS.fullmatch(listed),
            "numa_bind_cpus entries must use numactl CPU list syntax, for example '0-3' or '0,2'.",
        )
        ranges = [part.split("-") for part in listed.split(",") if "-" in part]
        _need(all(int(first) <= int(last) for first, last in ranges), f"numa_bind_cpus ranges must ascend: '{listed}'.")
    _need(
        args.numa_bind or (nodes is None and cpus is None), "numa_bind_nodes and numa_bind_cpus require numa_bind=True."
    )


def _need(condition: object, message: str) -> None:
    if not condition:
        raise CommandLineError(message)
