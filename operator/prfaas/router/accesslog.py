"""How the picker learns that a stream ended: Envoy's access log of the inner listener, entry by entry.

Every attempt ends with exactly one entry, whether it was answered, cut, or its client left. What a killed Envoy would
still have told is lost; see `Ledger.forget_before`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from envoy.service.accesslog.v3 import als_pb2

from prfaas.router.extproc import ATTEMPT, STREAM
from prfaas.router.ledger import Ledger
from prfaas.router.metrics import Metrics


class AccessLog:
    """Servicer of envoy.service.accesslog.v3.AccessLogService."""

    def __init__(self, ledger: Ledger, metrics: Metrics) -> None:
        self._ledger, self._metrics = ledger, metrics
        self._open: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def stop(self) -> None:
        """End the streams. Envoy never does, so the server would wait for them in vain."""
        self._stopping = True
        for task in self._open:
            task.cancel()

    async def StreamAccessLogs(self, messages: AsyncIterator[Any], _: Any) -> Any:  # noqa: N802 (the protocol's name)
        """One stream per thread of Envoy, for as long as Envoy lives."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async for message in messages:
                for entry in message.http_logs.log_entry:
                    self._ended(entry)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._open.discard(task)
        return als_pb2.StreamAccessLogsResponse()

    def _ended(self, log: Any) -> None:
        headers = log.request.request_headers
        attempt = headers.get(ATTEMPT, "1")
        stream = (headers.get(STREAM, ""), int(attempt) if attempt.isdecimal() else 1)
        entry = self._ledger.entries.get(stream)
        code = log.response.response_code.value
        if entry is not None and entry.slot is not None:
            if log.common_properties.response_flags.upstream_connection_failure:
                self._ledger.refused([entry.slot])
            elif code == 200:
                self._ledger.answered(entry.slot)
        self._metrics.ended(self._ledger.end(stream), code)
