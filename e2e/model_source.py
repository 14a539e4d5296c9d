"""A place that models come from, for tests: it answers as Hugging Face does and as S3 does, slowly if told to.

In one file and on aiohttp alone, so that it also runs in a pod: `python3 model_source.py --megabytes 40 --rate 1e6`.
It counts every byte of content that it sends: what is sent twice was not resumed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote
from xml.sax.saxutils import escape

from aiohttp import web

COMMIT = "c0ffee" * 6 + "c0de"
LARGE = 1024
"""Files from this size on are kept as Git LFS does."""
PIECE = 64 * 1024
Fault = Callable[[web.Request], web.StreamResponse | None]


def content(size: int, seed: str = "model") -> bytes:
    """Bytes that look like nothing in particular, the same for the same seed."""
    return hashlib.shake_128(seed.encode()).digest(size)


def small_model(megabytes: float = 1.0) -> dict[str, bytes]:
    """Path -> content of a model with weights in two files."""
    half = int(megabytes * 500_000)
    return {
        "config.json": b'{"architectures": ["Example"]}\n',
        "tokenizer/vocab.json": b"{}\n",
        "model-00001-of-00002.safetensors": content(half, "first"),
        "model-00002-of-00002.safetensors": content(half, "second"),
    }


@dataclass
class ModelSource:
    """One repository and one bucket with the same files."""

    files: dict[str, bytes]
    repository: str = "demo/model"
    revisions: Sequence[str] = ("main", COMMIT)
    bucket: str = "models"
    prefix: str = "demo/model"
    rate: float | None = None
    """Bytes a second of each connection; None: as fast as it goes."""
    token: str | None = None
    """The repository is gated: who asks must have it."""
    sums: bool = False
    """The bucket has a SHA256SUMS."""
    sha256: bool = False
    """The bucket knows the SHA-256 of its objects."""
    ranges: bool = True
    """Parts of files can be asked for."""
    page: int = 1000
    """Entries in one answer to a listing."""
    redirect: str | None = None
    """Where files really are: the base URL of another source with the same files."""
    redirect_query: str = ""
    """What is signed of such a URL."""
    silent: int = 0
    """So many of the next answers with content never begin."""
    faults: list[Fault] = field(default_factory=list)
    """Asked first; an answer stands."""
    lies: dict[str, bytes] = field(default_factory=dict)
    """Content that is sent in place of what the listing says."""
    sent: int = 0
    """Bytes of content that were written to connections."""
    requests: list[str] = field(default_factory=list)
    """`GET /path` or `GET /path 100-`, in the order of their arrival."""
    targets: list[str] = field(default_factory=list)
    """Paths and queries as they were written."""
    authorizations: list[tuple[str, str]] = field(default_factory=list)
    """Host and Authorization of each request that had one."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        wanted = request.headers.get("Range", "").removeprefix("bytes=")
        self.requests.append(f"{request.method} {request.path} {wanted}".rstrip())
        self.targets.append(request.raw_path)
        if "Authorization" in request.headers:
            self.authorizations.append((request.host, request.headers["Authorization"]))
        for fault in self.faults:
            answer = fault(request)
            if answer is not None:
                return answer
        if request.path.startswith("/api/models/"):
            return self._api(request)
        if request.path.startswith("/cdn/"):
            return await self._send(request, request.path.removeprefix("/cdn/"))
        if f"/{self.repository}/resolve/" in request.path:
            return await self._resolve(request)
        return await self._bucket(request)

    # As Hugging Face

    def _gate(self, request: web.Request) -> web.Response | None:
        if self.token is None or request.headers.get("Authorization") == f"Bearer {self.token}":
            return None
        status = 403 if "Authorization" in request.headers else 401
        return refusal(status, "GatedRepo", "Access to model is restricted")

    def _api(self, request: web.Request) -> web.Response:
        if not request.path.startswith(f"/api/models/{self.repository}/"):
            return refusal(401, "RepoNotFound", "Invalid username or password.")
        if refused := self._gate(request):
            return refused
        action, _, revision = request.path.removeprefix(f"/api/models/{self.repository}/").partition("/")
        if revision not in self.revisions:
            return refusal(404, "RevisionNotFound", "Invalid rev id")
        if action == "revision":
            return web.json_response({"id": self.repository, "sha": COMMIT})
        begin = int(request.query.get("cursor", "0"))
        entries = [{"type": "directory", "path": "tokenizer", "oid": "0", "size": 0}, *map(self._entry, self.files)]
        answer = web.json_response(entries[begin : begin + self.page])
        if begin + self.page < len(entries):
            following = request.url.update_query(cursor=str(begin + self.page))
            answer.headers["Link"] = f'<{following}>; rel="next"'
        return answer

    def _entry(self, path: str) -> dict[str, object]:
        data = self.files[path]
        git = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": git}
        if len(data) >= LARGE:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        if refused := self._gate(request):
            return refused
        _, _, rest = request.path.partition("/resolve/")
        _, _, path = rest.partition("/")
        if self.redirect is not None:
            query = f"?{self.redirect_query}" if self.redirect_query else ""
            return web.Response(status=302, headers={"Location": f"{self.redirect}/cdn/{quote(path)}{query}"})
        return await self._send(request, path)

    # As S3

    async def _bucket(self, request: web.Request) -> web.StreamResponse:
        bucket, _, key = request.path.lstrip("/").partition("/")
        if bucket != self.bucket:
            return xml(404, "<Error><Code>NoSuchBucket</Code></Error>")
        objects = {f"{self.prefix}/{path}": data for path, data in self._objects().items()}
        if not key:
            return self._listing(request, objects)
        if key not in objects:
            return xml(404, "<Error><Code>NoSuchKey</Code></Error>")
        data, headers = objects[key], {}
        if request.headers.get("If-Match", f'"{md5(data)}"') != f'"{md5(data)}"':
            return xml(412, "<Error><Code>PreconditionFailed</Code></Error>")
        if self.sha256:
            headers["x-amz-checksum-sha256"] = base64.b64encode(hashlib.sha256(data).digest()).decode()
        if request.method == "HEAD":
            return web.Response(headers={**headers, "ETag": f'"{md5(data)}"'})
        return await self._send(request, key.removeprefix(f"{self.prefix}/"))

    def _objects(self) -> Mapping[str, bytes]:
        if not self.sums:
            return self.files
        lines = [f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in self.files.items()]
        return {**self.files, "SHA256SUMS": "".join(lines).encode()}

    def _listing(self, request: web.Request, objects: Mapping[str, bytes]) -> web.Response:
        under, begin = request.query.get("prefix", ""), int(request.query.get("continuation-token", "0"))
        keys = sorted(key for key in objects if key.startswith(under))
        items = "".join(
            f"<Contents><Key>{escape(quote(key))}</Key><Size>{len(objects[key])}</Size>"
            f"<ETag>&quot;{md5(objects[key])}&quot;</ETag></Contents>"
            for key in keys[begin : begin + self.page]
        )
        more = begin + self.page < len(keys)
        token = f"<NextContinuationToken>{begin + self.page}</NextContinuationToken>" if more else ""
        namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
        return xml(200, f'<ListBucketResult xmlns="{namespace}">{items}{token}</ListBucketResult>')

    # Content

    async def _send(self, request: web.Request, path: str) -> web.StreamResponse:
        if self.silent > 0:
            self.silent -= 1
            await asyncio.Event().wait()
        data = self.lies.get(path, self._objects().get(path))
        if data is None:
            return refusal(404, "EntryNotFound", "Entry not found")
        found = re.fullmatch(r"bytes=([0-9]+)-", request.headers.get("Range", ""))
        begin = int(found[1]) if found and self.ranges else 0
        response = web.StreamResponse(status=206 if found and self.ranges else 200)
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        response.content_length = len(data) - begin
        await response.prepare(request)
        for at in range(begin, len(data), PIECE):
            piece = data[at : at + PIECE]
            await response.write(piece)
            self.sent += len(piece)
            if self.rate:
                await asyncio.sleep(len(piece) / self.rate)
        return response


def md5(data: bytes) -> str:
    """An ETag of an object that was uploaded in one part."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def refusal(status: int, code: str, message: str) -> web.Response:
    """An error as Hugging Face gives it."""
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return web.json_response({"error": message}, status=status, headers=headers)


def xml(status: int, text: str) -> web.Response:
    """A document as S3 gives it."""
    return web.Response(status=status, text=f'<?xml version="1.0"?>{text}', content_type="application/xml")


@asynccontextmanager
async def serving(source: ModelSource, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The source's URL while it serves."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", source.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _serve(arguments: argparse.Namespace) -> None:
    source = ModelSource(small_model(arguments.megabytes), rate=arguments.rate)
    async with serving(source, "0.0.0.0", arguments.port):
        while True:
            await asyncio.sleep(5)
            print(json.dumps({"sent": source.sent, "requests": len(source.requests)}), flush=True)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--megabytes", type=float, default=40.0, help="size of the model")
    parser.add_argument("--rate", type=float, default=None, help="bytes a second of each connection")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
