"""The model on its way to the engine: what the engine is told to load, and what brings it there.

The engine is given a path that is equal at both ends of a link, since its handshake hashes that string: it is made of
the model's name and revision alone, never of where a datacenter took the model from.
"""

from __future__ import annotations

from prfaas.api.pool import PoolSpec


def engine_model(spec: PoolSpec) -> str:
    """What the engine's command line names."""
    return spec.model.name
