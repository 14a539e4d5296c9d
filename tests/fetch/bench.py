"""A fetch against the source of `e2e/model_source.py`, over real sockets, without real waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from e2e.model_source import ModelSource, serving, small_model
from prfaas.fetch.errors import FetchError
from prfaas.fetch.folder import free_bytes
from prfaas.fetch.remote import Patience
from prfaas.fetch.run import Request, Surroundings, fetch

HUB, STORE = "hf://demo/model", "s3://models/demo/model"
PERIOD = 3600.0
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"}


@dataclass
class Fetching:
    """One source and one folder, and as many fetches as a test needs."""

    to: Path
    source: ModelSource = field(default_factory=lambda: ModelSource(small_model()))
    environment: dict[str, str] = field(default_factory=dict)
    slept: list[float] = field(default_factory=list)
    free: Callable[[Path], int] = free_bytes
    silence: float = 5.0
    patience: Patience = field(default_factory=lambda: Patience(tries=4))
    url: str | None = None
    """Where to fetch from; None: from `source`."""

    async def run(self, source: str = HUB, *, revision: str = "main", size_limit: int | None = None) -> str:
        """One fetch; what the revision stood for."""

        async def sleep(seconds: float) -> None:
            if seconds == PERIOD:  # told in real time: not at all within a test
                await asyncio.sleep(seconds)
            self.slept.append(seconds)
            await asyncio.sleep(0)

        around = Surroundings(
            self.environment,
            sleep=sleep,
            patience=self.patience,
            free=self.free,
            period=PERIOD,
            silence=self.silence,
        )
        request = Request(source, self.to, revision, self.url, size_limit)
        if self.url is not None:
            return await fetch(request, around)
        async with serving(self.source) as url:
            return await fetch(replace(request, endpoint=url), around)

    async def fails(self, source: str = HUB, *, revision: str = "main", size_limit: int | None = None) -> FetchError:
        """The error with which a fetch ends."""
        try:
            await self.run(source, revision=revision, size_limit=size_limit)
        except FetchError as error:
            return error
        raise AssertionError("the fetch did not fail")

    async def fails_at(self, url: str) -> FetchError:
        """The error with which a fetch from another endpoint ends."""
        self.url = url
        return await self.fails()

    def tree(self) -> dict[str, bytes]:
        """The model's files as they are on the disk, without ours."""
        return {
            str(path.relative_to(self.to)): path.read_bytes()
            for path in self.to.rglob("*")
            if path.is_file() and not path.relative_to(self.to).parts[0].startswith(".prfaas-")
        }

    def parts(self) -> int:
        """Bytes in beginnings of files."""
        return sum(path.stat().st_size for path in (self.to / ".prfaas-part").glob("*") if path.suffix != ".jsonl")


def once(answer: Callable[[web.Request], web.StreamResponse], path: str, times: int = 1) -> Any:
    """A fault that strikes the first requests whose path contains `path`."""
    left = times

    def fault(request: web.Request) -> web.StreamResponse | None:
        nonlocal left
        if path not in request.path or left == 0:
            return None
        left -= 1
        return answer(request)

    return fault


def status(code: int, headers: Mapping[str, str] | None = None) -> Callable[[web.Request], web.StreamResponse]:
    """An empty answer."""
    return lambda _: web.Response(status=code, headers=headers)
