"""Hugging Face, or a mirror of it: revision to commit, commit to files, refusals to what helps.

A revision is resolved once, and every file is of that commit. Large files carry their SHA-256, small ones Git's own
hash; both are compared (the public client compares neither: huggingface_hub issue 3643).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from prfaas.api.conditions import Reason
from prfaas.fetch.errors import FetchError
from prfaas.fetch.listing import Checksum, Listing, RemoteFile, checked_path
from prfaas.fetch.remote import Remote

ENDPOINT = "https://huggingface.co"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".ot", ".onnx", ".gguf", ".tflite")
"""The same weights in forms that no engine loads where there are safetensors."""


@dataclass(frozen=True)
class Hub:
    """One repository at one revision."""

    repository: str
    revision: str
    endpoint: str = ENDPOINT
    token: str | None = field(default=None, repr=False)
    follows_redirects: bool = True

    @property
    def host(self) -> str:
        """Who is asked."""
        return urlsplit(self.endpoint).netloc

    def headers(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """With the token. (It does not go along to the host of a redirect: aiohttp takes it out.)"""
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {**headers, **own}

    async def listing(self, remote: Remote) -> Listing:
        """The files of the revision's commit, without weights that are there a second time in another form."""
        base, revision = self.endpoint.rstrip("/"), quote(self.revision, safe="")
        info = await self._json(remote, f"{base}/api/models/{self.repository}/revision/{revision}")
        commit = str(info.get("sha") if isinstance(info, dict) else "")
        if not re.fullmatch("[0-9a-f]{40,64}", commit):
            raise self._unusable("no commit")
        found: list[RemoteFile] = []
        url: str | None = f"{base}/api/models/{self.repository}/tree/{commit}?recursive=true"
        while url is not None:
            body, headers = await remote.read("GET", url)
            entries = [entry for entry in self._decoded(body, list) if entry.get("type") == "file"]
            found += [self._file(entry, f"{base}/{self.repository}/resolve/{commit}") for entry in entries]
            following = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', headers.get("link", ""))
            url = urljoin(url, following[1]) if following else None
            if url is not None and urlsplit(url).netloc != self.host:
                raise self._unusable("a list that goes on at another host")
        files = without_other_weights(found)
        if not files:
            raise FetchError(Reason.NOT_FOUND, f"{self.host}: {self.repository} has no files at {self.revision}")
        return Listing(commit, tuple(files))

    def _file(self, entry: Mapping[str, Any], base: str) -> RemoteFile:
        try:
            path, size, large = checked_path(str(entry["path"])), int(entry["size"]), entry.get("lfs")
            checksum = Checksum("sha256", str(large["oid"])) if large else Checksum("git", str(entry["oid"]))
        except (KeyError, TypeError, ValueError):
            raise self._unusable("a file without size or hash") from None
        return RemoteFile(path, size, f"{base}/{quote(path)}", checksum, checksum.value)

    async def _json(self, remote: Remote, url: str) -> Any:
        body, _ = await remote.read("GET", url)
        return self._decoded(body, dict)

    def _decoded(self, body: bytes, kind: type) -> Any:
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, kind):
            raise self._unusable("no such document")
        return document

    def _unusable(self, what: str) -> FetchError:
        text = f"{self.host} answers, but not as Hugging Face does ({what}): is spec.model.endpoint right?"
        return FetchError(Reason.SOURCE_UNREACHABLE, text)

    def explain(self, status: int, headers: Mapping[str, str], body: bytes) -> FetchError:
        """What Hugging Face means; it names the case in a header."""
        code, name = headers.get("X-Error-Code", ""), f"{self.repository} on {self.host}"
        if code == "GatedRepo":
            page = f"{self.endpoint.rstrip('/')}/{self.repository}"
            token = "of the token in" if self.token else "whose token then goes, as HF_TOKEN, into"
            text = f"{name} is gated: accept its terms on {page} with the account {token}"
            return FetchError(Reason.GATED, f"{text} the Secret of spec.model.secretRef")
        if code == "RevisionNotFound":
            text = f"{name} has no revision {self.revision!r}; correct spec.model.revision"
            return FetchError(Reason.NOT_FOUND, text)
        if code == "RepoNotFound" or status == 404:
            rights = (
                "the token in the Secret may not read it" if self.token else "it is private and there is no HF_TOKEN"
            )
            text = (
                f"{name} does not exist, or {rights}; correct spec.model.source or the Secret of spec.model.secretRef"
            )
            return FetchError(Reason.NOT_FOUND, text)
        if status in (401, 403):
            said = "does not accept the token" if self.token else "wants a token"
            text = f"{self.host} {said}; put a valid HF_TOKEN into the Secret of spec.model.secretRef"
            return FetchError(Reason.GATED, text)
        return FetchError(Reason.FETCH_FAILED, f"{self.host} refuses with status {status}")


def without_other_weights(files: list[RemoteFile]) -> list[RemoteFile]:
    """Where the repository's root has safetensors: without weights in other forms, and without `original/`."""
    paths = [PurePosixPath(file.path) for file in files]
    if not any(path.suffix == ".safetensors" and len(path.parts) == 1 for path in paths):
        return files
    return [
        file
        for file, path in zip(files, paths, strict=True)
        if path.suffix not in _OTHER_WEIGHTS and path.parts[0] != "original"
    ]
