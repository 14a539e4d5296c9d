"""The OpenAI-shaped requests of vLLM 0.33: read, checked, refused with vLLM's words. No I/O.

What changes nothing of a modelled answer (temperature, penalties, response formats, ...) is checked and accepted. What
this worker cannot do truthfully (beam search, forced tool calls, suffixes, embeddings as prompts) is refused with a 400
that says so, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prfaas.worker.errors import ApiError, bad_body, bad_request, no_such_model
from prfaas.worker.oracle import Sampling, chat_prompt, count_tokens, from_token_ids, token_ids

COMPLETION_DEFAULT_TOKENS = 16
_BOUNDS = {
    # name: least, most, whether least itself is allowed, vLLM's words, whether the parameter is named
    "temperature": (0.0, 2.0, True, "in [0, 2]", True),
    "top_p": (0.0, 1.0, False, "in (0, 1]", True),
    "min_p": (0.0, 1.0, True, "in [0, 1]", False),
    "presence_penalty": (-2.0, 2.0, True, "in [-2, 2]", False),
    "frequency_penalty": (-2.0, 2.0, True, "in [-2, 2]", False),
    "repetition_penalty": (0.0, math.inf, False, "greater than zero", False),
    "top_k": (-1, math.inf, True, "0 (disable), or at least 1", False),
}


@dataclass(frozen=True)
class Limits:
    """What the server allows and knows."""

    names: tuple[str, ...]
    adapters: frozenset[str] = frozenset()
    max_model_len: int = 131_072
    max_logprobs: int = 20
    max_prompts: int = 1024
    max_answers: int = 16_384
    max_stop_strings: int = 4
    default_max_tokens: int | None = None
    priorities: bool = False
    auto_tools: bool = False
    any_name: bool = False
    """Names are not checked."""


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


def parse_completion(raw: bytes, limits: Limits) -> Asked:
    """A completion request; ApiError for what vLLM refuses and for what this worker does not do."""
    return completion_request(parse_object(raw), limits)


def parse_chat(raw: bytes, limits: Limits) -> Asked:
    """A chat request; ApiError for what vLLM refuses and for what this worker does not do."""
    return chat_request(parse_object(raw), limits)


def completion_request(fields: Mapping[str, Any], limits: Limits) -> Asked:
    """As parse_completion, of parsed JSON."""
    _check_logprobs(fields, chat=False)
    _check_common(fields, limits)
    if _optional(fields, "suffix", str):
        raise bad_request("suffix is not currently supported", "suffix")
    if fields.get("prompt_embeds"):
        raise bad_request("You must set `--enable-prompt-embeds` to input `prompt_embeds`", "prompt_embeds")
    echo = bool(_optional(fields, "echo", bool))
    limit = _whole(fields, "max_tokens")
    limit = _capped(COMPLETION_DEFAULT_TOKENS if limit is None else limit, limits)
    prompts = _prompts(fields, limits)
    logprobs = _whole(fields, "logprobs")
    return _request(
        fields, limits, chat=False, prompts=prompts, limit=limit, limit_name="max_tokens", logprobs=logprobs, echo=echo
    )


def chat_request(fields: Mapping[str, Any], limits: Limits) -> Asked:
    """As parse_chat, of parsed JSON."""
    _check_logprobs(fields, chat=True)
    _check_tools(fields, limits)
    _check_common(fields, limits)
    logprobs = None
    if _optional(fields, "logprobs", bool):
        logprobs = _whole(fields, "top_logprobs") or 0
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    limit = _capped(_whole(fields, name), limits)
    prompt = _forwarded(fields) or _chat_text(fields)
    return _request(
        fields, limits, chat=True, prompts=[prompt], limit=limit, limit_name=name, logprobs=logprobs, echo=False
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; ApiError otherwise."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad_body(f"JSON decode error: {error}") from error
    if not isinstance(fields, dict):
        raise bad_body("the body must be a JSON object")
    return fields


def check_model(fields: Mapping[str, Any], limits: Limits) -> str:
    """The name that is asked for, or the first one; an empty or absent name is accepted."""
    model = _optional(fields, "model", str) or limits.names[0]
    if model in limits.names or model in limits.adapters:
        return str(model)
    if limits.any_name:
        return limits.names[0]
    raise no_such_model(model)


def text_or_ids(value: object, where: str) -> bytes:
    """A prompt: text, or token ids."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise bad_request("the prompt is not valid Unicode", where) from error
    if isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        try:
            return from_token_ids(value)
        except OverflowError as error:
            wrong = next(each for each in value if not 0 <= each < 2**32)
            if wrong < 0:
                raise bad_body(f"{where}: Input should be greater than or equal to 0", where) from error
            raise bad_request(f"Token id {wrong} is out of vocabulary", where) from error
    raise bad_body(f"{where} must be a string or a list of token ids", where)


def sampling_of(fields: Mapping[str, Any], limits: Limits) -> Sampling:
    """The parameters that this model obeys."""
    return Sampling(
        min_tokens=_whole(fields, "min_tokens") or 0,
        stop=_stop(fields, limits),
        stop_token_ids=tuple(_ids(fields, "stop_token_ids")),
        include_stop=bool(_optional(fields, "include_stop_str_in_output", bool)),
    )


def check_sampling(fields: Mapping[str, Any]) -> None:
    """Bounds of what is accepted and changes nothing."""
    for name, (least, most, closed, words, named) in _BOUNDS.items():
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_body(f"{name} must be a number", name)
        if not math.isfinite(value) or not (least <= value <= most) or (value == least and not closed):
            raise bad_request(f"{name} must be {words}, got {value}.", name if named else None)


def check_length(prompt_tokens: int, limit: int | None, limits: Limits) -> None:
    """Prompt and answer must fit into the context."""
    if prompt_tokens + (1 if limit is None else limit) > limits.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{1 if limit is None else limit} output tokens and your prompt contains {prompt_tokens} input tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
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
    options = _optional(fields, "stream_options", dict) or {}
    sampling = sampling_of(fields, limits)
    check_limit(limit, sampling.min_tokens, limit_name, least=0 if echo else 1)
    prompt_logprobs = _whole(fields, "prompt_logprobs")
    for name, wanted in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if wanted is not None and (wanted > limits.max_logprobs >= 0 or wanted == -1 != limits.max_logprobs):
            sample = "sample" if name == "logprobs" else "prompt"
            raise bad_request(
                f"Requested {sample} logprobs of {wanted}, which is greater than max allowed: {limits.max_logprobs}",
                name,
            )
    sizes = [count_tokens(prompt) for prompt in prompts]
    for size in sizes:
        check_length(size, limit, limits)
    if limit is None and _optional(fields, "ignore_eos", bool):
        limit = limits.max_model_len - sizes[0]
    kv_params = _optional(fields, "kv_transfer_params", dict)
    include_usage = bool(options.get("include_usage"))
    return Asked(
        chat=chat,
        model=model,
        prompts=tuple(prompts),
        prompt_tokens=tuple(sizes),
        max_tokens=limit,
        n=_answers(fields, limits),
        sampling=sampling,
        stream=bool(_optional(fields, "stream", bool)),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        request_id=_optional(fields, "request_id", str),
        kv_params=kv_params,
        reported_cached=_reported(kv_params),
        priority=_whole(fields, "priority") or 0,
        cache_salt=_salt(fields),
        adapter=model if model in limits.adapters else None,
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_ids=bool(_optional(fields, "return_token_ids", bool)),
        reports_found=(_optional(fields, "vllm_xargs", dict) or {}).get("kv_cache_report_mode") == "full",
        session_id=_optional(fields, "session_id", str),
        ids_as_tokens=bool(_optional(fields, "return_tokens_as_token_ids", bool)),
    )


def check_limit(limit: int | None, min_tokens: int, name: str, least: int = 1) -> None:
    """The limit of an answer, and its least length."""
    if limit is not None and limit < least:
        raise bad_request(f"{name} must be at least {least}, got {limit}.", name)
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.", "min_tokens")
    if limit is not None and min_tokens > limit:
        raise bad_request(f"min_tokens must be less than or equal to {name}={limit}, got {min_tokens}.", "min_tokens")


def _check_common(fields: Mapping[str, Any], limits: Limits) -> None:
    if fields.get("stream_options") and not fields.get("stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    form = _optional(fields, "response_format", dict) or {}
    if form.get("type") == "json_schema" and form.get("json_schema") is None:
        raise bad_request(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )
    structured = _optional(fields, "structured_outputs", dict) or {}
    if sum(structured.get(kind) is not None for kind in ("json", "regex", "choice")) > 1:
        raise bad_request(
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice').",
            "structured_outputs",
        )
    if _optional(fields, "use_beam_search", bool):
        raise bad_request("use_beam_search is not supported by this worker", "use_beam_search")
    check_sampling(fields)
    priority = _whole(fields, "priority") or 0
    if priority and not limits.priorities:
        raise bad_request(f"Got priority {priority} but Priority scheduling is not enabled.", "priority")


def _check_logprobs(fields: Mapping[str, Any], *, chat: bool) -> None:
    top = "top_logprobs" if chat else "logprobs"
    for name in ("prompt_logprobs", top):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise bad_request(f"`{name}` must be an integer.", name)
        if value is not None and value < -1:
            raise bad_request(f"`{name}` must be a positive value or -1.", name)
    if fields.get("stream") and (fields.get("prompt_logprobs") or 0) != 0:
        raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if chat and (fields.get("top_logprobs") or 0) != 0 and not fields.get("logprobs"):
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if fields.get("logprob_token_ids") and not fields.get("logprobs"):
        words = "be set to true" if chat else "be set"
        raise bad_request(f"when using `logprob_token_ids`, `logprobs` must {words}.", "logprob_token_ids")


def _check_tools(fields: Mapping[str, Any], limits: Limits) -> None:
    tools, choice = _optional(fields, "tools", list), fields.get("tool_choice")
    if tools == []:
        raise bad_request(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if choice == "none" or (choice is None and not tools):
        return
    choice = "auto" if choice is None else choice
    if not tools:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        _check_named_tool(choice, tools)
    elif choice not in ("auto", "required"):
        raise bad_request(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )
    if choice == "auto" and not limits.auto_tools:
        raise bad_request('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if choice != "auto":
        raise bad_request("a forced tool call is not supported by this worker: its answers are words", "tool_choice")


def _check_named_tool(choice: Mapping[str, Any], tools: Sequence[Any]) -> None:
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = choice.get("function")
    if not isinstance(function, dict):
        raise bad_request(
            f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}", "tool_choice.function"
        )
    if "name" not in function:
        raise bad_request(f"Expected field `name` in `function` in `tool_choice`! {usage}", "tool_choice.function.name")
    name = function["name"]
    if not isinstance(name, str) or not name:
        raise bad_request(
            f"Invalid `name` in `function`: `{name}` in `tool_choice`! {usage}", "tool_choice.function.name"
        )
    named = [(tool.get("function") or {}).get("name") for tool in tools if isinstance(tool, dict)]
    if name not in named:
        raise bad_request(
            "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
        )


def _prompts(fields: Mapping[str, Any], limits: Limits) -> list[bytes]:
    prompt = fields.get("prompt")
    if prompt is None or prompt == "":
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    many = isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)
    given = list(prompt) if isinstance(prompt, list) and many else [prompt]
    if len(given) > limits.max_prompts:
        raise bad_request(
            f"prompt list length {len(given)} exceeds the maximum allowed count of {limits.max_prompts}. To increase "
            "this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    prompts = [_truncated(text_or_ids(each, "prompt"), fields, limits) for each in given]
    if not all(prompts):
        raise bad_request("The decoder prompt cannot be empty", "prompt")
    return prompts


def _truncated(prompt: bytes, fields: Mapping[str, Any], limits: Limits) -> bytes:
    keep = _whole(fields, "truncate_prompt_tokens")
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
    messages = _optional(fields, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise bad_body("messages must be a list of objects", "messages")
    to_answer, open_end = fields.get("add_generation_prompt"), bool(fields.get("continue_final_message"))
    if open_end and to_answer:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    _check_media(messages)
    try:
        return chat_prompt(messages, to_answer=to_answer is not False, open_end=open_end).encode()
    except UnicodeEncodeError as error:
        raise bad_request("the prompt is not valid Unicode", "messages") from error
    except ValueError as error:
        raise bad_request(str(error), "messages") from error


def _check_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """Media by URL: this worker fetches none, and says what vLLM says of media that it cannot reach."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            where = part.get(kind) if isinstance(kind, str) and kind.endswith("_url") else None
            url = where.get("url") if isinstance(where, dict) else where
            if isinstance(url, str) and url.startswith(("http://", "https://")):
                raise ApiError(422, "UnprocessableEntityError", "The media at the given URL cannot be reached.")


def _answers(fields: Mapping[str, Any], limits: Limits) -> int:
    n = _whole(fields, "n")
    n = 1 if n is None else n
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > limits.max_answers:
        raise bad_request(
            f"n must be at most {limits.max_answers}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable."
        )
    return n


def _stop(fields: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    stop = fields.get("stop")
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise bad_body("stop must be a string or a list of strings", "stop")
    if len(strings) > limits.max_stop_strings:
        raise bad_body(f"stop: at most {limits.max_stop_strings} stop strings are allowed", "stop")
    if not all(strings):
        raise bad_request("stop cannot contain an empty string.")
    return tuple(strings)


def _salt(fields: Mapping[str, Any]) -> str | None:
    salt: str | None = _optional(fields, "cache_salt", str)
    if salt is not None and not 1 <= len(salt) <= 1024:
        raise bad_request("cache_salt must be a string of 1 to 1024 characters", "cache_salt")
    return salt


def _capped(limit: int | None, limits: Limits) -> int | None:
    most = limits.default_max_tokens
    return most if limit is None else limit if most is None else min(limit, most)


def _reported(kv_params: Mapping[str, Any] | None) -> int | None:
    if kv_params is None or not kv_params.get("do_remote_prefill"):
        return None
    cached = kv_params.get("remote_prefill_cached_tokens")
    return cached if isinstance(cached, int) else None


def _ids(fields: Mapping[str, Any], name: str) -> list[int]:
    ids = fields.get(name) or []
    if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise bad_body(f"{name} must contain only integers", name)
    return ids


def _whole(fields: Mapping[str, Any], name: str) -> int | None:
    value: int | None = _optional(fields, name, int)
    return value


def _optional(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = fields.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise bad_body(f"{name} must be {_KINDS[kind]}", name)
    return value


_KINDS: dict[type[Any], str] = {
    str: "a string",
    bool: "a boolean",
    dict: "an object",
    int: "a whole number",
    list: "a list",
}

__all__ = ["ApiError", "Asked", "Limits", "chat_request", "completion_request", "parse_chat", "parse_completion"]
