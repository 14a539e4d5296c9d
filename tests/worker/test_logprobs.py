"""Log probabilities: of a completion, of a chat, of a prompt that is echoed or not."""

from __future__ import annotations

from prfaas.worker.oracle import LIKELIEST, expected_text, token_ids
from tests.worker.rig import MODEL, config, serving, words_of

PROMPT = "Tell me about the sea."
CHAT = [{"role": "user", "content": PROMPT}]


async def test_log_probabilities_of_a_completion() -> None:
    async with serving(config()) as (client,):
        _, body = await client.complete(PROMPT, 3, logprobs=2)
        _, none = await client.complete(PROMPT, 3, logprobs=0)
        _, as_ids = await client.complete(PROMPT, 1, logprobs=0, return_tokens_as_token_ids=True)
        chunks = await client.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2})
    words = words_of(PROMPT, 3)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == words
    assert logprobs["token_logprobs"] == [LIKELIEST] * 3
    assert logprobs["text_offset"] == [0, 4, 8]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert [max(top, key=top.__getitem__) for top in logprobs["top_logprobs"]] == words
    assert [len(top) for top in none["choices"][0]["logprobs"]["top_logprobs"]] == [1, 1, 1]
    assert as_ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token_ids(words[0].encode())[0]}"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in logprobs.items():
        assert [each for part in streamed for each in part[name]] == values


async def test_log_probabilities_of_a_chat() -> None:
    asked = {"messages": CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    async with serving(config()) as (client,):
        _, body = await client.post("/v1/chat/completions", asked)
        _, plain = await client.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "logprobs": True})
        _, *chunks = await client.events("/v1/chat/completions", asked)
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == body["choices"][0]["message"]["content"]
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode())
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert len(entry["top_logprobs"]) == 2
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert [e for chunk in chunks for e in chunk["choices"][0]["logprobs"]["content"]] == content


async def test_echo_puts_the_prompt_before_the_answer() -> None:
    said = expected_text(PROMPT, 3, model=MODEL)
    async with serving(config()) as (client,):
        _, body = await client.complete(PROMPT, 3, echo=True, logprobs=1)
        _, alone = await client.complete(PROMPT, 0, echo=True)
        chunks = await client.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "echo": True})
    (choice,) = body["choices"]
    assert choice["text"] == PROMPT + said
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPT + said
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None), "a first token has none"
    assert logprobs["text_offset"][-1] == len(PROMPT + said) - 4
    assert alone["choices"][0]["text"] == PROMPT
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + said


async def test_log_probabilities_of_the_prompt() -> None:
    async with serving(config()) as (client,):
        await client.complete("abcdefgh", 1)
        _, body = await client.complete("abcdefgh", 1, prompt_logprobs=1)
        assert await client.metric("vllm:prefix_cache_queries_total") == 2, "it reads no cache: all is computed"
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    token = str(token_ids(b"efgh")[0])
    assert second[token] == {"logprob": LIKELIEST, "rank": 1, "decoded_token": "efgh"}
    assert [entry["rank"] for entry in second.values()] == [1, 2]
