"""The fake worker's own flags, which vLLM does not have."""

from __future__ import annotations

import argparse


def add_own(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of vLLM's."""
    own = parser.add_argument_group("the fake worker's own")
    own.add_argument("--profile", required=True, help="a shipped profile (H200x8, H20x8) or a file")
    own.add_argument("--time-scale", type=float, help="divides every modelled time; above 0")
    own.add_argument("--kv-byte-scale", type=float, help="bytes on the wire per byte of KV; above 0")
    own.add_argument("--enable-faults", action="store_true", help="let requests and /prfaas/faults ask for faults")
    own.add_argument("--faults", metavar="FAULTS", help="faults in force from the start, see docs/worker.md")
    own.add_argument(
        "--attention",
        choices=("full", "hybrid"),
        help="what the model's KV cache is made of: attention only, or also the state of linear layers",
    )
