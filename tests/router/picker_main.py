"""A picker in a process of its own, with a fixed policy and fixed endpoints: for tests that kill it, and benches."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from prfaas.api.policy import RoutingPolicy
from prfaas.router.policies import PolicyStore
from prfaas.router.serve import RouterProcess, Settings
from prfaas.routing.world import Endpoint, Pools


class Fixed:
    """EndpointSource of what never changes."""

    synced = True

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def on_change(self, _: object) -> None:
        """Nothing changes."""


async def no_review(_: str) -> str | None:
    return None


async def main() -> None:
    world = json.loads(sys.argv[1])

    def endpoints(pairs: list[tuple[str, int]]) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(host, port) for host, port in pairs)

    remote = {link: endpoints(found) for link, found in world["remote"].items()}
    pools = Pools(endpoints(world["prefill"]), endpoints(world["decode"]), remote)
    settings = Settings(run_dir=Path(world["run_dir"]), admin_host="127.0.0.1", admin_port=0)
    policies = PolicyStore(current=RoutingPolicy.model_validate(world["policy"]))
    async with RouterProcess(settings, Fixed(pools), policies, no_review):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
