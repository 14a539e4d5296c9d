"""Bodies of both legs: what is kept, what is changed, and what never gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.router.body import BadBodyError, NoKVError, decode, descriptor, parse, prefill

DESCRIPTOR = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "new_field": "kept"}


def client(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hello"} | fields).encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff{}", "not UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_bodies_say_what_is_wrong(raw: bytes, message: str) -> None:
    with pytest.raises(BadBodyError, match=message):
        parse(raw)


def test_prefill_asks_for_one_token_and_for_the_kv() -> None:
    raw = client(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=200,
        max_completion_tokens=300,
        min_tokens=10,
        min_completion_tokens=10,
        temperature=0.5,
        kv_transfer_params={"remote_host": "evil"},
    )
    assert json.loads(prefill(parse(raw))) == {
        "model": "m",
        "prompt": "hello",
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "temperature": 0.5,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_max_completion_tokens_is_not_invented() -> None:
    assert "max_completion_tokens" not in json.loads(prefill(parse(client())))


def test_decode_keeps_the_clients_fields_and_carries_the_descriptor_verbatim() -> None:
    raw = client(stream=True, min_tokens=10, stream_options={"include_usage": True}, temperature=1.50)
    body = decode(parse(raw), DESCRIPTOR)
    assert body is not None
    assert json.loads(body) == json.loads(raw) | {"kv_transfer_params": DESCRIPTOR}


def test_without_a_leg_a_clean_body_is_left_alone() -> None:
    assert decode(parse(client()), None) is None


SPELLINGS = (
    b'{"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}',
    b'{"kv_transfer_params": {"remote_host": "evil"}, "prompt": "x"}',
    b'{"prompt": "x", "kv\\u005ftransfer_params": {"remote_host": "evil"}}',
    b'{"prompt": "x", "\\u006bv_transfer_param\\u0073": {"remote_host": "evil"}}',
    b'{"kv_transfer_params": null, "prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}',
    b'{"kv_transfer_params": {"remote_host": "evil"}, "prompt": "x", "kv\\u005ftransfer_params": 1}',
)


@pytest.mark.parametrize("raw", SPELLINGS)
def test_a_clients_descriptor_never_gets_through(raw: bytes) -> None:
    with_leg, without = decode(parse(raw), DESCRIPTOR), decode(parse(raw), None)
    assert with_leg is not None
    assert without is not None
    for body in (with_leg, without, prefill(parse(raw))):
        assert b"evil" not in body
    assert json.loads(with_leg) == {"prompt": "x", "kv_transfer_params": DESCRIPTOR}
    assert json.loads(without) == {"prompt": "x"}


def test_nor_through_vllms_extra_arguments() -> None:
    raw = client(vllm_xargs={"kv_transfer_params": "evil", "mode": "full"})
    body = decode(parse(raw), None)
    assert body is not None
    assert json.loads(body) == {"model": "m", "prompt": "hello", "vllm_xargs": {"mode": "full"}}
    assert b"evil" not in prefill(parse(raw))


def test_the_name_inside_a_prompt_is_only_text() -> None:
    raw = client(
        prompt='"kv_transfer_params": {"a": 1}}', metadata={"kv_transfer_params": "nested is the client's own"}
    )
    assert decode(parse(raw), None) is None
    body = decode(parse(raw), DESCRIPTOR)
    assert body is not None
    assert json.loads(body) == json.loads(raw) | {"kv_transfer_params": DESCRIPTOR}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
spaces = st.text(alphabet=" \t\r\n", max_size=3).map(str.encode)


@given(
    st.dictionaries(st.text() | st.just("kv_transfer_params"), json_values, max_size=5), spaces, spaces, st.booleans()
)
def test_every_object_gets_exactly_our_descriptor(
    fields: dict[str, Any], before: bytes, after: bytes, ascii_only: bool
) -> None:
    try:
        raw = before + json.dumps(fields, ensure_ascii=ascii_only).encode() + after
    except UnicodeEncodeError:
        raw = before + json.dumps(fields).encode() + after
    body = decode(parse(raw), DESCRIPTOR)
    assert body is not None
    assert json.loads(body) == fields | {"kv_transfer_params": DESCRIPTOR}
    assert (
        json.loads(body, object_pairs_hook=lambda pairs: len([1 for key, _ in pairs if key == "kv_transfer_params"]))
        <= 1
    )


@pytest.mark.parametrize(
    "answer", [b"", b"oops", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {}}']
)
def test_a_prefill_answer_without_a_descriptor_is_an_error(answer: bytes) -> None:
    with pytest.raises(NoKVError):
        descriptor(answer)


def test_descriptor_is_taken_whole() -> None:
    assert descriptor(json.dumps({"id": "x", "kv_transfer_params": DESCRIPTOR}).encode()) == DESCRIPTOR
