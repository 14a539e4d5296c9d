"""A bucket of S3, or of a store that speaks its protocol: the objects under a prefix are the model's files.

What a file must be is taken from the best that the bucket has: a `SHA256SUMS` beside the files, the object's own
SHA-256, or an ETag that is an MD5. Of an object uploaded in parts, or encrypted by KMS, the ETag says nothing.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree

from prfaas.api.conditions import Reason
from prfaas.fetch.errors import FetchError, Transient
from prfaas.fetch.listing import Checksum, Listing, RemoteFile, checked_path
from prfaas.fetch.remote import Remote
from prfaas.fetch.signature import Keys, signed

MANIFEST = "SHA256SUMS"
"""As `sha256sum` writes it, at the prefix."""
_AT_A_TIME = 8


@dataclass(frozen=True)
class Bucket:
    """A prefix of a bucket. Without keys requests are not signed: the bucket is open to everyone."""

    name: str
    prefix: str
    now: Callable[[], datetime]
    endpoint: str | None = None
    region: str = "us-east-1"
    keys: Keys | None = field(default=None, repr=False)
    follows_redirects: bool = False

    @property
    def base(self) -> str:
        """URL of the bucket: the bucket in the path, since stores of one's own seldom have it in their name."""
        return f"{(self.endpoint or f'https://s3.{self.region}.amazonaws.com').rstrip('/')}/{self.name}"

    @property
    def host(self) -> str:
        """Who is asked."""
        return urlsplit(self.base).netloc

    def headers(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Signed, where there are keys."""
        if self.keys is None:
            return dict(headers)
        return signed(method, url, headers, self.keys, region=self.region, now=self.now())

    async def listing(self, remote: Remote) -> Listing:
        """The objects under the prefix, each with the best checksum there is."""
        under = f"{self.prefix}/" if self.prefix else ""
        found: list[tuple[str, int, str]] = []
        token: str | None = None
        while True:
            query = {"encoding-type": "url", "list-type": "2", "prefix": under}
            if token:
                query["continuation-token"] = token
            body, _ = await remote.read("GET", f"{self.base}?{urlencode(sorted(query.items()), quote_via=quote)}")
            page = self._xml(body)
            for item in page.findall("{*}Contents"):
                key = unquote(item.findtext("{*}Key", ""))
                if not key.endswith("/"):
                    etag = item.findtext("{*}ETag", "").strip('"')
                    path = checked_path(key.removeprefix(under))
                    found.append((path, int(item.findtext("{*}Size", "0")), etag))
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                break
        if not found:
            text = f"bucket {self.name} on {self.host} has nothing under {under!r}; correct spec.model.source"
            raise FetchError(Reason.NOT_FOUND, text)
        sums = await self._manifest(remote) if any(path == MANIFEST for path, _, _ in found) else {}
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def file(path: str, size: int, etag: str) -> RemoteFile:
            checksum = sums.get(path)
            if checksum is None:
                async with limit:
                    _, headers = await remote.read("HEAD", self._url(path), {"x-amz-checksum-mode": "ENABLED"})
                checksum = checksum_of(headers, etag)
            return RemoteFile(path, size, self._url(path), checksum, etag, if_match=etag)

        return Listing("", tuple(await asyncio.gather(*(file(*each) for each in found))))

    def _url(self, path: str) -> str:
        return f"{self.base}/{quote(f'{self.prefix}/{path}' if self.prefix else path, safe='/-_.~')}"

    async def _manifest(self, remote: Remote) -> dict[str, Checksum]:
        body, _ = await remote.read("GET", self._url(MANIFEST))
        lines = re.findall(r"^\\?([0-9a-fA-F]{64}) [ *](?:\./)?(.+)$", body.decode(errors="replace"), re.MULTILINE)
        return {path: Checksum("sha256", value.lower()) for value, path in lines}

    def _xml(self, body: bytes) -> ElementTree.Element:
        try:
            page = ElementTree.fromstring(body)
        except ElementTree.ParseError:
            page = None
        if page is None or not page.tag.endswith("ListBucketResult"):
            text = f"{self.host} answers, but not as S3 does: is spec.model.endpoint right?"
            raise FetchError(Reason.SOURCE_UNREACHABLE, text)
        return page

    def explain(self, status: int, headers: Mapping[str, str], body: bytes) -> FetchError:
        """What S3 means; it names the case in an XML document."""
        found = re.search(rb"<Code>([A-Za-z]{1,64})</Code>", body)
        code = found[1].decode() if found else ""
        where = f"bucket {self.name} on {self.host}"
        if code in ("SlowDown", "RequestLimitExceeded", "TooManyRequests"):
            return Transient(Reason.RATE_LIMITED, f"{self.host} has had too many requests; they are tried again later")
        if 300 <= status < 400:
            region = headers.get("x-amz-bucket-region")
            said = f"put AWS_REGION={region}" if region else "put AWS_REGION, the region of the bucket,"
            text = f"{where} is not in region {self.region}; {said} into the Secret of spec.model.secretRef"
            return FetchError(Reason.ACCESS_DENIED, text)
        if code == "NoSuchBucket" or (status == 404 and code != "NoSuchKey"):
            return FetchError(Reason.NOT_FOUND, f"{where} does not exist; correct spec.model.source")
        if status == 404:
            return FetchError(Reason.NOT_FOUND, f"{where}: a file has gone since it was listed; it is listed again")
        if status == 412:
            return FetchError(
                Reason.FETCH_FAILED, f"{where}: a file has changed since it was listed; it is listed again"
            )
        if status in (401, 403):
            keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the Secret of spec.model.secretRef"
            who = f"with the {keys}" if self.keys else f"without keys: put {keys.replace(' in ', ' into ')}"
            reason = f" ({code})" if code else ""
            return FetchError(Reason.ACCESS_DENIED, f"{where} may not be listed and read{reason} {who}")
        return FetchError(Reason.FETCH_FAILED, f"{self.host} refuses with status {status} {code}".rstrip())


def checksum_of(headers: Mapping[str, str], etag: str) -> Checksum | None:
    """What an object's headers (names in lower case) say of its whole content; None where that is nothing."""
    own = headers.get("x-amz-checksum-sha256", "")
    try:
        if own and len(raw := base64.b64decode(own, validate=True)) == 32:  # of parts: the number of parts follows
            return Checksum("sha256", raw.hex())
    except ValueError:
        pass
    plain = headers.get("x-amz-server-side-encryption", "AES256") == "AES256"
    customer = "x-amz-server-side-encryption-customer-algorithm" in headers
    if plain and not customer and re.fullmatch("[0-9a-f]{32}", etag):
        return Checksum("md5", etag)
    return None
