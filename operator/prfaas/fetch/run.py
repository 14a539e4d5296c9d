"""A whole fetch: take the lock, ask what there is, see whether it fits, fetch what is missing, say that it is whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.api.model import Origin
from prfaas.fetch.download import Download
from prfaas.fetch.errors import FetchError, gigabytes
from prfaas.fetch.folder import Folder, free_bytes
from prfaas.fetch.hub import ENDPOINT, Hub
from prfaas.fetch.listing import Listing
from prfaas.fetch.progress import PERIOD_SECONDS, Progress, tell
from prfaas.fetch.remote import SILENCE_SECONDS, Patience, Remote, Sleep, Source
from prfaas.fetch.signature import Keys
from prfaas.fetch.store import Bucket

log = logging.getLogger("prfaas.fetch")

FILES_AT_A_TIME = 4


@dataclass(frozen=True)
class Request:
    """What to fetch, and to where."""

    source: str
    to: Path
    revision: str = "main"
    endpoint: str | None = None
    size_limit: int | None = None


@dataclass(frozen=True)
class Surroundings:
    """What is outside of this process. Seconds."""

    environment: Mapping[str, str]
    sleep: Sleep = asyncio.sleep
    patience: Patience = field(default_factory=Patience)
    free: Callable[[Path], int] = free_bytes
    period: float = PERIOD_SECONDS
    silence: float = SILENCE_SECONDS


def source_of(request: Request, environment: Mapping[str, str]) -> Source:
    """Who to ask, with the credentials of the environment. Raises ValueError for a source that is not fetched."""
    origin = Origin.parse(request.source)
    if origin.scheme == "hf":
        endpoint = request.endpoint or ENDPOINT
        return Hub(origin.place, request.revision, endpoint, environment.get("HF_TOKEN", "").strip() or None)
    if origin.scheme == "pvc":
        raise ValueError(f"{request.source} is mounted, not fetched: give hf://ORG/NAME or s3://BUCKET/PREFIX")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    access, secret, session = (environment.get(name, "").strip() for name in names)
    return Bucket(
        name=origin.place,
        prefix=origin.path,
        now=lambda: datetime.now(UTC),
        endpoint=request.endpoint,
        region=environment.get("AWS_REGION", "").strip() or "us-east-1",
        keys=Keys(access, secret, session or None) if access and secret else None,
    )


async def fetch(request: Request, around: Surroundings) -> str:
    """Ends when the model is whole; what the revision stood for. Raises FetchError, and ValueError for no source."""
    source = source_of(request, around.environment)
    folder = Folder(request.to, around.free, request.size_limit)
    folder.make()

    def waiting() -> None:
        log.info("waiting: another process fetches into %s", request.to)

    async with folder.locked(around.sleep, waiting):
        wanted = {"source": request.source, "revision": request.revision}
        found = folder.marker()
        if found is not None and {name: found.get(name) for name in wanted} == wanted and folder.holds(found):
            log.info("whole already", extra={"commit": found.get("commit", "")})
            return str(found.get("commit", ""))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=around.silence)
        async with aiohttp.ClientSession(
            timeout=timeout,
            trust_env=True,
            auto_decompress=False,
            # A URL that is signed is only good as it is written.
            requote_redirect_url=False,
            headers={"User-Agent": "prfaas-fetch"},
        ) as session:
            remote = Remote(source, session, around.patience, around.sleep)
            listing = await source.listing(remote)
            folder.make()
            folder.unmark()
            folder.forget_other_parts(listing.files)
            folder.check_room(listing)
            await _all_files(listing, remote, folder, around)
        content = {**wanted, "commit": listing.commit, "bytes": listing.size, "files": _described(listing)}
        folder.mark(content)
    return listing.commit


async def _all_files(listing: Listing, remote: Remote, folder: Folder, around: Surroundings) -> None:
    loop = asyncio.get_running_loop()
    progress = Progress(loop.time)
    progress.start(listing.size, sum(folder.have(file) for file in listing.files))
    commit = {"commit": listing.commit} if listing.commit else {}
    log.info("fetching %s files", len(listing.files), extra={**progress.line(), **commit})
    unchecked = [file.path for file in listing.files if file.checksum is None]
    if unchecked:
        log.warning(
            "the source has no checksum of %s files: only their sizes are compared", len(unchecked), extra=commit
        )
    limit = asyncio.Semaphore(FILES_AT_A_TIME)

    async def one(download: Download) -> None:
        async with limit:
            await download.run()

    teller = asyncio.ensure_future(tell(progress, around.sleep, around.period))
    try:
        async with asyncio.TaskGroup() as tasks:
            for file in sorted(listing.files, key=lambda file: -file.size):
                tasks.create_task(one(Download(file, remote, folder, progress)))
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        teller.cancel()
    log.info("whole: %s", gigabytes(listing.size), extra=progress.line())


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one that says most of a group: a fetch's own error before whatever else."""
    flat = [_first(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return next((error for error in flat if isinstance(error, FetchError)), flat[0])


def _described(listing: Listing) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = []
    for file in sorted(listing.files, key=lambda file: file.path):
        described: dict[str, Any] = {"path": file.path, "size": file.size}
        if file.checksum is not None:
            described[file.checksum.algorithm] = file.checksum.value
        files.append(described)
    return files
