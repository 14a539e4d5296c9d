"""One file: from where it was left, to its last byte, to its checksum, to its name.

Bytes go to the disk in pieces of CHUNK; a process that is killed loses the piece it was filling, and the next one asks
for the rest (`Range`). The hash of what is there already is computed from the disk, not from the wire.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import aiohttp

from prfaas.api.conditions import Reason
from prfaas.fetch.errors import FetchError, Transient
from prfaas.fetch.folder import Folder, disk
from prfaas.fetch.listing import Hash, RemoteFile, hasher
from prfaas.fetch.progress import Progress
from prfaas.fetch.remote import Remote

CHUNK = 1 << 20
_READ = 8 << 20


@dataclass
class Download:
    """One file on its way."""

    file: RemoteFile
    remote: Remote
    folder: Folder
    progress: Progress

    async def run(self) -> None:
        """Ends when the file is there and checked. Raises FetchError."""
        whole = self.folder.root / self.file.path
        if whole.is_file() and whole.stat().st_size == self.file.size:
            if await asyncio.to_thread(self.folder.checked, self.file):
                return
            if await self._is_right(whole):
                self.folder.note(self.file)
                return
            self.progress.lost(self.file.size)
        for _ in range(2):  # what was spoilt on the way or on the disk comes right the second time
            digest = await self._complete()
            if self.file.checksum is None or digest == self.file.checksum.value:
                self.folder.finish(self.file)
                return
            self.folder.part(self.file).unlink()
            self.progress.lost(self.file.size)
        assert self.file.checksum is not None
        wanted = f"{self.file.checksum.algorithm} {self.file.checksum.value[:16]}..."
        text = f"{self.file.path} is not what {self.remote.source.host} says it is, twice ({wanted} expected)"
        raise FetchError(Reason.CHECKSUM_MISMATCH, f"{text}; have the source repaired, or take another revision")

    async def _is_right(self, path: Path) -> bool:
        if self.file.checksum is None:
            return False
        with disk(self.folder.root):
            digest = await asyncio.to_thread(_hash_file, path, self.file, self.file.size)
        return digest.hexdigest() == self.file.checksum.value

    async def _complete(self) -> str:
        """Fetches what is missing of the part; the digest of the whole."""
        part, root = self.folder.part(self.file), self.folder.root
        with disk(root):
            handle = part.open("ab")
        with handle:
            with disk(root):
                done = handle.tell()
                if done > self.file.size:
                    handle.truncate(0)
                    self.progress.lost(self.file.size)
                    done = 0
                digest = await asyncio.to_thread(_hash_file, part, self.file, done)
            attempts = self.remote.attempts()
            while done < self.file.size:
                try:
                    async with aclosing(self._pieces(done)) as pieces:
                        async for piece, begins in pieces:
                            if begins:
                                self.progress.lost(done)
                                done, digest = 0, hasher(self.file)
                                with disk(root):
                                    handle.truncate(0)
                            with disk(root):
                                await asyncio.to_thread(_append, handle, digest, piece)
                            done += len(piece)
                            self.progress.came(len(piece), self.file.path)
                            attempts.progressed()
                            if done > self.file.size:
                                self._longer()
                    if done < self.file.size:
                        text = f"{self.remote.source.host} ended {self.file.path} before its end"
                        raise Transient(Reason.SOURCE_UNREACHABLE, text)
                except Transient as error:
                    await attempts.again(error)
            with disk(root):
                handle.flush()
                await asyncio.to_thread(os.fsync, handle.fileno())
        return digest.hexdigest()

    async def _pieces(self, done: int) -> AsyncGenerator[tuple[bytes, bool], None]:
        """The rest of the file in pieces. True beside one: it is the file's first, although the rest was asked for."""
        headers = {"Range": f"bytes={done}-"} if done else {}
        if self.file.if_match:
            headers["If-Match"] = f'"{self.file.if_match}"'
        async with self.remote.request("GET", self.file.url, headers) as response:
            again = bool(done) and response.status == 200
            if done and not again:
                begin = re.match(r"bytes ([0-9]+)-", response.headers.get("Content-Range", ""))
                if begin is None or int(begin[1]) != done:
                    text = f"{self.remote.source.host} sends another part of {self.file.path} than it was asked for"
                    raise FetchError(Reason.SOURCE_UNREACHABLE, text)
            async with aclosing(_in_chunks(response)) as pieces:
                async for piece in pieces:
                    yield piece, again
                    again = False

    def _longer(self) -> None:
        text = f"{self.file.path} is longer than {self.remote.source.host} says it is"
        raise FetchError(Reason.CHECKSUM_MISMATCH, f"{text}; have the source repaired, or take another revision")


async def _in_chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """The body in pieces of CHUNK; what came before an error comes before it here, too."""
    gathered = bytearray()
    try:
        async for data in response.content.iter_any():
            gathered += data
            if len(gathered) >= CHUNK:
                yield bytes(gathered)
                gathered.clear()
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        if gathered:
            yield bytes(gathered)
        raise
    if gathered:
        yield bytes(gathered)


def _append(handle: BinaryIO, digest: Hash, piece: bytes) -> None:
    handle.write(piece)
    handle.flush()
    digest.update(piece)


def _hash_file(path: Path, file: RemoteFile, size: int) -> Hash:
    """The digest so far, of the first `size` bytes."""
    digest = hasher(file)
    with path.open("rb") as handle:
        while size > 0 and (data := handle.read(min(_READ, size))):
            digest.update(data)
            size -= len(data)
    return digest
