"""While an answer goes out nothing of its prompt is kept: a batch of long ones would fill the memory."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from typing import Any

import pytest

from tests.worker.rig import ManualClock, config, serving, until

pytestmark = pytest.mark.slow

LONG = "word" * 200_000
CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 9}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
    ],
)
async def test_a_prompt_is_not_kept(path: str, fields: dict[str, Any], stream: bool) -> None:
    clock = ManualClock()
    body = json.dumps(fields | {"stream": stream, "model": "org/model"}).encode()
    roomy = config(time_scale=1, max_model_len=600_000, block_size=4_096)
    async with serving(roomy, clock=clock) as (client,):
        headers = {"Content-Type": "application/json"}
        asking = client.session.post(f"{client.url}{path}", data=body, headers=headers)
        tracemalloc.start()
        answer = asyncio.ensure_future(asking)
        engine = client.worker.engine
        await until(lambda: engine.scheduler.running, "prefilling")
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < len(LONG) / 4
        clock.advance(1_000)
        async with await answer as response:
            assert response.status == 200
            await response.read()
