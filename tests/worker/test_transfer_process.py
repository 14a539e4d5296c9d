"""From `vllm serve`'s flags and variables to a verified answer, two real processes per connector."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.worker.oracle import expected_text
from tests.worker.process import flags, free_port, process, said

pytestmark = pytest.mark.slow

PROMPT = "Tell me about the sea, and take your time. " * 40


class Pair:
    """A prefill and a decode worker."""

    def __init__(self, session: aiohttp.ClientSession, bootstrap: int) -> None:
        self._session, self._bootstrap = session, bootstrap
        self.ports: dict[str, int] = {}

    async def ask(self, role: str, tokens: int, params: dict[str, Any], request_id: str) -> dict[str, Any]:
        """One leg."""
        body = {"prompt": PROMPT, "max_tokens": tokens, "kv_transfer_params": params}
        url = f"http://127.0.0.1:{self.ports[role]}/v1/completions"
        async with self._session.post(url, json=body, headers={"X-Request-Id": request_id}) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def engine_id(self) -> str:
        """What a Mooncake router asks the bootstrap server for."""
        async with self._session.get(f"http://127.0.0.1:{self._bootstrap}/query") as response:
            known = await response.json()
            return str(known["0"]["engine_id"])


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector", "MooncakeConnector"])
async def test_two_processes_and_one_cache(connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap, kv_port = free_port(), free_port()
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(bootstrap))
    async with AsyncExitStack() as stack:
        pair = Pair(await stack.enter_async_context(aiohttp.ClientSession()), bootstrap)
        for role in ("kv_producer", "kv_consumer"):
            pair.ports[role] = port = free_port()
            port_of_kv = kv_port if role == "kv_producer" else free_port()
            monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port_of_kv))
            config = {"kv_connector": connector, "kv_role": role, "engine_id": role}
            if connector == "MooncakeConnector":
                config |= {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}  # type: ignore[dict-item]  # JSON
            given = [*flags(tmp_path, port), "--time-scale", "100", "--kv-transfer-config", json.dumps(config)]
            running = await stack.enter_async_context(process(*given))
            await said(running, f"serving on port {port}")
        request_id = uuid.uuid4().hex
        prefill = {"do_remote_decode": True, "do_remote_prefill": False}
        decode: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
        if connector == "NixlConnector":
            first = await pair.ask("kv_producer", 1, prefill, request_id)
            answer = await pair.ask("kv_consumer", 20, first["kv_transfer_params"], request_id)
        else:
            if connector == "NixlPushConnector":
                where = {"remote_engine_id": "kv_producer", "remote_host": "127.0.0.1", "remote_port": kv_port}
                decode |= where | {"tp_size": 1, "remote_request_id": request_id}
            else:
                prefill |= {"transfer_id": request_id}  # type: ignore[dict-item]  # JSON
                decode |= {"remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap}", "transfer_id": request_id}
                decode |= {"remote_engine_id": await pair.engine_id()}
            legs = pair.ask("kv_producer", 1, prefill, request_id), pair.ask("kv_consumer", 20, decode, request_id)
            _, answer = await asyncio.gather(*legs)
        assert answer["choices"][0]["text"] == expected_text(PROMPT, 20, model="org/model")
