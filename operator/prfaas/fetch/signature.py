"""AWS Signature Version 4 of requests without a body: pure, and held to the examples that AWS publishes.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import parse_qsl, quote, urlsplit

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Keys:
    """Who signs."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def signed(
    method: str, url: str, headers: Mapping[str, str], keys: Keys, *, region: str, now: datetime, service: str = "s3"
) -> dict[str, str]:
    """`headers` with those that prove who asks. The URL's path must be encoded already; `now` is UTC."""
    parts = urlsplit(url)
    moment, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    own = {"x-amz-date": moment, "x-amz-content-sha256": EMPTY_SHA256}
    if keys.session_token:
        own["x-amz-security-token"] = keys.session_token
    everything = {**headers, **own}
    # What a proxy may rewrite on the way is not signed.
    signing = {name.lower(): value.strip() for name, value in everything.items() if name.lower() != "accept-encoding"}
    signing["host"] = parts.netloc
    names = ";".join(sorted(signing))
    query = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in _query(parts.query))
    canonical = "\n".join(
        (
            method,
            parts.path or "/",
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{signing[name]}" for name in sorted(signing)),
            "",
            names,
            EMPTY_SHA256,
        )
    )
    scope = f"{day}/{region}/{service}/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{keys.secret_key}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"{keys.access_key}/{scope}"
    proof = f"AWS4-HMAC-SHA256 Credential={credential},SignedHeaders={names},Signature={signature}"
    return {**everything, "Authorization": proof}


def _query(text: str) -> list[tuple[str, str]]:
    return parse_qsl(text, keep_blank_values=True)
