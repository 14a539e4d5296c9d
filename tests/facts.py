"""Facts about vLLM 0.33, as tests/data/vllm-0.33 has them: a JSON file each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "vllm-0.33"


def facts(name: str) -> dict[str, Any]:
    """One file, such as `routes`."""
    loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return loaded
