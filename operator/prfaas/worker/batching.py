"""How large a batch is where nobody said: vLLM decides by the accelerator's memory, of which a profile has the name."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = ("B200", "B300", "GB200", "GB300", "MI325", "MI350", "MI355")
"""160 GiB and more."""
LARGE = ("H100", "H200", "H20", "H800", "GH200", "MI300")
"""70 GiB and more. The A100 has as much, and vLLM excludes it by name."""


@dataclass(frozen=True)
class Batch:
    """Limits of one engine step."""

    tokens: int
    """`max_num_batched_tokens`."""
    sequences: int
    """`max_num_seqs`."""


def batch(
    accelerator: str,
    *,
    tokens: int | None,
    sequences: int | None,
    max_model_len: int,
    chunked: bool,
    throughput: bool,
) -> Batch:
    """The limits; `tokens` and `sequences` as given, None: not. `throughput`: `--performance-mode throughput`."""
    name = accelerator.upper()
    if name.startswith(LARGEST):
        tier = Batch(16_384, 1_024)
    elif name.startswith(LARGE):
        tier = Batch(8_192, 1_024)
    else:
        tier = Batch(2_048, 256)
    doubled = 2 if throughput else 1
    seqs = tier.sequences * doubled if sequences is None else sequences
    if tokens is not None:
        return Batch(tokens, min(seqs, tokens) if sequences is None else seqs)
    most = tier.tokens * doubled
    if not chunked:
        most = max(most, max_model_len)
    return Batch(min(most, seqs * max_model_len), seqs)
