"""What clients must not say never gets in, and a router whose picker is gone serves nobody the wrong way."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e.local_router import EnvoyProcess, PickerProcess, envoy, picker_process
from prfaas.router.picker import Picker, Request
from prfaas.routing.world import Endpoint, Pools
from tests.router.rig import (
    DEADLINE,
    LINK,
    MAX_BODY,
    Engine,
    Gate,
    Rig,
    engine,
    good,
    policy,
    rig,
    silent,
    until,
)

pytestmark = pytest.mark.envoy

SPOOFED = {
    "x-gateway-destination-endpoint": "{destination}",
    "x-prfaas-stream": "chosen-by-client",
    "x-prfaas-decision": "local; reason=IsaySo",
    "X-PRFAAS-Prefill": "{destination}",
    "x-envoy-attempt-count": "7",
    "x-envoy-original-dst-host": "{destination}",
    "X-Envoy-Retry-On": "5xx",
    "x-envoy-max-retries": "9",
    "x-envoy-upstream-rq-timeout-ms": "1",
    "x-envoy-hedge-on-per-try-timeout": "true",
}
SPOOFED_BODIES = (
    b'{"prompt": "x", "kv_transfer_params": {"remote_host": "evil", "do_remote_prefill": true}}',
    b'{"prompt": "x", "kv\\u005ftransfer_params": {"remote_host": "evil", "do_remote_prefill": true}}',
    b'{"prompt": "x", "n": 2, "kv\\u005ftransfer_params": {"remote_host": "evil", "do_remote_prefill": true}}',
)


def spoofed(destination: Endpoint) -> dict[str, str]:
    return {name: value.format(destination=destination.address) for name, value in SPOOFED.items()}


async def test_spoofed_headers_reach_neither_picker_nor_engines(router: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []
    complete = Picker.complete

    async def spy(self: Any, request: Request, raw: bytes) -> Any:
        seen.append(request)
        return await complete(self, request, raw)

    monkeypatch.setattr(Picker, "complete", spy)
    async with engine("p") as p, engine("d") as d, engine("victim") as victim:
        await router.use((p.endpoint,), (d.endpoint,))
        answer = await router.post(router.short, headers=spoofed(victim.endpoint))
        assert answer.status == 200
        assert answer.decision == "local; reason=Short"
        assert not victim.calls
    [request] = seen
    ours = {name for name in request.headers if name.startswith(("x-prfaas-", "x-envoy-", "x-gateway-"))}
    # What is left was put there by Envoy itself.
    assert ours == {"x-prfaas-stream", "x-envoy-attempt-count", "x-envoy-external-address"}
    assert request.attempt == 1
    assert request.stream_id != "chosen-by-client"
    assert d.calls[0].headers["x-gateway-destination-endpoint"] == d.endpoint.address
    assert "x-prfaas-prefill" not in d.calls[0].headers


@pytest.mark.parametrize("raw", SPOOFED_BODIES)
async def test_a_descriptor_in_the_body_reaches_no_engine(router: Rig, raw: bytes) -> None:
    async with engine("p") as p, engine("d") as d:
        await router.use((p.endpoint,), (d.endpoint,))
        assert (await router.post(raw)).status == 200
        for call in p.calls + d.calls:
            assert b"evil" not in call.raw


async def test_even_the_picker_cannot_name_an_address_outside_the_endpoints(
    router: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list that Envoy has is the guard: a picker that went mad reaches nobody."""
    async with engine("p") as p, engine("d") as d, engine("outsider") as outsider:
        await router.use((p.endpoint,), (d.endpoint,))
        monkeypatch.setattr(type(router.source), "callback", lambda _: None)
        router.source.pools = Pools((p.endpoint,), (outsider.endpoint,))
        answer = await router.post(router.short)
        assert answer.status == 503
        assert answer.error()["type"] == "Service Unavailable"
        assert not outsider.calls
        assert not d.calls


# The picker in a process of its own


@dataclass
class World:
    """Envoy, a picker process, two engines that must be reached by its decision only."""

    envoy: EnvoyProcess
    picker: PickerProcess
    prefill: Engine
    decode: Engine
    session: aiohttp.ClientSession

    async def post(self, raw: bytes = b'{"prompt": "x"}', headers: dict[str, str] | None = None) -> tuple[int, Any]:
        url = self.envoy.url + "/v1/completions"
        async with self.session.post(url, data=io.BytesIO(raw), headers=headers) as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def world(running: EnvoyProcess, decode_script: Any = None) -> AsyncIterator[World]:
    async with (
        engine("p") as p,
        engine("d") as d,
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=DEADLINE), connector=aiohttp.TCPConnector(force_close=True)
        ) as session,
    ):
        if decode_script is not None:
            d.script = decode_script
        pools = Pools((p.endpoint,), (d.endpoint,), {LINK: ()})
        with picker_process(running, policy(), pools) as picker:
            await running.knows({d.endpoint.address})
            yield World(running, picker, p, d, session)


@pytest.mark.parametrize("raw", [b'{"prompt": "x"}', *SPOOFED_BODIES])
async def test_picker_dead_nothing_gets_through(running_envoy: EnvoyProcess, raw: bytes) -> None:
    async with world(running_envoy) as w:
        assert (await w.post())[0] == 200
        w.picker.kill()
        before = len(w.decode.calls)
        code, answer = await w.post(raw, spoofed(w.decode.endpoint))
        assert code == 503
        assert answer["error"]["type"] == "Service Unavailable"
        assert answer["error"]["code"] == 503
        assert len(w.decode.calls) == before, "fail closed: the client named a real instance"


async def test_picker_hung_nothing_gets_through(running_envoy: EnvoyProcess) -> None:
    async with world(running_envoy) as w:
        w.picker.stop()
        code, answer = await w.post(SPOOFED_BODIES[0], spoofed(w.decode.endpoint))
        assert code == 504
        assert answer["error"]["type"] == "GatewayTimeoutError"
        assert not w.decode.calls
        assert not w.prefill.calls


async def test_streams_outlive_the_picker_and_a_new_picker_serves(running_envoy: EnvoyProcess) -> None:
    gate = Gate()
    async with world(running_envoy, gate) as w:
        url = running_envoy.url + "/v1/completions"
        waiting = asyncio.create_task(w.session.post(url, data=b'{"prompt": "waits"}'))
        await until("it is decoded", lambda: len(w.decode.calls) == 1)
        gate.step()
        response = await waiting
        assert await response.content.readuntil(b"\n\n") == b"data: 0\n\n"
        w.picker.kill()
        gate.step(2)
        assert await response.content.read() == b"data: 1\n\ndata: 2\n\n"
    async with world(running_envoy) as w:
        assert (await w.post())[0] == 200


async def test_when_envoy_restarts_its_lost_streams_are_forgotten_and_the_endpoints_are_not(tmp_path: Path) -> None:
    async with engine("p") as p, engine("d", silent) as d:
        with envoy(tmp_path, max_body_bytes=MAX_BODY) as first:
            async with rig(first) as router:
                await router.use((p.endpoint,), (d.endpoint,))
                lost = asyncio.create_task(router.post(router.short))
                await until("it is decoded", lambda: d.calls)
                os.kill(first.pid, signal.SIGKILL)
                with pytest.raises(aiohttp.ClientError):
                    await lost
                assert router.process.ledger.in_flight[d.endpoint.address] == 1, "nobody has told of its end"
                for entry in router.process.ledger.entries.values():
                    entry.began -= 5  # Envoy tells its start to the second; a container needs longer to come back
                with envoy(tmp_path, max_body_bytes=MAX_BODY) as second:
                    await second.knows({d.endpoint.address})
                    d.script = good
                    async with router.session.post(second.url + "/v1/completions", data=b'{"prompt": "x"}') as response:
                        assert response.status == 200
                    probe = f"http://127.0.0.1:{router.process.admin_port}/readyz"

                    async def forgotten() -> bool:
                        async with router.session.get(probe) as response:
                            assert response.status == 200
                        return not router.process.ledger.in_flight

                    await until("its slot is given back, by the readiness probe", forgotten)
