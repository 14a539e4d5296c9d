"""Which routes exist, by vLLM's own conditions. `routes.json` is made by `python -m tests.worker.tables`.

A route whose condition is false is absent: 404, as in vLLM. The scale-out routes exist without their flag, and refuse.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prfaas.worker.frontend import FrontEnd

_GENERATES = "model task generate"
_SCALE_OUT = f"{_GENERATES} and (--enable-scale-out or --tokens-only)"

CONDITIONS: dict[str, Callable[[FrontEnd], bool]] = {
    "always": lambda _: True,
    _GENERATES: lambda _: True,
    _SCALE_OUT: lambda _: True,
    "--enable-tokenizer-info-endpoint": lambda front: front.tokenizer_info,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1": lambda front: front.lora_updates,
    "--profiler-config.profiler set": lambda front: front.profiler,
    "VLLM_SERVER_DEV_MODE=1": lambda front: front.dev_mode,
    "--tokens-only (unless dev mode already has it)": lambda front: front.tokens_only and not front.dev_mode,
    "--enable-fault-tolerance": lambda front: front.fault_tolerance,
    "unless --disable-fastapi-docs": lambda front: front.docs,
}
"""Conditions that can hold here. All others are of models that do not generate, or of packages that are not there."""


@dataclass(frozen=True)
class Route:
    """One route of vLLM."""

    method: str
    path: str
    condition: str

    @property
    def key(self) -> str:
        """As it is listed: `GET /health`."""
        return f"{self.method} {self.path}"

    @property
    def scale_out(self) -> bool:
        """Whether it refuses without --enable-scale-out."""
        return self.condition == _SCALE_OUT

    def exists(self, front: FrontEnd) -> bool:
        """Whether a server with these settings has it."""
        holds = CONDITIONS.get(self.condition)
        return holds is not None and holds(front)


def routes() -> Iterator[Route]:
    """All of them."""
    text = importlib.resources.files("prfaas.worker.routes").joinpath("routes.json").read_text(encoding="utf-8")
    return (Route(**entry) for entry in json.loads(text))
