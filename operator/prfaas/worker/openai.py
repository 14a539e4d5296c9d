"""The OpenAI-shaped requests of vLLM 0.33: read, checked, refused with vLLM's words. No I/O.

What changes nothing of a modelled answer (temperature, penalties, response formats, ...) is checked and accepted. What
this worker cannot do truthfully (beam search, forced tool calls, suffixes, embeddings as prompts) is refused with a 400
that says so, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prfaas.worker.errors import bad_body, bad_request
from prfaas.worker.fields import Limits, check_model, optional, text_or_ids, whole, whole_numbers
from prfaas.worker.oracle import Sampling, chat_prompt, count_tokens, from_token_ids, token_ids
from prfaas.worker.refusals import (
    check_common,
    check_length,
    check_limit,
    check_logprobs,
    check_media,
    check_tools,
)

COMPLETION_DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class Asked:
    """One request of any endpoint that generates, checked."""

    chat: bool
    model: str
    prompts: tuple[bytes, ...]
    prompt_tokens: tuple[int, ...]
    max_tokens: int | None
    """None: no limit was set. 0: nothing is to be generated (`echo`)."""
    n: int = 1
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    request_id: str | None = None
    kv_params: dict[str, Any] | None = None
    reported_cached: int | None = None
    """`remote_prefill_cached_tokens`: what the prefill worker had in its cache, for the usage of the decode worker."""
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    echo: bool = False
    logprobs: int | None = None
    """Alternatives for every token of the answer; None: no log probabilities."""
    prompt_logprobs: int | None = None
    return_ids: bool = False
    reports_found: bool = False
    session_id: str | None = None
    """`vllm_xargs.kv_cache_report_mode` is `full`: KV events also tell of blocks that were found."""
    ids_as_tokens: bool = False
    """`return_tokens_as_token_ids`: tokens in log probabilities are `token_id:N`."""

    @property
    def plain(self) -> bool:
        """One answer with nothing but its text: the fast way."""
        return (
            len(self.prompts) * self.n == 1
            and not self.echo
            and self.logprobs is None
            and self.prompt_logprobs is None
            and not self.return_ids
        )

    def without_prompt(self) -> Asked:
        """The same request with its long parts dropped, for the time of its answer."""
        return replace(self, prompts=(b"",) * len(self.prompts), kv_params=None)


def completion_request(fields: Mapping[str, Any], limits: Limits) -> Asked:
    """A completion request; ApiError for what vLLM refuses and for what this worker does not do."""
    check_logprobs(fields, chat=False)
    check_common(fields, limits)
    if optional(fields, "suffix", str):
        raise bad_request("suffix is not currently supported", "suffix")
    if fields.get("prompt_embeds"):
        raise bad_request("You must set `--enable-prompt-embeds` to input `prompt_embeds`", "prompt_embeds")
    echo = bool(optional(fields, "echo", bool))
    limit = whole(fields, "max_tokens")
    limit = _capped(COMPLETION_DEFAULT_TOKENS if limit is None else limit, limits)
    prompts = _prompts(fields, limits)
    logprobs = whole(fields, "logprobs")
    return _request(
        fields, limits, chat=False, prompts=prompts, limit=limit, limit_name="max_tokens", logprobs=logprobs, echo=echo
    )


def chat_request(fields: Mapping[str, Any], limits: Limits) -> Asked:
    """A chat request; ApiError for what vLLM refuses and for what this worker does not do."""
    check_logprobs(fields, chat=True)
    check_tools(fields, limits)
    check_common(fields, limits)
    logprobs = None
    if optional(fields, "logprobs", bool):
        logprobs = whole(fields, "top_logprobs") or 0
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    limit = _capped(whole(fields, name), limits)
    prompt = _forwarded(fields) or _chat_text(fields)
    return _request(
        fields, limits, chat=True, prompts=[prompt], limit=limit, limit_name=name, logprobs=logprobs, echo=False
    )


def sampling_of(fields: Mapping[str, Any], limits: Limits) -> Sampling:
    """The parameters that this model obeys."""
    return Sampling(
        min_tokens=whole(fields, "min_tokens") or 0,
        stop=_stop(fields, limits),
        stop_token_ids=tuple(whole_numbers(fields, "stop_token_ids")),
        include_stop=bool(optional(fields, "include_stop_str_in_output", bool)),
    )


def _request(
    fields: Mapping[str, Any],
    limits: Limits,
    *,
    chat: bool,
    prompts: Sequence[bytes],
    limit: int | None,
    limit_name: str,
    logprobs: int | None,
    echo: bool,
) -> Asked:
    model = check_model(fields, limits)
    options = optional(fields, "stream_options", dict) or {}
    sampling = sampling_of(fields, limits)
    check_limit(limit, sampling.min_tokens, limit_name, least=0 if echo else 1)
    prompt_logprobs = whole(fields, "prompt_logprobs")
    most = limits.front.max_logprobs
    for name, wanted in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if wanted is not None and (wanted > most >= 0 or wanted == -1 != most):
            sample = "sample" if name == "logprobs" else "prompt"
            raise bad_request(
                f"Requested {sample} logprobs of {wanted}, which is greater than max allowed: {most}",
                name,
            )
    sizes = [count_tokens(prompt) for prompt in prompts]
    for size in sizes:
        check_length(size, limit, limits)
    if limit is None and optional(fields, "ignore_eos", bool):
        limit = limits.max_model_len - sizes[0]
    kv_params = optional(fields, "kv_transfer_params", dict)
    include_usage = bool(options.get("include_usage"))
    return Asked(
        chat=chat,
        model=model,
        prompts=tuple(prompts),
        prompt_tokens=tuple(sizes),
        max_tokens=limit,
        n=_answers(fields, limits),
        sampling=sampling,
        stream=bool(optional(fields, "stream", bool)),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        request_id=optional(fields, "request_id", str),
        kv_params=kv_params,
        reported_cached=_reported(kv_params),
        priority=whole(fields, "priority") or 0,
        cache_salt=_salt(fields),
        adapter=model if model in limits.adapters else None,
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_ids=bool(optional(fields, "return_token_ids", bool)),
        reports_found=(optional(fields, "vllm_xargs", dict) or {}).get("kv_cache_report_mode") == "full",
        session_id=optional(fields, "session_id", str),
        ids_as_tokens=bool(optional(fields, "return_tokens_as_token_ids", bool)),
    )


def _prompts(fields: Mapping[str, Any], limits: Limits) -> list[bytes]:
    prompt = fields.get("prompt")
    if prompt is None or prompt == "":
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    many = isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)
    given = list(prompt) if isinstance(prompt, list) and many else [prompt]
    if len(given) > limits.front.max_prompts:
        raise bad_request(
            f"prompt list length {len(given)} exceeds the maximum allowed count of {limits.front.max_prompts}. To "
            "increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    prompts = [_truncated(text_or_ids(each, "prompt"), fields, limits) for each in given]
    if not all(prompts):
        raise bad_request("The decoder prompt cannot be empty", "prompt")
    return prompts


def _truncated(prompt: bytes, fields: Mapping[str, Any], limits: Limits) -> bytes:
    keep = whole(fields, "truncate_prompt_tokens")
    if keep is None:
        return prompt
    keep = limits.max_model_len - 1 if keep == -1 else keep
    ids = token_ids(prompt)
    if keep < 1 or keep > limits.max_model_len:
        raise bad_request(f"truncate_prompt_tokens must be between 1 and {limits.max_model_len}, got {keep}.")
    return from_token_ids(ids[:keep] if fields.get("truncation_side") == "right" else ids[-keep:])


def _forwarded(fields: Mapping[str, Any]) -> bytes | None:
    """A prefill worker's token ids, which spare the decode worker the template."""
    params = fields.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    return text_or_ids(ids, "kv_transfer_params.prompt_token_ids") if ids else None


def _chat_text(fields: Mapping[str, Any]) -> bytes:
    messages = optional(fields, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise bad_body("messages must be a list of objects", "messages")
    to_answer, open_end = fields.get("add_generation_prompt"), bool(fields.get("continue_final_message"))
    if open_end and to_answer:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    check_media(messages)
    try:
        return chat_prompt(messages, to_answer=to_answer is not False, open_end=open_end).encode()
    except UnicodeEncodeError as error:
        raise bad_request("the prompt is not valid Unicode", "messages") from error
    except ValueError as error:
        raise bad_request(str(error), "messages") from error


def _answers(fields: Mapping[str, Any], limits: Limits) -> int:
    n = whole(fields, "n")
    n = 1 if n is None else n
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > limits.front.max_answers:
        raise bad_request(
            f"n must be at most {limits.front.max_answers}, got {n}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    return n


def _stop(fields: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    stop = fields.get("stop")
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise bad_body("stop must be a string or a list of strings", "stop")
    if len(strings) > limits.front.max_stop_strings:
        raise bad_body(f"stop: at most {limits.front.max_stop_strings} stop strings are allowed", "stop")
    if not all(strings):
        raise bad_request("stop cannot contain an empty string.")
    return tuple(strings)


def _salt(fields: Mapping[str, Any]) -> str | None:
    salt: str | None = optional(fields, "cache_salt", str)
    if salt is not None and not 1 <= len(salt) <= 1024:
        raise bad_request("cache_salt must be a string of 1 to 1024 characters", "cache_salt")
    return salt


def _capped(limit: int | None, limits: Limits) -> int | None:
    most = limits.front.default_max_tokens
    return most if limit is None else limit if most is None else min(limit, most)


def _reported(kv_params: Mapping[str, Any] | None) -> int | None:
    if kv_params is None or not kv_params.get("do_remote_prefill"):
        return None
    cached = kv_params.get("remote_prefill_cached_tokens")
    return cached if isinstance(cached, int) else None
