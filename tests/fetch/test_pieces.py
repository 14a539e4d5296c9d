"""The pure parts: signatures as AWS publishes them, waits, checksums, lines of progress, paths."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.api.model import Origin
from prfaas.fetch.errors import FetchError, Transient
from prfaas.fetch.listing import Checksum, RemoteFile, checked_path, hasher
from prfaas.fetch.progress import Progress
from prfaas.fetch.remote import Attempts, Patience, retry_after
from prfaas.fetch.signature import Keys, signed
from prfaas.fetch.store import checksum_of

EXAMPLE = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
MAY = datetime(2013, 5, 24, tzinfo=UTC)
HOST = "https://examplebucket.s3.amazonaws.com"


@pytest.mark.parametrize(
    ("url", "headers", "signature"),
    [
        (
            f"{HOST}/test.txt",
            {"Range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (f"{HOST}/?lifecycle", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (f"{HOST}/?max-keys=2&prefix=J", {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_are_those_of_the_published_examples(url: str, headers: dict[str, str], signature: str) -> None:
    proof = signed("GET", url, headers, EXAMPLE, region="us-east-1", now=MAY)["Authorization"]
    assert proof.endswith(f"Signature={signature}")


def test_keys_are_not_shown() -> None:
    assert "wJalr" not in repr(EXAMPLE)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "120"}, 120.0),
        ({"Retry-After": "Fri, 24 May 2013 00:01:30 GMT"}, 90.0),
        ({"Retry-After": "Thu, 23 May 2013 00:00:00 GMT"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"Retry-After": "1", "RateLimit": '"api";r=0;t=55'}, 1.0),
    ],
)
def test_what_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, MAY) == seconds


@given(st.lists(st.booleans(), max_size=40))
async def test_only_failures_in_a_row_count(progress: list[bool]) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    attempts, row, error = Attempts(Patience(tries=5), sleep), 0, Transient.__new__(Transient)
    error.retry_after = None
    for brought in progress:
        if brought:
            attempts.progressed()
            row = 0
            continue
        row += 1
        if row < 5:
            await attempts.again(error)
        else:
            with pytest.raises(Transient):
                await attempts.again(error)
            return
    assert all(0.5 <= wait <= 60 for wait in slept)


ETAG = "9e107d9d372bb6826bd81d3542a419d6"
SHA = base64.b64encode(bytes(range(32))).decode()


@pytest.mark.parametrize(
    ("headers", "etag", "checksum"),
    [
        ({}, ETAG, Checksum("md5", ETAG)),
        ({"x-amz-server-side-encryption": "AES256"}, ETAG, Checksum("md5", ETAG)),
        ({"x-amz-server-side-encryption": "aws:kms"}, ETAG, None),
        ({"x-amz-server-side-encryption-customer-algorithm": "AES256"}, ETAG, None),
        ({}, f"{ETAG}-12", None),
        ({"x-amz-checksum-sha256": SHA}, f"{ETAG}-12", Checksum("sha256", bytes(range(32)).hex())),
        ({"x-amz-checksum-sha256": f"{SHA}-12"}, f"{ETAG}-12", None),
    ],
)
def test_what_an_object_says_of_its_content(headers: dict[str, str], etag: str, checksum: Checksum | None) -> None:
    assert checksum_of(headers, etag) == checksum


def test_gits_own_hash_of_a_file() -> None:
    # git hash-object of "hello\n"
    file = RemoteFile("a", 6, "", Checksum("git", "ce013625030ba8dba906f756967f9e9ca394464a"))
    digest = hasher(file)
    digest.update(b"hello\n")
    assert file.checksum is not None
    assert digest.hexdigest() == file.checksum.value


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b.c", ".prfaas-lock", "x y"]), min_size=1, max_size=4))
def test_a_path_that_is_accepted_stays_inside(parts: list[str]) -> None:
    path = "/".join(parts)
    bad = any(part in ("", ".", "..") for part in parts) or parts[0] == ".prfaas-lock"
    if bad:
        with pytest.raises(FetchError):
            checked_path(path)
    else:
        assert checked_path(path) == path


def test_a_line_tells_the_rate_since_the_line_before() -> None:
    now = [100.0]
    progress = Progress(lambda: now[0])
    progress.start(total=1000, have=200)
    progress.came(300, "a")
    now[0] += 2
    assert progress.line() == {"done": 500, "total": 1000, "rate": 150, "file": "a"}
    progress.lost(100)
    now[0] += 1
    assert progress.line() == {"done": 400, "total": 1000, "rate": 0, "file": "a"}


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("hf://org/name", Origin("hf", "org/name")),
        ("s3://bucket", Origin("s3", "bucket")),
        ("s3://bucket/a/b/", Origin("s3", "bucket", "a/b")),
        ("pvc://claim/a", Origin("pvc", "claim", "a")),
    ],
)
def test_sources_are_taken_apart(text: str, origin: Origin) -> None:
    assert Origin.parse(text) == origin
