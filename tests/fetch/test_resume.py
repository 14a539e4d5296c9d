"""Interrupted, spoilt, out of room: bytes are counted on the wire, so that a start from zero is seen."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.model_source import ModelSource, content, small_model
from prfaas.api.conditions import Reason
from prfaas.fetch import download
from prfaas.fetch.listing import Hash, RemoteFile
from prfaas.fetch.remote import Patience
from tests.fetch.bench import HUB, STORE, Fetching, once

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("source", [HUB, STORE])
SIZE = sum(map(len, small_model().values()))
FIRST = "model-00001-of-00002.safetensors"


class Cutting:
    """Hangs up in the middle of each of the first `times` answers with content."""

    def __init__(self, fetching: Fetching, times: int, keep: float = 0.5) -> None:
        self._send = fetching.source._send
        self.left = times
        self._keep = keep
        self._fetching = fetching
        fetching.source._send = self.send  # type: ignore[method-assign]  # the one place where bytes leave

    async def send(self, request: web.Request, path: str) -> web.StreamResponse:
        data = self._fetching.source.files[path]
        if self.left == 0 or len(data) < 1024:
            return await self._send(request, path)
        self.left -= 1
        begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        end = begin + int((len(data) - begin) * self._keep)
        response = web.StreamResponse(status=206 if begin else 200)
        if begin:
            response.headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        response.content_length = len(data) - begin
        await response.prepare(request)
        await response.write(data[begin:end])
        self._fetching.source.sent += end - begin
        assert request.transport is not None
        request.transport.close()
        return response


@BOTH
async def test_a_connection_that_breaks_is_taken_up_where_it_broke(fetching: Fetching, source: str) -> None:
    cutting = Cutting(fetching, times=4)
    await fetching.run(source)
    assert cutting.left == 0
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent == SIZE


async def test_progress_gives_new_patience(fetching: Fetching) -> None:
    # More breaks than tries in a row: each of them brought something.
    Cutting(fetching, times=12, keep=0.3)
    await fetching.run()
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent == SIZE


async def test_a_server_without_ranges_is_read_from_the_beginning(fetching: Fetching) -> None:
    Cutting(fetching, times=2)
    fetching.source.ranges = False
    await fetching.run()
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent > SIZE


async def test_a_server_that_sends_another_part_is_not_believed(fetching: Fetching) -> None:
    Cutting(fetching, times=1)

    def shifted(request: web.Request) -> web.StreamResponse | None:
        if "Range" not in request.headers:
            return None
        return web.Response(status=206, body=b"x", headers={"Content-Range": "bytes 0-0/10"})

    fetching.source.faults = [shifted]
    assert "another part" in (await fetching.fails()).message


@BOTH
async def test_content_that_is_wrong_once_is_fetched_again(fetching: Fetching, source: str) -> None:
    wrong = bytearray(fetching.source.files[FIRST])
    wrong[1000] ^= 1
    spoilt = once(lambda _: web.Response(body=bytes(wrong)), FIRST)
    fetching.source.faults = [lambda request: spoilt(request) if request.method == "GET" else None]
    await fetching.run(source)
    assert fetching.tree() == fetching.source.files


@BOTH
@pytest.mark.parametrize("path", [FIRST, "config.json"])
async def test_content_that_stays_wrong_is_said_and_gets_no_name(fetching: Fetching, source: str, path: str) -> None:
    right = fetching.source.files[path]
    fetching.source.lies[path] = bytes([right[0] ^ 1]) + right[1:]
    error = await fetching.fails(source)
    assert (error.reason, path in error.message) == (Reason.CHECKSUM_MISMATCH, True)
    assert path not in fetching.tree()
    assert not (fetching.to / ".prfaas-complete.json").exists()


async def test_content_that_is_longer_than_listed_is_said(fetching: Fetching) -> None:
    fetching.source.lies[FIRST] = fetching.source.files[FIRST] + b"more"
    error = await fetching.fails()
    assert (error.reason, "longer" in error.message) == (Reason.CHECKSUM_MISMATCH, True)
    fetching.source.lies.clear()
    await fetching.run()
    assert fetching.tree() == fetching.source.files


@pytest.mark.parametrize(("sums", "sha256"), [(True, False), (False, True), (False, False)])
async def test_a_bucket_is_checked_by_the_best_that_it_has(fetching: Fetching, sums: bool, sha256: bool) -> None:
    fetching.source.sums, fetching.source.sha256 = sums, sha256
    await fetching.run(STORE)
    marker = json.loads((fetching.to / ".prfaas-complete.json").read_text())
    file = next(each for each in marker["files"] if each["path"] == FIRST)
    data = fetching.source.files[FIRST]
    if sums or sha256:
        assert file["sha256"] == hashlib.sha256(data).hexdigest()
    else:
        assert file["md5"] == hashlib.md5(data, usedforsecurity=False).hexdigest()


async def test_files_that_were_put_there_by_hand_are_checked_and_kept(fetching: Fetching) -> None:
    fetching.to.mkdir(parents=True)
    (fetching.to / FIRST).write_bytes(fetching.source.files[FIRST])
    (fetching.to / "config.json").write_bytes(b"x" * len(fetching.source.files["config.json"]))
    await fetching.run()
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent == SIZE - len(fetching.source.files[FIRST])


async def test_what_was_checked_is_not_read_again_but_what_was_touched_is(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = "model-00002-of-00002.safetensors"
    fetching.source.lies[second] = b"!" * len(fetching.source.files[second])
    await fetching.fails()
    fetching.source.lies.clear()
    hashed: list[str] = []
    real = download._hash_file

    def noting(path: Path, file: RemoteFile, size: int) -> Hash:
        hashed.append(file.path)
        return real(path, file, size)

    monkeypatch.setattr(download, "_hash_file", noting)
    os.utime(fetching.to / "config.json", (1, 1))
    await fetching.run()
    assert FIRST not in hashed
    assert "config.json" in hashed
    assert fetching.tree() == fetching.source.files


async def test_a_file_that_was_removed_from_a_whole_model_is_fetched_again(fetching: Fetching) -> None:
    await fetching.run()
    sent = fetching.source.sent
    (fetching.to / "config.json").unlink()
    await fetching.run()
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent - sent == len(fetching.source.files["config.json"])


async def test_another_version_is_not_joined_to_the_beginning_of_the_old_one(fetching: Fetching) -> None:
    fetching.source.faults = [once(lambda _: web.Response(status=418), "00002", times=100)]
    Cutting(fetching, times=1)
    await fetching.fails()
    fetching.source.files = {**small_model(), FIRST: content(len(small_model()[FIRST]), "new")}
    fetching.source.faults = []
    await fetching.run()
    assert fetching.tree() == fetching.source.files


async def test_another_source_of_the_same_folder_replaces_what_differs_alone(fetching: Fetching) -> None:
    await fetching.run(HUB)
    fetching.source.files["config.json"] = b'{"architectures": ["Other"]}  \n'
    sent = fetching.source.sent
    await fetching.run(STORE)
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent - sent == len(fetching.source.files["config.json"])


async def test_an_object_that_changes_under_way_is_not_mixed(fetching: Fetching) -> None:
    fetching.source.faults = [once(lambda _: web.Response(status=412), f"demo/model/{FIRST}", times=100)]
    fetching.source.sums = True  # no HEAD: the fault strikes the GET
    error = await fetching.fails(STORE)
    assert "has changed" in error.message


# Room


async def test_room_is_looked_for_before_the_first_byte(fetching: Fetching) -> None:
    fetching.free = lambda _: 900_000
    error = await fetching.fails()
    assert error.reason is Reason.DISK_FULL
    assert "needs 1.0 MB more, and 0.9 MB are free" in error.message
    assert fetching.source.sent == 0


async def test_what_is_there_already_needs_no_room(fetching: Fetching) -> None:
    fetching.source.lies["config.json"] = b"!" * len(fetching.source.files["config.json"])
    await fetching.fails()
    fetching.source.lies.clear()
    fetching.free = lambda _: 1_100_000
    await fetching.run()
    assert fetching.tree() == fetching.source.files


async def test_a_limit_counts_like_room(fetching: Fetching) -> None:
    error = await fetching.fails(size_limit=500_000)
    assert (error.reason, "sizeLimit" in error.message) == (Reason.DISK_FULL, True)
    await fetching.run(size_limit=3_000_000)


async def test_a_disk_that_fills_up_under_way_is_said_and_goes_on_with_room(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = download._append, [3]

    def full(*arguments: Any) -> None:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        real(*arguments)

    monkeypatch.setattr(download, "_append", full)
    error = await fetching.fails()
    assert (error.reason, "disk is full" in error.message) == (Reason.DISK_FULL, True)
    monkeypatch.setattr(download, "_append", real)
    await fetching.run()
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent < 2 * SIZE


@pytest.fixture
def grow(fetching: Fetching) -> Iterator[Callable[[], None]]:
    """Gives the folder a file system of its own that is smaller than the model, and makes it larger when called."""
    fetching.to.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(fetching.to)], check=False)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount")

    def larger() -> None:
        subprocess.run(["mount", "-o", "remount,size=4m", str(fetching.to)], check=True)

    yield larger
    subprocess.run(["umount", "--lazy", str(fetching.to)], check=True)


async def test_a_real_disk_that_is_full_is_said(fetching: Fetching, grow: Callable[[], None]) -> None:
    assert "no room" in (await fetching.fails()).message
    assert fetching.source.sent == 0
    fetching.free = lambda _: 1 << 40  # somebody else takes the room after we looked
    error = await fetching.fails()
    assert (error.reason, "disk is full" in error.message) == (Reason.DISK_FULL, True)
    assert fetching.parts() > 0
    before = fetching.source.sent
    grow()
    await fetching.run()
    assert fetching.tree() == fetching.source.files
    assert fetching.source.sent - before < SIZE


async def test_a_folder_that_cannot_be_made_is_said(fetching: Fetching, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file is in the way")
    error = await fetching.fails()
    assert (error.reason, "cannot write" in error.message) == (Reason.FETCH_FAILED, True)


@pytest.mark.parametrize("path", ["../outside", "a/../../b", "/etc/passwd", ".prfaas-complete.json", "a//b"])
async def test_a_file_outside_of_the_folder_is_refused(fetching: Fetching, path: str) -> None:
    fetching.source.files = {path: b"x"}
    error = await fetching.fails()
    assert "cannot be kept" in error.message
    assert fetching.tree() == {}


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), max_size=6))
def test_wherever_it_is_cut_every_byte_comes_once(cuts: list[float]) -> None:
    """`cuts`: how much of what is left comes before the connection breaks."""

    async def check(to: Path) -> None:
        fetching = Fetching(to / "model", ModelSource({"model.safetensors": content(40_000), "config.json": b"{}"}))
        for keep in cuts:
            Cutting(fetching, times=1, keep=keep)
        fetching.patience = Patience(tries=10)
        await fetching.run()
        assert fetching.tree() == fetching.source.files
        assert fetching.source.sent == sum(map(len, fetching.source.files.values()))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "CHUNK", 1000)
        asyncio.run(check(Path(folder)))
