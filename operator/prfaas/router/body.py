"""Request bodies: read the client's, write that of the prefill leg and that of the decode leg.

`kv_transfer_params` tells an engine from which host and blocks to take a KV cache, perhaps those of another user's
prompt: what a client sends under that name, however it is spelt in JSON, never reaches an engine. So the body is
parsed, not searched, and a body that holds the name is written anew from what was parsed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

KV: Final = "kv_transfer_params"
EXTRA: Final = "vllm_xargs"

PREFILL_KV: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What asks an engine to keep the KV cache of this prompt for another to pull (NIXL pull protocol)."""


class BadBodyError(ValueError):
    """The client's body is not a JSON object."""


class NoKVError(ValueError):
    """A prefill answer without a KV descriptor: the decode instance would silently compute the prompt again."""


@dataclass(frozen=True)
class ClientBody:
    """A client's body as it came and as it reads."""

    raw: bytes
    fields: Mapping[str, Any]
    """What it says, without what clients must not say."""
    forged: bool
    """It said such a thing, so `raw` must not be passed on."""


def parse(raw: bytes) -> ClientBody:
    """Read a client's body. Raises BadBodyError with a message for the client."""
    try:
        # Explicit UTF-8: json.loads would guess UTF-16 and UTF-32, which no engine is asked to.
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadBodyError(f"The body is not UTF-8 (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise BadBodyError(f"The body is not valid JSON: {error.msg} (character {error.pos}).") from error
    except RecursionError as error:
        raise BadBodyError("The body is nested too deeply.") from error
    if not isinstance(fields, dict):
        raise BadBodyError("The body is not a JSON object.")
    return ClientBody(raw, *_stripped(fields))


def _stripped(fields: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    # vLLM keeps vllm_xargs and the descriptor in one mapping: the name must not come in through that door either.
    extra = fields.get(EXTRA)
    inside = isinstance(extra, dict) and KV in extra
    if KV not in fields and not inside:
        return fields, False
    clean = {key: value for key, value in fields.items() if key != KV}
    if inside:
        clean[EXTRA] = {key: value for key, value in fields[EXTRA].items() if key != KV}
    return clean, True


def prefill(client: ClientBody) -> bytes:
    """The prefill leg's body: the same prompt, one token, no stream, and the wish to keep the KV cache."""
    fields = {key: value for key, value in client.fields.items() if key not in _NOT_ON_PREFILL}
    fields |= {"stream": False, "max_tokens": 1, KV: PREFILL_KV}
    # Left as it is, the prefill instance would generate the whole answer; absent, old servers refuse it.
    if "max_completion_tokens" in client.fields:
        fields["max_completion_tokens"] = 1
    return _dump(fields)


# Refused by engines beside `stream: false` or `max_tokens: 1`; the decode leg keeps them.
_NOT_ON_PREFILL: Final = frozenset({"stream_options", "min_tokens", "min_completion_tokens"})


def descriptor(answer: bytes) -> Mapping[str, Any]:
    """The KV descriptor of a prefill instance's answer. Raises NoKVError."""
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise NoKVError("the answer is not JSON") from error
    found = fields.get(KV) if isinstance(fields, dict) else None
    if not isinstance(found, dict) or not found:
        raise NoKVError(f"the answer holds no {KV}")
    return found


def decode(client: ClientBody, kv: Mapping[str, Any] | None) -> bytes | None:
    """The decode leg's body: the client's, with the KV descriptor verbatim; None when the client's own is right.

    Without `kv` (no prefill leg) there is no descriptor at all.
    """
    if client.forged:
        return _dump(client.fields if kv is None else {**client.fields, KV: kv})
    if kv is None:
        return None
    # The body is an object without the name: appending keeps the client's bytes, megabytes of prompt, as they are.
    head = client.raw.rstrip()[:-1].rstrip()
    comma = b"," if client.fields else b""
    return b"%b%b%b:%b}" % (head, comma, json.dumps(KV).encode(), _dump(kv))


def _dump(fields: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # A lone surrogate, legal as an escape only.
        return json.dumps(fields, separators=(",", ":")).encode()
