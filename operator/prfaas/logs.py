"""The log of every process: one JSON object per line, on standard error.

Its members are time, level, logger, message, and what the caller adds. Of no room, since each of them may use it.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_KOPF = ("k8s_ref", "k8s_skip", "settings")
"""What Kopf adds to records for its own use."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; members given as `extra` follow the standard ones."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in _KOPF}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up(level: str = "info") -> None:
    """Send everything to standard error as JSON. Kopf's own chatter starts at warnings: it logs every event."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
