"""Both kinds of source: what is there afterwards, what is asked for, and what each refusal says."""

from __future__ import annotations

import json
import logging

import pytest
from aiohttp import web

from e2e.model_source import COMMIT, ModelSource, content, serving, small_model
from prfaas.api.conditions import FETCH_FAILURES, Reason
from tests.fetch.bench import HUB, KEYS, STORE, Fetching, once, status

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("source", [HUB, STORE])


@BOTH
async def test_the_folder_is_the_model_and_says_so(fetching: Fetching, source: str) -> None:
    await fetching.run(source)
    assert fetching.tree() == fetching.source.files
    marker = json.loads((fetching.to / ".prfaas-complete.json").read_text())
    assert (marker["source"], marker["revision"]) == (source, "main")
    assert {file["path"]: file["size"] for file in marker["files"]} == {
        path: len(data) for path, data in fetching.source.files.items()
    }
    assert marker["bytes"] == sum(map(len, fetching.source.files.values()))
    assert not (fetching.to / ".prfaas-part").exists()


@BOTH
async def test_what_is_whole_is_not_asked_for_again(fetching: Fetching, source: str) -> None:
    await fetching.run(source)
    fetching.source.requests.clear()
    await fetching.run(source)
    assert fetching.source.requests == []


async def test_a_revision_is_one_commit_for_all_files(fetching: Fetching) -> None:
    assert await fetching.run() == COMMIT
    resolved = [request for request in fetching.source.requests if "/resolve/" in request]
    assert len(resolved) == 4
    assert all(f"/resolve/{COMMIT}/" in request for request in resolved)


@BOTH
async def test_listings_of_several_pages_are_read_to_the_end(fetching: Fetching, source: str) -> None:
    fetching.source.page = 2
    await fetching.run(source)
    assert fetching.tree() == fetching.source.files


async def test_weights_that_are_there_a_second_time_are_left_out(fetching: Fetching) -> None:
    more = {
        "pytorch_model.bin": b"x" * 2000,
        "original/consolidated.00.pth": b"y",
        "gguf/q4.gguf": b"z",
        "LICENSE": b"l",
    }
    fetching.source.files = small_model() | more
    await fetching.run()
    assert fetching.tree() == small_model() | {"LICENSE": b"l"}


async def test_a_model_without_safetensors_is_taken_as_it_is(fetching: Fetching) -> None:
    fetching.source.files = {"config.json": b"{}", "pytorch_model.bin": content(3000)}
    await fetching.run()
    assert fetching.tree() == fetching.source.files


async def test_a_bucket_is_taken_whole_but_not_its_neighbour(fetching: Fetching) -> None:
    fetching.source.files = {"a b+c/é.bin": b"odd", "pytorch_model.bin": b"x", "model.safetensors": b"y"}
    source = "s3://models/demo/mod"
    assert (await fetching.fails(source)).reason is Reason.NOT_FOUND
    await fetching.run(STORE)
    assert fetching.tree() == fetching.source.files


async def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(fetching: Fetching) -> None:
    fetching.environment["HF_TOKEN"] = "hf_secret"
    fetching.source.token = "hf_secret"
    elsewhere = ModelSource(fetching.source.files)
    async with serving(elsewhere) as url:
        fetching.source.redirect = url
        await fetching.run()
    assert fetching.tree() == fetching.source.files
    assert {authorization for _, authorization in fetching.source.authorizations} == {"Bearer hf_secret"}
    assert elsewhere.authorizations == []


async def test_a_redirect_is_followed_to_the_letter(fetching: Fetching) -> None:
    elsewhere = ModelSource(fetching.source.files)
    async with serving(elsewhere) as url:
        query = "Signature=a~b%7Ec%2Bd&Key=%22x%22"
        fetching.source.redirect, fetching.source.redirect_query = url, query
        await fetching.run()
    asked = [target for target in elsewhere.targets if "/cdn/" in target]
    assert len(asked) == len(fetching.source.files)
    assert all(target.endswith(f"?{query}") for target in asked)


async def test_keys_sign_and_are_not_sent(fetching: Fetching) -> None:
    fetching.environment |= KEYS | {"AWS_SESSION_TOKEN": "session", "AWS_REGION": "eu-west-1"}
    await fetching.run(STORE)
    proofs = [proof for _, proof in fetching.source.authorizations]
    assert len(proofs) == len(fetching.source.requests)
    assert all("/eu-west-1/s3/aws4_request" in proof and "x-amz-security-token" in proof for proof in proofs)
    assert not any(KEYS["AWS_SECRET_ACCESS_KEY"] in proof for proof in proofs)


# Refusals


def refused(code: int, name: str = "") -> object:
    headers = {"X-Error-Code": name} if name else {}
    return once(status(code, headers), "/", times=100)


def s3_error(code: int, name: str, headers: dict[str, str] | None = None) -> object:
    def answer(_: web.Request) -> web.Response:
        return web.Response(status=code, text=f"<Error><Code>{name}</Code></Error>", headers=headers)

    return once(answer, "/", times=100)


@pytest.mark.parametrize(
    ("source", "fault", "environment", "reason", "words"),
    [
        (HUB, refused(401, "GatedRepo"), {}, Reason.GATED, "accept its terms on http"),
        (HUB, refused(403, "GatedRepo"), {"HF_TOKEN": "t"}, Reason.GATED, "the account of the token"),
        (HUB, refused(401), {"HF_TOKEN": "t"}, Reason.GATED, "does not accept the token"),
        (HUB, refused(403), {}, Reason.GATED, "HF_TOKEN"),
        (HUB, refused(401, "RepoNotFound"), {}, Reason.NOT_FOUND, "there is no HF_TOKEN"),
        (HUB, refused(404, "RepoNotFound"), {"HF_TOKEN": "t"}, Reason.NOT_FOUND, "may not read it"),
        (HUB, refused(404, "RevisionNotFound"), {}, Reason.NOT_FOUND, "spec.model.revision"),
        (HUB, refused(418), {}, Reason.FETCH_FAILED, "status 418"),
        (STORE, s3_error(403, "AccessDenied"), {}, Reason.ACCESS_DENIED, "without keys: put AWS_ACCESS_KEY_ID"),
        (STORE, s3_error(403, "InvalidAccessKeyId"), KEYS, Reason.ACCESS_DENIED, "(InvalidAccessKeyId)"),
        (STORE, s3_error(404, "NoSuchBucket"), KEYS, Reason.NOT_FOUND, "bucket models on"),
        (
            STORE,
            s3_error(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-north-1"}),
            KEYS,
            Reason.ACCESS_DENIED,
            "AWS_REGION=eu-north-1",
        ),
    ],
)
async def test_a_refusal_says_what_is_wrong_and_what_helps(
    fetching: Fetching, source: str, fault: object, environment: dict[str, str], reason: Reason, words: str
) -> None:
    fetching.environment = environment
    fetching.source.faults = [fault]  # type: ignore[list-item]  # the table above holds what `once` gives
    error = await fetching.fails(source)
    assert error.reason is reason
    assert words in error.message
    assert reason in FETCH_FAILURES
    assert fetching.slept == []
    assert not any(secret in error.message for secret in environment.values() if len(secret) > 1)


async def test_a_wrong_revision_and_a_gated_repository_are_told_apart_by_the_source_itself(fetching: Fetching) -> None:
    error = await fetching.fails(revision="v9")
    assert (error.reason, "'v9'" in error.message) == (Reason.NOT_FOUND, True)
    fetching.source.token = "right"
    assert (await fetching.fails()).reason is Reason.GATED
    fetching.environment["HF_TOKEN"] = "wrong"
    assert (await fetching.fails()).reason is Reason.GATED
    fetching.environment["HF_TOKEN"] = "right"
    await fetching.run()
    assert fetching.tree() == fetching.source.files


@pytest.mark.parametrize("body", ["[]", "not json", '{"sha": "x"}'])
async def test_an_endpoint_that_is_something_else_is_said(fetching: Fetching, body: str) -> None:
    fetching.source.faults = [once(lambda _: web.Response(text=body), "/", times=100)]
    error = await fetching.fails()
    assert (error.reason, "spec.model.endpoint" in error.message) == (Reason.SOURCE_UNREACHABLE, True)
    assert "not as S3 does" in (await fetching.fails(STORE)).message


# Patience


@BOTH
@pytest.mark.parametrize("code", [500, 503, 408])
async def test_errors_of_the_server_are_waited_out(fetching: Fetching, source: str, code: int) -> None:
    fetching.source.faults = [once(status(code), "/", times=3)]
    await fetching.run(source)
    assert fetching.tree() == fetching.source.files
    first, second, third = fetching.slept
    assert 0.5 <= first <= 1 <= second <= 2 <= third <= 4


@pytest.mark.parametrize("headers", [{"Retry-After": "17"}, {"RateLimit": '"resolvers";r=0;t=17'}])
async def test_a_rate_limit_is_waited_for_as_long_as_the_server_asks(
    fetching: Fetching, headers: dict[str, str]
) -> None:
    fetching.source.faults = [once(status(429, headers), "/", times=2)]
    await fetching.run()
    assert fetching.slept == [17.0, 17.0]


async def test_a_rate_limit_that_lasts_is_said(fetching: Fetching) -> None:
    fetching.source.faults = [once(status(429, {"Retry-After": "1200"}), "/", times=100)]
    error = await fetching.fails()
    assert (error.reason, fetching.slept) == (Reason.RATE_LIMITED, [])
    fetching.source.faults = [once(status(429), "/", times=100)]
    assert (await fetching.fails()).reason is Reason.RATE_LIMITED
    assert len(fetching.slept) == 3


async def test_a_server_that_stays_broken_is_said(fetching: Fetching) -> None:
    fetching.source.faults = [once(status(502), "/", times=100)]
    error = await fetching.fails()
    assert (error.reason, "error 502" in error.message) == (Reason.SOURCE_UNREACHABLE, True)


async def test_a_server_that_falls_silent_is_asked_again(fetching: Fetching) -> None:
    fetching.silence = 0.2
    fetching.source.silent = 2
    await fetching.run()
    assert fetching.tree() == fetching.source.files
    fetching.source.silent = 100
    (fetching.to / ".prfaas-complete.json").unlink()
    (fetching.to / "config.json").unlink()
    error = await fetching.fails()
    assert (error.reason, "silence" in error.message) == (Reason.SOURCE_UNREACHABLE, True)


async def test_a_source_that_is_not_there_is_said(fetching: Fetching) -> None:
    error = await fetching.fails_at("http://127.0.0.1:9")
    assert (error.reason, "cannot connect" in error.message) == (Reason.SOURCE_UNREACHABLE, True)


async def test_no_secret_is_logged(fetching: Fetching, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fetching.environment |= KEYS | {"HF_TOKEN": "hf_secret"}
    await fetching.run()
    fetching.source.faults = [s3_error(403, "AccessDenied")]  # type: ignore[list-item]  # as above
    await fetching.fails(STORE)
    said = caplog.text + " ".join(str(vars(record)) for record in caplog.records)
    assert "hf_secret" not in said
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in said
